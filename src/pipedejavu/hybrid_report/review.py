"""A recorded run of HybridAdamW compared with the simulation of the program of its steps.

    run = read_run(optimizer, recorder.finish())
    print(review(run))  # `pipedejavu compare` prints this for run.to_json()

Profile and machine come from the recording: how long forward, backward and update of each unit took, and how fast the
copies were. The program predicts which lane waits for which, and how long a step is.
"""

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from math import inf
from statistics import median

from pipedejavu.analysis import verify
from pipedejavu.facts import (
    Cost,
    Device,
    Host,
    InputError,
    Link,
    Machine,
    Profile,
    Timeline,
    Unit,
    UnitTime,
    format_seconds,
)
from pipedejavu.hybrid_report.recording import LANES, HybridRun, timeline_of
from pipedejavu.plan import Keep, Plan, Reduce, preset
from pipedejavu.program import ActionKind, Program, ValueKind, parse_action
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import Comparison, compare, render_html
from pipedejavu.simulate import simulate

_AFTER_UPDATE = ("UPDATE", "UPDATE~host", "FETCH:w", "OFFLOAD:o")
"""Updates and copies of their results, which extend into the next step; programs number them by the new version."""
_PASSES = (ActionKind.FORWARD, ActionKind.BACKWARD)
_UNLIMITED = 2**60
"""Bytes of a memory whose budget was not recorded."""
_INSTANT = 1e30
"""Bytes per second in a direction in which nothing was copied."""


@dataclass(frozen=True, kw_only=True)
class Review:
    """Prediction and measurement of the same steps, starting with the first forward."""

    program: Program
    predicted: Timeline
    measured: Timeline
    predicted_step_s: float
    measured_step_s: float
    notes: tuple[str, ...]
    """What the prediction leaves out."""

    def rows(self) -> dict[str, list[Comparison]]:
        """Returns by lane the times of the actions that the program has, one comparison per kind."""
        known = set(self.predicted.action)
        return {lane: compare(_part(self.predicted, lane, known), _part(self.measured, lane, known)) for lane in LANES}

    def unmodelled(self) -> dict[tuple[str, str], float]:
        """Returns the measured seconds of actions that the program does not have, by lane and kind."""
        known, times = set(self.predicted.action), dict[tuple[str, str], float]()
        for span in self.measured.spans():
            if span.action not in known:
                key = (span.lane, span.action.rstrip("0123456789@"))
                times[key] = times.get(key, 0.0) + span.end_s - span.start_s
        return times

    def __str__(self) -> str:
        lines = [f"{'':22} {'predicted':>10} {'measured':>10} {'predicted/measured':>19}"]
        for lane, rows in self.rows().items():
            lines += [_line(f"{lane:9} {row.kind}", row.predicted_s, row.measured_s) for row in rows]
            unmodelled = {kind: time_s for (of_lane, kind), time_s in self.unmodelled().items() if of_lane == lane}
            lines += [_line(f"{lane:9} {kind}", None, time_s) for kind, time_s in unmodelled.items()]
        lines.append(_line("step", self.predicted_step_s, self.measured_step_s))
        return "\n".join((*lines, *self.notes))

    def html(self, title: str) -> str:
        """Returns an HTML page with the prediction as the first worker and the measurement as the second."""
        both = (self.predicted, self.measured)
        worker, lane, action, start, end = zip(
            *((n, *span[1:]) for n, timeline in enumerate(both) for span in timeline.spans()), strict=True
        )
        timeline = self.measured.replace(
            makespan_s=max(t.makespan_s for t in both),
            bubble_fraction=sum(t.bubble_fraction for t in both) / len(both),
            workers=tuple(t.workers[0].replace(worker=n, device=t.origin) for n, t in enumerate(both)),
            worker=worker, lane=lane, action=action, start_s=start, end_s=end,
        )  # fmt: skip
        step = f"a step: predicted {format_seconds(self.predicted_step_s)}"
        notes = (f"{step}, measured {format_seconds(self.measured_step_s)}", *self.notes)
        return render_html(timeline, title, self.program.plan.axes(), notes=notes)


def _part(timeline: Timeline, lane: str, known: Container[str]) -> Timeline:
    """Returns the known actions of one lane."""
    kept = [n for n, at in enumerate(timeline.lane) if at == lane and timeline.action[n] in known]
    columns = {
        c: tuple(getattr(timeline, c)[n] for n in kept) for c in ("worker", "lane", "action", "start_s", "end_s")
    }
    return timeline.replace(**columns)


def _line(name: str, predicted_s: float | None, measured_s: float) -> str:
    predicted = "–" if predicted_s is None else format_seconds(predicted_s)
    ratio = f"{predicted_s / measured_s:.3f}" if measured_s and predicted_s is not None else "–"
    measured = format_seconds(measured_s) if measured_s else "–"
    return f"{name:22} {predicted:>10} {measured:>10} {ratio:>19}"


def review(run: HybridRun, machine: Machine | None = None) -> Review:
    """Predicts the recorded steps and compares them; `machine` replaces the recorded one, for other links."""
    _check_modelled(run)
    profile = profile_of(run, has_copies=machine is None)
    program = compile_plan(plan_of(run), profile, machine or machine_of(run))
    prediction = simulate(program, verify(program))
    timeline = prediction.timeline()
    begins = [span.start_s for span in timeline.spans() if span.action.startswith("F0.")]
    return Review(
        program=program,
        predicted=_recorded_steps(timeline, begins[1]),
        measured=run.timeline(),
        predicted_step_s=begins[-1] - begins[-2],
        measured_step_s=run.step_s,
        notes=tuple(_notes(run)),
    )


def plan_of(run: HybridRun) -> Plan:
    """Returns the plan of the run; it has one step more, whose updates the first recorded step waits for."""
    plan = preset("cotrain").at(microbatches=1, samples=1, steps=run.num_steps + 1)
    reduce = Reduce(clip="global") if run.is_clipped else Reduce()
    ahead = int((run.window or 1) > 1)  # while one block is computed, the next is fetched
    keep = Keep(kind="split", places=run.places, visitors=_num_fetched_early(run), window=(run.window or 1) - ahead)
    return plan.replace(reduce=reduce, order=plan.order.replace(prefetch=ahead), keep=keep)


def _num_fetched_early(run: HybridRun) -> int:
    """Returns how many units' streamed state is fetched during a backward pass; the rest waits for returns."""
    ends = _ends(run)
    starts: dict[tuple[int, int], float] = {}
    for work in run.work:
        if work.kind == "FETCH:o":
            starts.setdefault((work.unit, work.step), work.start_s)
    counts = [sum(start < end for (_, s), start in starts.items() if s == step) for step, end in ends.items()]
    return max(1, int(median(counts))) if counts else 1


def _ends(run: HybridRun) -> dict[int, float]:
    """Returns when the backward pass of each step ended."""
    ends: dict[int, float] = defaultdict(float)
    for work in run.work:
        if work.kind == ActionKind.BACKWARD:
            ends[work.step] = max(ends[work.step], work.end_s)
    return ends


def profile_of(run: HybridRun, *, has_copies: bool = True) -> Profile:
    """Returns a profile with the median times of the recorded steps.

    Units that were not updated on the GPU, or not on the host, get a time there by the rate of the others, so that
    other placements can be predicted too. With `has_copies`, recorded copies take their measured times; other copies
    follow the links of the machine.
    """
    times = _median_times(run)
    sizes = [unit.num_parameters for unit in run.units]
    gpu_s, host_s = ({n: s for (kind, n), s in times.items() if kind == k} for k in ("UPDATE", "UPDATE~host"))
    gpu_s = gpu_s or _between_s(run)
    gpu_rate, host_rate = (sum(s.values()) / max(1, sum(sizes[n] for n in s)) for s in (gpu_s, host_s))
    units = []
    for n, unit in enumerate(run.units):
        gpu = UnitTime(
            forward=Cost(fixed_s=times.get((ActionKind.FORWARD, n), 0.0) + times.get(("loop", n), 0.0)),
            backward=Cost(fixed_s=times.get((ActionKind.BACKWARD, n), 0.0)),
            update_s=gpu_s.get(n, gpu_rate * sizes[n]),
            copy_s={kind: time_s for (kind, k), time_s in times.items() if has_copies and k == n and ":" in kind},
        )
        units.append(
            Unit(
                name=f"{n} {unit.name}",
                times={"gpu": gpu, "cpu": UnitTime(update_s=host_s.get(n, host_rate * sizes[n]))},
                parameter_bytes=unit.weight_bytes, gradient_bytes=unit.gradient_bytes, optimizer_bytes=unit.state_bytes,
            )
        )  # fmt: skip
    return Profile(name="recorded run", units=tuple(units))


def machine_of(run: HybridRun) -> Machine:
    """Returns a machine of one GPU and its host, with links at the rates of the recorded copies."""
    return Machine(
        name="recorded machine",
        hosts=(Host(name="host"),),
        devices=(
            Device(name="gpu", kind="gpu", type="gpu", host="host", memory_bytes=run.gpu_bytes or _UNLIMITED),
            Device(name="cpu", kind="cpu", type="cpu", host="host", memory_bytes=run.host_bytes or _UNLIMITED),
        ),
        links=(
            Link(source="cpu", target="gpu", bytes_per_s=_rate(run, "copy-in")),
            Link(source="gpu", target="cpu", bytes_per_s=_rate(run, "copy-out")),
        ),
    )


def _check_modelled(run: HybridRun) -> None:
    if run.microbatches > 1:
        raise InputError(
            f"a step has {run.microbatches} backward passes, and the recorder records only the first forward of each;"
            " record with microbatches=1"
        )


def _median_times(run: HybridRun) -> dict[tuple[str, int], float]:
    """Returns by kind and unit the median over the steps of the time per step, which ignores single outliers.

    Gradients and state are copied in parts, which are added up. Weights are copied whole, in a window more than once
    per step, so for them it is the median per copy. Work after the last backward pass overlaps with no forward and is
    left out.
    """
    last = _ends(run).get(run.num_steps, inf)
    sums: dict[tuple[str, int], dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for work in run.work:
        if work.start_s >= last:
            continue
        part = work.start_s if work.kind in ("FETCH:w", "OFFLOAD:w") else work.step
        sums[work.kind, work.unit][part] += work.end_s - work.start_s
    return {key: median(parts.values()) for key, parts in sums.items()}


def _between_s(run: HybridRun) -> dict[int, float]:
    """Returns estimated update times on the GPU for recordings without them: the time between backward and forward.

    It is divided in proportion to parameters. Returns nothing if the first unit waits for a copy in that time.
    """
    if run.places[0] not in ("device", "visit"):
        return {}
    begins, ends = {w.step: w.start_s for w in run.work if w.kind == ActionKind.FORWARD and w.unit == 0}, _ends(run)
    between = median(max(0.0, begins[step + 1] - end) for step, end in ends.items() if step + 1 in begins)
    sizes = {n: u.num_parameters for n, u in enumerate(run.units) if run.places[n] in ("device", "visit")}
    return {n: between * size / max(1, sum(sizes.values())) for n, size in sizes.items()}


def _rate(run: HybridRun, lane: str) -> float:
    """Returns the bytes per second of one direction, averaged over its copies."""
    moved = {(w.kind, w.unit, w.step) for w in run.work if w.lane == lane}
    size = sum(_size_bytes(run, kind, unit) for kind, unit, _ in moved)
    time = sum(w.end_s - w.start_s for w in run.work if w.lane == lane)
    return size / time if size and time else _INSTANT


def _size_bytes(run: HybridRun, kind: str, unit: int) -> int:
    recorded = run.units[unit]
    sizes = {
        ValueKind.WEIGHT_GRADIENT: recorded.gradient_bytes,
        ValueKind.WEIGHTS: recorded.weight_bytes,
        ValueKind.OPTIMIZER_STATE: recorded.state_bytes,
    }
    return sizes[ValueKind(kind[-1])]


def _recorded_steps(timeline: Timeline, begin_s: float) -> Timeline:
    """Returns the timeline from the first forward of the second step, without the remaining work of the first.

    Actions that take no time are left out too, since the recorder does not see them.
    """
    rows = []
    for _, lane, text, start, end in timeline.spans():
        action = parse_action(text)
        step = action.microbatch if action.kind in _PASSES else action.version - text.startswith(_AFTER_UPDATE)
        if step > 0 and action.kind not in (ActionKind.DROP, ActionKind.REDUCE):
            rows.append((lane, text, start - begin_s, end - begin_s))
    return timeline_of("predicted", sorted(rows, key=lambda row: row[2]))


def _notes(run: HybridRun) -> Iterable[str]:
    kinds = {(work.kind, work.unit) for work in run.work}
    if (ActionKind.BACKWARD, len(run.units) - 1) not in kinds:
        yield f"the backward of the last unit, {len(run.units) - 1}, is recorded as part of its forward"
    if run.places[0] in ("device", "visit") and not any(kind == ActionKind.UPDATE for kind, _ in kinds):
        yield "what the GPU updates itself is not recorded, and takes the time between a backward pass and a forward"
    if run.window is not None and run.window > 2:
        yield f"the program brings blocks up to {run.window - 1} ahead into the window, the optimizer brings one ahead"
    if speculative := sum(action.endswith("~guess") for _, action, _, _ in run.spans):
        yield f"not modelled: speculative updates during the backward pass (updates: {speculative})"
    if deferred := sum(action.endswith("~moments") for _, action, _, _ in run.spans):
        yield f"not modelled: moments that are written after the weights of all units (updates: {deferred})"
