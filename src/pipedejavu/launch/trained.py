"""The result of a run: its weights, the predicted and the measured timeline, and the audit of its log."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from torch import Tensor

from pipedejavu.engine import Applied, Event, Log, Outcome, UncutModel, Verdict, audit, judge
from pipedejavu.engine.job import Masked, Read, Reread, Scored
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
    """A finished run: its folder, and the prediction and measurement of one round of the program."""

    options: TrainOptions
    folder: RunFolder
    program: Program
    prediction: Prediction
    measured: Timeline
    outcome: Outcome
    moves: tuple[Move, ...]
    rounds_s: tuple[float, ...]
    """Time of each round after the first, from the end of the round before, on the first worker."""
    grown_bytes: tuple[int, ...]
    """Per worker, the growth of its process since the model was built; on a GPU all memory that it used."""

    def step_s(self, warm_up: int) -> float:
        """Returns the time per update: the median over the rounds after the warm-up.

        An asynchronous plan has a single round of many updates.
        """
        late = self.rounds_s[warm_up:]
        return median(late) if late else self.measured.makespan_s / self.program.plan.steps


def gather(
    folder: RunFolder, options: TrainOptions, program: Program, prediction: Prediction, results: Sequence[WorkerResult]
) -> TrainedRun:
    """Merges the results of all workers and writes the weights and timelines to the run folder."""
    weights: Weights = {}
    others: dict[str, Tensor] = {}
    for result in results:
        others |= result.others
        for piece, named in result.weights.items():
            weights.setdefault(piece, {}).update(named)
    facts = [result.facts for result in results]
    names: dict[str, str] = facts[0]["names"]
    folder.write_model(others | {names.get(name, name): w for name, w in result_of(program, weights).items()})
    moves = [(int(update), tuple(map(tuple, moved))) for update, moved in facts[0]["moves"]]
    if moves:
        # The last round had other shares than the first, so it is compared with a forecast for those shares.
        prediction = simulate(replace(program, parts=moves[-1][1]))
        folder.write_last(folder.predicted, prediction.timeline().to_json(indent=None))
    measured = _timeline(program, facts)
    folder.write_last(folder.measured, measured.to_json(indent=None))
    folder.write_pending()
    folder.remove_parts()
    logs = tuple(map(_log, facts))
    ends = facts[0]["ends_s"]
    return TrainedRun(
        options, folder, program, prediction, measured, Outcome(weights, logs, ()), tuple(moves),
        tuple(after - before for before, after in pairwise(ends)),
        tuple(worker["peak_bytes"] - worker["base_bytes"] for worker in facts),
    )  # fmt: skip


def audit_run(done: TrainedRun) -> dict[str, float]:
    """Replays a run that kept its log; returns the largest difference per parameter."""
    job, batches = _open_again(done)
    return audit(done.program, job, batches, done.outcome, _uncut(batches))


def judge_run(done: TrainedRun) -> Verdict:
    """Replays a run that kept its log; returns whether it differs by more than rounding."""
    job, batches = _open_again(done)
    return judge(done.program, job, batches, done.outcome, _uncut(batches))


def _open_again(done: TrainedRun) -> Prepared:
    """Returns the model and the sample order that a run began with."""
    job, batches = prepare(done.options, done.program.sizes, done.program.plan.cut.begins)
    for update, parts in done.moves:
        batches.change(update, [size for part in parts for size in part])
    return Prepared(job, batches)


def _uncut(batches: SampleOrder) -> UncutModel:
    is_chain = batches.cut.method == "chain"
    return UncutModel(batches.task.model, batches.own_inputs, _one if is_chain else as_call, batches.task.loss, tell)


def _one(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a chain, which takes one value."""
    return (inputs,), {}


_PLAIN = {kind.__name__: kind for kind in (Read, Reread, Scored, Masked)}
"""Events of plain numbers."""


def _log(facts: dict[str, Any]) -> Log:
    """Returns a worker's log from its JSON form."""
    events: list[Event] = []
    for kind, *fields in facts.get("events", ()):
        if kind in _PLAIN:
            events.append(_PLAIN[kind](*fields))
        else:
            piece, replica, version, microbatches, coefficient = fields
            events.append(Applied(piece, replica, version, tuple(microbatches), coefficient))
    return Log(events=events, skipped={int(step): reason for step, reason in facts.get("skipped", {}).items()})


def _timeline(program: Program, facts: list[dict[str, Any]]) -> Timeline:
    """Returns the spans of all workers' last round as a timeline."""
    spans = [Span(*span) for worker in facts for span in worker["spans"]]
    makespan = max(span.end_s for span in spans)
    workers, trainers = [], 0
    for index, worker in enumerate(facts):
        busy = sum(s.end_s - s.start_s for s in spans if s.worker == index and s.lane == "compute")
        trainers += bool(program.held(index))
        workers.append(
            WorkerSummary(
                worker=index,
                device=program.devices[index],
                busy_s=busy,
                peak_bytes=worker["peak_bytes"],
                peak_live_microbatches=worker["peak_live"],
                weight_versions=worker["peak_versions"],
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
