"""A unit that ends in a linear head and its cross-entropy, with these in chunks of tokens: its times and bytes."""

from typing import Annotated

from pydantic import Field

from pipedejavu.facts.quantity import PartBytes
from pipedejavu.facts.record import Record

Ratio = Annotated[float, Field(gt=0)]


class HeadForm(Record):
    """The unit with its head in some number of chunks; 1 is the unit as the model has it."""

    chunks: int = Field(ge=1)
    forward: dict[str, Ratio] = Field(default_factory=dict)
    """By kind of device: the time of its forward, as a multiple of that of 1 chunk. Empty if it was not measured."""
    backward: dict[str, Ratio] = Field(default_factory=dict)
    """The same of its backward."""
    activation_bytes: PartBytes = 0.0
    """Bytes that autograd saves for the backward pass, per sample."""
    activation_parts: tuple[PartBytes, ...] = ()
    forward_work_bytes: PartBytes = 0.0
    backward_work_bytes: PartBytes = 0.0
    boundary_bytes: PartBytes = 0.0
    """Bytes of its output, per sample: of the logits, which exist only if they are in one chunk."""

    def forward_ratio(self, kind: str) -> float:
        """Returns the ratio of forwards on a kind of device; of a kind that was not measured, the largest known."""
        return self.forward.get(kind, max(self.forward.values(), default=1.0))

    def backward_ratio(self, kind: str) -> float:
        """Returns the ratio of backwards on a kind of device; of a kind that was not measured, the largest known."""
        return self.backward.get(kind, max(self.backward.values(), default=1.0))


def form_at(forms: tuple[HeadForm, ...], chunks: int) -> HeadForm:
    """Returns the form with some number of chunks, between the measured ones.

    Bytes are linear in the size of a chunk, and times in the number of chunks. More chunks than any that were measured
    have the bytes of the most.
    """
    ordered = sorted(forms, key=lambda form: form.chunks)
    before = next(form for form in reversed(ordered) if form.chunks <= chunks)
    after = next((form for form in ordered if form.chunks >= chunks), None)
    if before is after:
        return before
    if after is None:
        near = ordered[-2] if len(ordered) > 1 else before
        return _between(near, before, chunks).replace(
            activation_bytes=before.activation_bytes,
            activation_parts=before.activation_parts,
            forward_work_bytes=before.forward_work_bytes,
            backward_work_bytes=before.backward_work_bytes,
            boundary_bytes=before.boundary_bytes,
        )
    return _between(before, after, chunks)


def _between(low: HeadForm, high: HeadForm, chunks: int) -> HeadForm:
    """Returns the form on the lines through two others."""
    step = (chunks - low.chunks) / (high.chunks - low.chunks)
    part = (1 / chunks - 1 / high.chunks) / (1 / low.chunks - 1 / high.chunks)

    def size(name: str) -> float:
        return max(0.0, part * float(getattr(low, name)) + (1 - part) * float(getattr(high, name)))

    def ratios(name: str) -> dict[str, float]:
        first, last = getattr(low, name), getattr(high, name)
        return {kind: max(1e-3, first.get(kind, 1.0) + step * (last[kind] - first.get(kind, 1.0))) for kind in last}

    return HeadForm(
        chunks=chunks,
        forward=ratios("forward"),
        backward=ratios("backward"),
        activation_bytes=size("activation_bytes"),
        activation_parts=high.activation_parts,
        forward_work_bytes=size("forward_work_bytes"),
        backward_work_bytes=size("backward_work_bytes"),
        boundary_bytes=0.0,
    )
