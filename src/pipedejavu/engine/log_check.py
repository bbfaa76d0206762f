"""Checks the log of a run against its plan: versions, microbatches and coefficients."""

from collections import defaultdict
from collections.abc import Sequence

from pipedejavu.analysis.verify import promised_versions
from pipedejavu.engine.job import Applied, Batches, Log, Masked, Read, Reread, Scored
from pipedejavu.engine.score import kept
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan
from pipedejavu.program import Action, ActionKind, Program


def check_replayable(plan: Plan) -> None:
    """Raises InputError for a plan whose runs have no replay."""
    if plan.version.kind == "torn":
        raise InputError(
            f"version 'torn' of plan '{plan.name}' records no versions, so there is nothing to replay; leave --audit"
            " out, or use preset:parameter-server"
        )


def check_log(program: Program, batches: Batches, logs: Sequence[Log]) -> None:
    """Raises InputError if versions, microbatches or coefficients are not those of the plan."""
    plan, size = program.plan, program.update_size
    updates: dict[tuple[int, int], list[int]] = defaultdict(list)
    for log in logs:
        for event in log.events:
            if isinstance(event, Reread):
                _check_reread(program, event)
                continue
            if isinstance(event, Read) and event.microbatch < 0:
                continue
            if isinstance(event, Read):
                low, high = _promised(program, event)
                if not low <= event.version <= high:
                    raise InputError(
                        f"the run read version {event.version} where the plan promises {low} to {high}: {event}"
                    )
                continue
            if isinstance(event, Scored | Masked):
                continue
            updates[event.piece, event.replica].append(event.version)
            if event.replica < program.num_replicas:
                first, count = (event.version - 1) * size, size
                if plan.feed.is_own:
                    first, count = first + event.replica * plan.feed.microbatches, plan.feed.microbatches
                microbatches = tuple(range(first, first + count))
                most = 1 / sum(batches.count(i) for i in microbatches)
                if event.microbatches != microbatches:
                    raise InputError(f"the run fed an update with other microbatches than {microbatches}: {event}")
                is_wrong = event.coefficient > most if plan.reduce.clip != "none" else event.coefficient != most
                if is_wrong:
                    raise InputError(f"the run gave gradients a coefficient other than {most}: {event}")
        if plan.reduce.combiner == "score-trim":
            _check_trusted(program, batches, log)
    _check_complete(program, updates)


def _check_reread(program: Program, event: Reread) -> None:
    """Raises InputError if a backward read other weights than the newest, or the plan has it read the forward's."""
    newest = event.microbatch // program.update_size
    if program.plan.version.correction != "discrepancy" or event.version != newest:
        raise InputError(f"the run's backward read version {event.version}, and the newest is {newest}: {event}")


def _check_trusted(program: Program, batches: Batches, log: Log) -> None:
    """Raises InputError if a server averaged the gradients of other replicas than its scores select."""
    scores: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in log.events:
        if isinstance(event, Scored):
            scores[event.piece, event.version].append(event.score)
        elif isinstance(event, Applied):
            trusted = kept(scores[event.piece, event.version], program.plan.reduce.trim)
            microbatches = tuple(i for q in trusted for i in program.fed_by(q, event.version - 1))
            coefficient = 1 / sum(batches.count(i) for i in microbatches) if microbatches else 0.0
            if (event.microbatches, event.coefficient) != (microbatches, coefficient):
                raise InputError(
                    f"the scores {scores[event.piece, event.version]} trust replicas {trusted}, but the run: {event}"
                )


def _promised(program: Program, event: Read) -> tuple[int, int]:
    """Returns the first and last version that a read may see; versions count through all rounds."""
    before, update = divmod(event.microbatch // program.update_size, program.plan.steps)
    microbatch = update * program.update_size + event.microbatch % program.update_size
    low, high = promised_versions(program, Action(ActionKind.FORWARD, event.piece, event.replica, microbatch))
    return before * program.plan.steps + low, before * program.plan.steps + high


def _check_complete(program: Program, updates: dict[tuple[int, int], list[int]]) -> None:
    """Raises InputError unless every piece had all updates in order."""
    held = {key for worker in range(len(program.workers)) for key in program.held(worker)}
    if program.plan.reduce.combiner == "score-trim":  # one update of the server for all replicas
        held = {(piece, program.num_replicas) for piece, _ in held}
    last = max((max(versions) for key, versions in updates.items() if key in held), default=0)
    whole = -(-max(last, 1) // program.plan.steps) * program.plan.steps
    for piece, replica in sorted(held):
        if updates[piece, replica] != [*range(1, whole + 1)]:
            versions = updates[piece, replica]
            raise InputError(f"piece {piece} of replica {replica} had updates {versions}, not 1 to {whole} in order")
