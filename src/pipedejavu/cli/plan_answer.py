"""What `plan` says of its answer: why the best plan is the best, what decides between plans, what to change first."""

from collections.abc import Sequence
from typing import NamedTuple

from pipedejavu.facts import format_bytes, format_seconds
from pipedejavu.search import Advised, GivenUp, MemoryNeed, RankedPlan, SearchResult
from pipedejavu.search.ranking import NEAR
from pipedejavu.search.rivals import describe_rivals


class PlanAnswer(NamedTuple):
    """The result of a search, plans that need less memory, and advice."""

    result: SearchResult
    leaner: tuple[RankedPlan, ...]
    advice: Advised
    given_up: GivenUp | None = None
    """What the best plan gives up against the fastest exact one, if it is stale."""


def explain(best: RankedPlan, answer: PlanAnswer, *, by_price: bool = False) -> list[str]:
    """Returns sentences on why the best plan is the best, what it decides, and what to buy or change first."""
    others = [other for other in answer.result.candidates if other is not best]
    lines, cost = [f"'{best.plan.name}' wins: {best.bound}."], "costs {}× as much" if by_price else "takes {}× as long"
    if others:
        next_ = others[0]
        ratio = _score(next_, by_price) / _score(best, by_price) if _score(best, by_price) else 1.0
        if ratio * NEAR < 1:
            lines[0] += f" '{next_.plan.name}' {cost.format(f'{ratio:.2f}')}, but lost more accuracy in the study."
        elif ratio < NEAR:
            lines[0] += (
                f" '{next_.plan.name}' {cost.format(f'{ratio:.3f}')}; of plans within 1 % the simplest comes first."
            )
        else:
            lines[0] += f" '{next_.plan.name}' {cost.format(f'{ratio:.2f}')}: {next_.bound}."
    lines += filter(None, [str(answer.given_up or ""), describe_rivals([best, *others])])
    lines += [f"  {reason}" for reason in best.reasons]
    if not best.is_runnable:
        lines.append(f"It is only costed: {best.only_costed}.")
    advice, left = answer.advice
    if advice:
        first, *rest = advice
        text = f"To change first: with {first.change}, {first.gain:.2f}× {'cheaper' if by_price else 'faster'}"
        more = "; ".join(f"with {a.change}, {a.gain:.2f}×" for a in rest[:3])
        lines.append(f"{text} ({format_seconds(first.time_s)} an update){f'; {more}' if more else ''}.")
    elif not left:
        better = "cheaper" if by_price else "faster"
        lines.append(f"Neither memory, links, a larger batch nor older weights would make it 2 % {better}.")
    if left:
        lines.append(f"There was no time to see what it would be with {'; with '.join(left)}.")
    return lines


def _score(plan: RankedPlan, by_price: bool) -> float:
    return plan.price if by_price else plan.time_per_sample_s


def describe_memory(needs: Sequence[MemoryNeed]) -> str:
    """Returns the memory that each device needs, of the memory it has; devices with equal figures share one entry."""
    groups: dict[tuple[str, str], list[str]] = {}
    for need in needs:
        held = f" ({format_bytes(need.reserved_bytes)} reserved)" if need.reserved_bytes else ""
        groups.setdefault((format_bytes(need.need_bytes) + held, format_bytes(need.room_bytes)), []).append(need.device)
    parts = []
    for (need_text, limit), names in groups.items():
        devices = names[0] if len(names) == 1 else f"{len(names)} × {names[0]}…"
        parts.append(f"{devices} {need_text} of {limit}")
    return ", ".join(parts[:3]) + (f", {len(parts) - 3} more" if len(parts) > 3 else "")
