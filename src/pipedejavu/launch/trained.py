"""What a run leaves: its weights and both timelines, gathered from what its workers wrote, and the audit of its log."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from torch import Tensor

from pipedejavu.engine import Applied, Event, Log, Outcome, Read, Scored, UncutModel, Verdict, audit, judge
from pipedejavu.facts import Span, Timeline, WorkerSummary
from pipedejavu.facts.printable import tell
from pipedejavu.launch.worker import Move
from pipedejavu.profile.model_trace import as_call
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder, result_of
from pipedejavu.run.worker_result import Weights, WorkerResult
from pipedejavu.simulate import Prediction, simulate
from pipedejavu.source.task import Prepared, SampleOrder, prepare


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, what was predicted and what was measured of one round of the program."""

    options: TrainOptions
    folder: RunFolder
    program: Program
    prediction: Prediction
    measured: Timeline
    outcome: Outcome
    moves: tuple[Move, ...]
    rounds_s: tuple[float, ...]
    """How long each round but the first took, from end to end, on the first worker."""
    grown_bytes: tuple[int, ...]
    """How much memory the process of each worker has taken since its model was built; on a GPU all that it has."""

    def step_s(self, warm_up: int) -> float:
        """Returns the time of an update, the median over rounds behind the first ones.

        A plan without a common moment has one round, of many updates.
        """
        late = self.rounds_s[warm_up:]
        return median(late) if late else self.measured.makespan_s / self.program.plan.steps


def gather(
    folder: RunFolder, options: TrainOptions, program: Program, prediction: Prediction, results: Sequence[WorkerResult]
) -> TrainedRun:
    """Takes what the workers of a run left and writes what stays."""
    weights: Weights = {}
    others: dict[str, Tensor] = {}
    for result in results:
        others |= result.others
        for place, named in result.weights.items():
            weights.setdefault(place, {}).update(named)
    parts = [result.facts for result in results]
    names: dict[str, str] = parts[0]["names"]
    folder.write_model(others | {names.get(name, name): w for name, w in result_of(program, weights).items()})
    moves = [(int(update), tuple(map(tuple, moved))) for update, moved in parts[0]["moves"]]
    if moves:
        # The last round had other shares than the first: it is their forecast that compares with it.
        prediction = simulate(replace(program, parts=moves[-1][1]))
        folder.write_last(folder.predicted, prediction.timeline().to_json(indent=None))
    measured = _timeline(program, parts)
    folder.write_last(folder.measured, measured.to_json(indent=None))
    folder.write_pending()
    folder.remove_parts()
    logs = tuple(_log(part) for part in parts)
    ends = parts[0]["ends_s"]
    return TrainedRun(
        options, folder, program, prediction, measured, Outcome(weights, logs, ()), tuple(moves),
        tuple(after - before for before, after in pairwise(ends)),
        tuple(part["peak_bytes"] - part["base_bytes"] for part in parts),
    )  # fmt: skip


def audit_run(done: TrainedRun) -> dict[str, float]:
    """Replays a run that kept its log; returns the largest difference of each parameter."""
    job, batches = _given(done)
    return audit(done.program, job, batches, done.outcome, _uncut(batches))


def judge_run(done: TrainedRun) -> Verdict:
    """Replays a run that kept its log, and judges whether it differs by more than rounding."""
    job, batches = _given(done)
    return judge(done.program, job, batches, done.outcome, _uncut(batches))


def _given(done: TrainedRun) -> Prepared:
    """Returns the model and the samples that a run began with."""
    job, batches = prepare(done.options, done.program.sizes, done.program.plan.cut.begins)
    for update, parts in done.moves:
        batches.change(update, [size for part in parts for size in part])
    return Prepared(job, batches)


def _uncut(batches: SampleOrder) -> UncutModel:
    is_chain = batches.cut.way == "chain"
    return UncutModel(batches.task.model, batches.own_inputs, _one if is_chain else as_call, batches.task.loss, tell)


def _one(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the call of a chain, which takes one value."""
    return (inputs,), {}


def _log(part: dict[str, Any]) -> Log:
    """Returns a worker's log from its JSON form."""
    events: list[Event] = []
    for kind, *fields in part.get("events", ()):
        if kind == "Read":
            events.append(Read(*fields))
        elif kind == "Scored":
            events.append(Scored(*fields))
        else:
            piece, replica, version, microbatches, coefficient = fields
            events.append(Applied(piece, replica, version, tuple(microbatches), coefficient))
    return Log(events=events, skipped={int(step): reason for step, reason in part.get("skipped", {}).items()})


def _timeline(program: Program, parts: list[dict[str, Any]]) -> Timeline:
    """Returns the spans of all workers' last round as a timeline."""
    spans = [Span(*span) for part in parts for span in part["spans"]]
    makespan = max(span.end_s for span in spans)
    workers, trainers = [], 0
    for index, part in enumerate(parts):
        busy = sum(s.end_s - s.start_s for s in spans if s.worker == index and s.lane == "compute")
        trainers += bool(program.held(index))
        workers.append(
            WorkerSummary(
                worker=index,
                device=program.devices[index],
                busy_s=busy,
                peak_bytes=part["peak_bytes"],
                peak_live_microbatches=part["peak_live"],
                weight_versions=part["peak_versions"],
            )
        )
    total = sum(w.busy_s for w in workers if program.held(w.worker))
    columns = zip(*spans, strict=True)
    return Timeline(
        origin="measured",
        makespan_s=makespan,
        bubble_fraction=1 - total / (makespan * trainers),
        workers=tuple(workers),
        **dict(zip(("worker", "lane", "action", "start_s", "end_s"), columns, strict=True)),
    )
