"""What happens at a tick: running jobs make room for those ranked before them, are tuned, and grow or shrink."""

from pipedejavu.cluster.allocation import tuned_share
from pipedejavu.cluster.cluster_job import Share
from pipedejavu.cluster.cluster_state import ClusterState
from pipedejavu.cluster.job_placement import place
from pipedejavu.cluster.job_run import JobRun
from pipedejavu.cluster.policy import RankedJob
from pipedejavu.cluster.server_pool import ServerPart


def run_round(state: ClusterState) -> None:
    """Preempts, tunes and resizes running jobs."""
    if state.waiting:
        _shrink(state)
    if (state.waiting and state.policy.is_preemptive) or _moves(state):
        _make_room(state)
    if state.options.allocation == "tuned":
        _tune(state)
    if not state.waiting:
        _grow(state)


def may_change(state: ClusterState) -> bool:
    """Whether a later tick could change anything."""
    runs = [state.runs[index] for index in state.running]
    if (state.waiting and state.policy.is_preemptive) or _moves(state):
        return True
    if state.waiting and any(_extra_milli(run) > 0 for run in runs):
        return True
    if state.options.allocation == "tuned" and any(_wanted(state, run) for run in runs):
        return True
    return not state.waiting and any(run.share and run.share.gpu_milli < run.job.counts()[-1] for run in runs)


def _moves(state: ClusterState) -> bool:
    return state.policy.moves and any(len(state.rates[index]) > 1 for index in state.running)


def _make_room(state: ClusterState) -> None:
    """Preempts the jobs that are ranked after those that fill the cluster, and places these."""
    choices = state.rank([*state.running, *state.waiting])
    left, wanted = {kind: state.pool.capacity(kind) for kind in state.shapes}, []
    for choice in choices:
        run, kinds = state.runs[choice.number], choice.kinds
        if run.share is not None and not state.policy.moves:
            kinds = (run.share.kind, *(kind for kind in kinds if kind != run.share.kind))
        sizes = {kind: state.shares(run, kind, run.job.gpu_milli)[-1] for kind in kinds}
        kind = next((kind for kind in kinds if left[kind].covers(sizes[kind])), None)
        if kind is not None:
            left[kind] = left[kind].without(sizes[kind])
            wanted.append(RankedJob(choice.number, (kind, *(k for k in choice.kinds if k != kind))))
        elif run.share is not None:
            state.preempt(run)
    for choice in wanted:
        run = state.runs[choice.number]
        if run.share is not None and run.share.kind != choice.kinds[0]:
            state.preempt(run)
    for position, choice in enumerate(wanted):
        run = state.runs[choice.number]
        if not run.is_running and not place(state, run, choice.kinds):
            _clear(state, run, choice.kinds[0], wanted[position + 1 :])


def _clear(state: ClusterState, run: JobRun, kind: str, later: list[RankedJob]) -> None:
    """Places a job for which enough devices are free but not together, by preempting jobs ranked after it."""
    share = state.shares(run, kind, run.job.gpu_milli)[-1]
    trial, victims = state.pool.copy(), []
    for choice in reversed(later):
        other = state.runs[choice.number]
        if other.share is None or other.share.kind != kind:
            continue
        trial.give(other.parts)
        victims.append(other)
        parts = trial.find(share)
        if parts is None:
            continue
        servers = {part.server for part in parts}
        for victim in victims:
            if servers & {part.server for part in victim.parts}:
                state.preempt(victim)
        place(state, run, (kind,))
        return


def _wanted(state: ClusterState, run: JobRun) -> Share | None:
    """Returns the share that a running job would be faster with, on the GPUs that it holds."""
    assert run.share is not None
    share = tuned_share(run.job, run.share.kind, state.shapes[run.share.kind], run.share.gpu_milli)
    return share if share is not None and share.steps_per_s > run.share.steps_per_s else None


def _tune(state: ClusterState) -> None:
    """Gives running jobs free cores and memory that make them faster."""
    for choice in state.rank(list(state.running)):
        run = state.runs[choice.number]
        share = _wanted(state, run)
        if share is None or len(run.parts) > 1:
            continue
        (part,) = run.parts
        cores = int(state.pool.cores[part.server]) + part.cores_milli
        memory = int(state.pool.memory[part.server]) + part.memory_bytes
        best = run.job.table.best(share.kind, share.gpu_milli, cores, memory)
        assert run.share is not None
        if best is not None and best.steps_per_s > run.share.steps_per_s:
            state.retune(run, best)


def _shrink(state: ClusterState) -> None:
    """Takes elastic jobs back to what they asked for, those with most first, until the first waiting job fits."""
    first = state.rank(list(state.waiting))[0]
    waiting = state.runs[first.number]
    larger = [run for i in state.running if (run := state.runs[i]).share and _extra_milli(run) > 0]
    for run in sorted(larger, key=lambda run: (-_extra_milli(run), run.index)):
        shares = [s for kind in first.kinds for s in state.shares(waiting, kind, waiting.job.gpu_milli)]
        if any(state.pool.find(share) is not None for share in shares):
            return
        assert run.share is not None
        kind = run.share.kind
        if kind in first.kinds:
            state.preempt(run)
            run.num_preemptions -= 1  # it is resized at once
            place(state, run, (kind,))


def _extra_milli(run: JobRun) -> int:
    return run.share.gpu_milli - run.job.gpu_milli if run.share else 0


def _grow(state: ClusterState) -> None:
    """Gives elastic jobs more of the free GPUs, if that ends them earlier in spite of the restart."""
    for index in sorted(state.running, key=lambda index: state.runs[index].job.arrival_s):
        run = state.runs[index]
        larger = _larger(state, run)
        if larger is not None:
            state.stop(run)
            state.start(run, *larger)


def _larger(state: ClusterState, run: JobRun) -> tuple[Share, list[ServerPart]] | None:
    """Returns the most GPUs for a running job that are free and worth a restart."""
    share = run.share
    if share is None or share.gpu_milli >= run.job.counts()[-1]:
        return None
    run.advance(state.now_s)
    trial = state.pool.copy()
    trial.give(run.parts)
    for gpu_milli in reversed(run.job.counts()):
        if gpu_milli <= share.gpu_milli:
            return None
        for more in state.shares(run, share.kind, gpu_milli):
            parts = trial.find(more)
            gain_s = run.left_steps / share.steps_per_s - run.left_steps / more.steps_per_s
            if parts is not None and gain_s > state.overhead_s(run):
                return more, parts
    return None
