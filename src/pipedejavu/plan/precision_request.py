"""The precision that a user asks for, as text: what is computed, and the format of moments if it is not float32.

    bf16        bf16, int8 moments        auto, bf16 moments        bf16, split masters, int8 moments

The last is how a plan prints its precision; masters follow from the plan and are only checked.
"""

from typing import Literal, NamedTuple, get_args

from pipedejavu.facts import InputError, nearest
from pipedejavu.plan.axis import Precision

Compute = Literal["auto", "bf16", "fp16", "tf32", "fp32", "fp64"]
MomentName = Literal["fp32", "bf16", "int8"]
COMPUTES: tuple[str, ...] = get_args(Compute)
MOMENTS: tuple[str, ...] = get_args(MomentName)
_HOW = "write 'bf16', or 'bf16, int8 moments'"


class PrecisionRequest(NamedTuple):
    """A request, read from its text."""

    compute: Compute
    moments: MomentName | None = None
    """None if the text does not say."""
    masters: str | None = None

    @classmethod
    def read(cls, text: str) -> "PrecisionRequest":
        """Returns the request of a text; raises InputError if it is none."""
        compute, *others = (part.strip() for part in text.split(","))
        if compute not in COMPUTES:
            raise InputError(f"a precision is one of {', '.join(COMPUTES)}, not '{text}'{nearest(compute, COMPUTES)}")
        request = cls(compute)  # type: ignore[arg-type]
        for part in others:
            form, _, what = part.partition(" ")
            if what == "moments" and form in MOMENTS:
                request = request._replace(moments=form)  # type: ignore[arg-type]
            elif what == "moments":
                raise InputError(f"moments are {', '.join(MOMENTS)}, not '{form}'{nearest(form, MOMENTS)}; {_HOW}")
            elif what == "masters" and form in ("split", "fp32"):
                request = request._replace(masters=form)
            else:
                raise InputError(f"precision '{text}' has '{part}', which is neither moments nor masters; {_HOW}")
        return request

    def check_masters(self, precision: Precision) -> None:
        """Raises InputError if the request names other masters than a precision has."""
        if self.masters not in (None, precision.masters):
            raise InputError(
                f"{precision.compute} has masters '{precision.masters}' in this plan, not '{self.masters}'; leave the"
                " masters out, or set precision.masters in the plan"
            )

    def __str__(self) -> str:
        masters = f", {self.masters} masters" if self.masters else ""
        return self.compute + masters + (f", {self.moments} moments" if self.moments else "")


def check_request(text: str) -> str:
    """Returns the text of a request; raises InputError if it is none."""
    return str(PrecisionRequest.read(text))
