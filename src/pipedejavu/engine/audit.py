"""The audit: replays the log of a run in one process and in float64, and compares the weights.

The log says which weight version each microbatch read on each piece, which microbatches fed each update, with which
coefficient, and in which order. The replay knows nothing of schedules, lanes, wires or workers. If its weights differ,
or the log differs from the plan, the engine is wrong.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedejavu.engine.device import CPU, moved
from pipedejavu.engine.filter_masks import masks_of_replay
from pipedejavu.engine.job import Applied, Batches, Event, Job, Log, Masked, Read, Reread, Scored, with_moments
from pipedejavu.engine.log_check import check_log, check_replayable
from pipedejavu.engine.loss_scale import FIRST
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import with_loss
from pipedejavu.engine.replay_cast import nudge_weights, replay_device, widened_tensor
from pipedejavu.engine.replay_correction import ReplayCorrection
from pipedejavu.engine.score import ScoreTrial, number_of, score
from pipedejavu.engine.threads import Outcome
from pipedejavu.engine.uncut_replay import UncutModel, UncutReplay
from pipedejavu.engine.weight_average import ReplayAverage
from pipedejavu.facts import InputError
from pipedejavu.optim.arithmetic import split
from pipedejavu.program import Program
from pipedejavu.runtime.compute_precision import FULL, ComputeFormat, allowed_tf32, low_names

_CLIP_TOLERANCE = {"fp64": 1e-4, "fp32": 1e-4, "tf32": 4 * 2**-11, "fp16": 4 * 2**-11, "bf16": 4 * 2**-8}
"""How far a coefficient may be from what the replay's norm gives, as a share: four units of roundoff of products."""


def audit(
    program: Program, job: Job, batches: Batches, outcome: Outcome, uncut: UncutModel | None = None
) -> dict[str, float]:
    """Returns, by parameter, the largest difference between a run and its replay.

    Replays the uncut model if it is given. Raises InputError if the log differs from the plan, and for a run without
    versions (Hogwild), which has no replay.
    """
    check_replayable(program.plan)
    check_log(program, batches, outcome.logs)
    replayed = Replay(program, job, batches, uncut).run(outcome.logs)
    differences: dict[str, float] = defaultdict(float)
    for key, weights in outcome.weights.items():
        for name, weight in weights.items():
            difference = float((weight.double().cpu() - replayed[key][name]).abs().max()) if weight.numel() else 0.0
            differences[name] = max(differences[name], difference)
    return dict(differences)


class Replay:
    """One replay: in float64, which also checks norms and scores, or in the dtype of the run."""

    def __init__(
        self,
        program: Program,
        job: Job,
        batches: Batches,
        uncut: UncutModel | None = None,
        *,
        in_double: bool = True,
        nudge: int | None = None,
    ):
        """Replays `uncut` instead of the units if given; `nudge` seeds a move of each weight by one rounding unit."""
        job = with_moments(job, program.plan.precision)
        self.program, self.plan, self.job, self.batches = program, program.plan, job, batches
        self.in_double = in_double
        form = ComputeFormat.of(self.plan.precision, [module for _, module in job.units])
        self.form, self.low = FULL if in_double else form, low_names(job.units, form)
        self.scale = FIRST if self.form.autocast == torch.float16 else 1.0
        self.device = CPU if in_double or not self.plan.precision.is_low else replay_device(program)
        modules = copy.deepcopy([module for _, module in job.units])
        if nudge is not None:
            nudge_weights(modules, torch.Generator().manual_seed(nudge))
        units = [(n, job.units[n][0], module.double() if in_double else module) for n, module in enumerate(modules)]
        self.runners = [
            PieceRunner([units[u] for u in piece.units], job.seed, form=self.form).to(self.device)
            for piece in program.pieces
        ]
        self.initial = [{name: self._master(w) for name, w in runner.initial.items()} for runner in self.runners]
        """The masters that training begins with, by piece."""
        self.center = program.num_replicas
        self.newest: dict[tuple[int, int, int], Tensors] = {}
        self.read: dict[tuple[int, int], Tensors] = {}
        self.readers: dict[tuple[int, int], int] = {}
        """By (piece, microbatch), the replica that ran it."""
        self.correction = ReplayCorrection(program, job, batches)
        self.gradients: dict[int, list[Tensors]] = {}
        self.norms: dict[int, float] = {}
        self.state: dict[tuple[int, int], dict[str, Tensors]] = defaultdict(dict)
        self.cells = {p: {n: w.clone() for n, w in initial.items()} for p, initial in enumerate(self.initial)}
        self.skipped: set[int] = set()
        """Versions whose update the run skipped."""
        self.masks = masks_of_replay(program, job, batches, self.runners)
        self.uncut = UncutReplay(uncut, job, units, self.masks) if uncut else None
        self.average = ReplayAverage(self.center, self.masks)
        self.pushes: dict[tuple[int, int, int], list[Tensors]] = defaultdict(list)

    def run(self, logs: Sequence[Log]) -> dict[tuple[int, int], Tensors]:
        """Replays each event once what it reads exists; returns the last weights by (piece, replica)."""
        if self.masks is not None:
            self.masks.take(event for log in logs for event in log.events if isinstance(event, Masked))
        with allowed_tf32(self.plan.precision):
            return self._run(logs)

    def _run(self, logs: Sequence[Log]) -> dict[tuple[int, int], Tensors]:
        queues = [list(reversed(log.events)) for log in logs]
        self.skipped = {step for log in logs for step in log.skipped}
        while any(queues):
            before = sum(map(len, queues))
            for queue in queues:
                while queue and self.replay(queue[-1]):
                    queue.pop()
            if sum(map(len, queues)) == before:
                raise InputError(f"the log cannot be replayed: nothing comes before {[q[-1] for q in queues if q]}")
        last: dict[tuple[int, int], tuple[int, Tensors]] = {}
        for (piece, replica, version), weights in self.newest.items():
            if version > last.get((piece, replica), (-1, {}))[0]:
                last[piece, replica] = (version, weights)
        final = {key: weights for key, (_, weights) in last.items()}
        if self.plan.reduce.wire == "server" and self.plan.reduce.gate == "lock":
            final |= {(piece, self.center): cell for piece, cell in self.cells.items()}
        final = {(p, self.center): initial for p, initial in enumerate(self.initial)} | final
        return {key: weights | self.runners[key[0]].frozen for key, weights in final.items()}

    def replay(self, event: Event) -> bool:
        """Replays one event; returns False if something that it reads does not exist yet."""
        if isinstance(event, Read):
            return self._replay_read(event)
        if isinstance(event, Reread):
            return self.correction.after_reread(event, self.weights(event.piece, event.replica, event.version))
        if isinstance(event, Scored):
            return self._replay_score(event)
        if isinstance(event, Masked):
            return True
        if self.plan.reduce.combiner == "score-trim":
            return self._replay_trusted(event)
        if event.replica == self.center:
            return self._replay_center(event)
        return self._replay_update(event)

    def weights(self, piece: int, replica: int, version: int) -> Tensors | None:
        """Returns one version of a piece's weights, or None if it does not exist yet."""
        if version == 0 and (piece, replica, 0) not in self.newest:
            self.newest[piece, replica, 0] = {n: w.clone() for n, w in self.initial[piece].items()}
        return self.newest.get((piece, replica, version))

    def _replay_read(self, event: Read) -> bool:
        weights = self.weights(event.piece, event.replica, event.version)
        if weights is None:
            return False
        if event.wave >= 0:
            others = [q for q in range(self.center) if q != event.replica]
            size = self._wave_size(event.wave)
            if any(len(self.pushes[event.piece, q, event.wave]) < size for q in others):
                return False
            pushed = [d for q in others for d in self.pushes[event.piece, q, event.wave]]
            weights = {n: w + sum((d[n] for d in pushed), torch.zeros_like(w)) for n, w in weights.items()}
            self.newest[event.piece, event.replica, event.version] = weights
        self.read[event.piece, event.microbatch] = self.correction.after_read(event, weights)
        self.readers[event.piece, event.microbatch] = event.replica
        return True

    def _replay_update(self, event: Applied) -> bool:
        piece, replica, version, microbatches, coefficient = event
        update, reduce = version - 1, self.plan.reduce
        on_server = reduce.wire == "server" and reduce.gate == "lock"
        base = self.cells[piece] if on_server else self.weights(piece, replica, update)
        turn = update * self.center + replica if reduce.gate == "round-robin" else update
        center = self.weights(piece, self.center, turn) if reduce.combiner == "elastic" else {}
        if base is not None and version in self.skipped and coefficient == 0:
            self.newest[piece, replica, version] = base
            self.correction.after_update(event, base, base)
            return True
        if base is None or center is None or not all(self._differentiate(i) for i in microbatches):
            return False
        if self.in_double:
            self._check_clipping(event)
        summed = {n: self._summed(microbatches, piece, n) for n in base}
        summed = self.correction.compensated(summed, base, self.read[piece, microbatches[0]], coefficient)
        key = (piece, self.center if on_server else replica)
        optimizer = self.correction.optimizer(piece, update)
        stepper = self.masks.optimizer(optimizer, replica, update) if self.masks else optimizer
        deltas = dict(stepper.deltas(update, base, summed, self.state[key], coefficient))
        if center:
            pull = self.job.optimizer.rate(update) * self.job.elasticity
            deltas = {n: d - pull * (base[n] - center[n]) for n, d in deltas.items()}
        new = {n: w + deltas[n] for n, w in base.items()}
        self._write(event, new, deltas, on_server)
        self.correction.after_update(event, base, new)
        return True

    def _write(self, event: Applied, new: Tensors, deltas: Tensors, on_server: bool) -> None:
        """Keeps the weights that an update made, where later updates read them."""
        piece, replica, version, *_ = event
        update, reduce = version - 1, self.plan.reduce
        if on_server:
            self.cells[piece] = new
        if reduce.gate == "bound":
            self.pushes[piece, replica, self._wave(update)].append(deltas)
        if reduce.combiner == "average" and (update % self.plan.steps + 1) % reduce.period == 0:
            mean = self.average.add(piece, replica, version, new)
            self.newest |= {(piece, q, version): mean for q in range(self.center) if mean is not None}
        else:
            self.newest[piece, replica, version] = new

    def _replay_score(self, event: Scored) -> bool:
        """Recomputes a score; raises InputError if the run's differs by more than rounding.

        A score that overflowed in the run's dtype may be finite here.
        """
        piece, replica, version, logged = event
        update, fed = version - 1, self.program.fed_by(replica, version - 1)
        known = [self.weights(p, self.center, update) for p in range(len(self.runners))]
        weights = [tensors for tensors in known if tensors is not None]
        if len(weights) < len(known) or not all(self._differentiate(i) for i in fed):
            return False
        number, count = number_of(update), sum(self.batches.count(i) for i in fed)
        inputs, targets = self._cast(self.batches.inputs(number)), self._cast(self.batches.targets(number))
        rate, penalty = self.job.optimizer.rate(update), self.plan.reduce.penalty
        trial = ScoreTrial(number, inputs, targets, self.batches.count(number), rate, penalty)
        summed = {name: self._summed(fed, piece, name) for name in weights[piece]}
        expected = score(self.runners, self.job, trial, weights, piece, summed, count)
        if self.in_double and math.isfinite(logged) and not abs(logged - expected) <= 1e-4 * abs(expected):
            raise InputError(f"the run gave a contribution another score than {expected}: {event}")
        return True

    def _replay_trusted(self, event: Applied) -> bool:
        """Replays a server's update from the gradients of the replicas that it trusts."""
        piece, _, version, microbatches, coefficient = event
        base = self.weights(piece, self.center, version - 1)
        if base is None:
            return False
        new = base
        if microbatches:
            summed = {name: self._summed(microbatches, piece, name) for name in base}
            state = self.state[piece, self.center]
            deltas = self.job.optimizer.deltas(version - 1, base, summed, state, coefficient)
            new = {name: base[name] + delta for name, delta in deltas}
        for replica in range(self.center + 1):
            self.newest[piece, replica, version] = new
        return True

    def _wave(self, update: int) -> int:
        """Returns the wave of an update; each round begins a new wave."""
        before, number = divmod(update, self.plan.steps)
        return before * self._num_waves + number // self.plan.place.workers

    def _wave_size(self, wave: int) -> int:
        """Returns the number of updates in a wave; the last wave of a round may have fewer."""
        size = self.plan.place.workers
        return min(size, self.plan.steps - wave % self._num_waves * size)

    @property
    def _num_waves(self) -> int:
        """The number of waves per round."""
        return -(-self.plan.steps // self.plan.place.workers)

    def _check_clipping(self, event: Applied) -> None:
        """Raises InputError if a coefficient does not follow from the norm that the plan clips by."""
        clip, expected = self.plan.reduce.clip, 1 / sum(self.batches.count(i) for i in event.microbatches)
        update = event.version - 1 - (clip == "delayed")
        norm = self._norm(update) if clip != "none" and update >= 0 else 0.0
        if event.version in self.skipped:
            expected = 0.0
        elif self.job.clip_norm is not None:
            expected *= min(1.0, self.job.clip_norm / (norm + 1e-6))
        if abs(event.coefficient - expected) > _CLIP_TOLERANCE[self.plan.precision.compute] * expected:
            raise InputError(f"the run clipped by another norm, its coefficient should be {expected}: {event}")

    def _norm(self, update: int) -> float:
        """Returns the norm of an update's mean gradient over all pieces, shared parameters counted once."""
        if update not in self.norms:
            microbatches = tuple(range(update * self.program.update_size, (update + 1) * self.program.update_size))
            names = {name: piece for piece, runner in enumerate(self.runners) for name in runner.initial}
            for tie in self.job.ties:
                for name in sorted(tie & names.keys())[1:]:
                    del names[name]
            square = sum(float(self._summed(microbatches, piece, n).square().sum()) for n, piece in names.items())
            self.norms[update] = square**0.5 / sum(self.batches.count(i) for i in microbatches)
        return self.norms[update]

    def _replay_center(self, event: Applied) -> bool:
        """Moves the elastic centre."""
        piece, update = event.piece, event.version - 1
        if self.plan.reduce.gate == "round-robin":
            others = [self.weights(piece, update % self.center, update // self.center)]
        else:
            others = [self.weights(piece, q, update) for q in range(self.center)]
        center = self.weights(piece, self.center, update)
        if center is None or any(m is None for m in others):
            return False
        moved = {}
        for name, weight in center.items():
            moved[name] = weight + sum(event.coefficient * (m[name] - weight) for m in others if m is not None)
        self.newest[piece, self.center, update + 1] = moved
        return True

    def _differentiate(self, microbatch: int) -> bool:
        """Computes the gradients of one microbatch; returns False if one of its reads is not replayed yet."""
        if microbatch in self.gradients:
            return True
        reads = [self.read.get((piece, microbatch)) for piece in range(len(self.runners))]
        known = [weights for weights in reads if weights is not None]
        if len(known) < len(reads) or not self.correction.has_all(microbatch):
            return False
        known = [{n: self._computed(n, w) for n, w in weights.items()} for weights in known]
        value, targets = self._cast(self.batches.inputs(microbatch)), self._cast(self.batches.targets(microbatch))
        if (
            self.uncut
            and not self.correction.reread
            and (uncut := self.uncut.gradients(microbatch, known, value, targets))
        ):
            self.gradients[microbatch] = uncut
            return True
        scale = self.scale
        while True:
            gradients = self._gradients_of(microbatch, known, value, targets, scale)
            if scale == 1 or all(g.isfinite().all() for piece in gradients for g in piece.values()):
                break
            scale /= 2
        self.gradients[microbatch] = gradients
        return True

    def _gradients_of(
        self, microbatch: int, known: Sequence[Tensors], value: object, targets: object, scale: float
    ) -> list[Tensors]:
        """Returns the gradients of one microbatch, computed from a loss that is multiplied by `scale`."""
        saved = []
        for piece, (runner, weights) in enumerate(zip(self.runners, known, strict=True)):
            leaves = {n: w.detach().requires_grad_() for n, w in weights.items()}
            value, kept = self.correction.forward(runner, (piece, microbatch), leaves, value, self._computed)
            saved.append(kept)
        with self.form.context(self.device):
            loss = self.job.loss(value, targets)
        saved[-1] = with_loss(saved[-1], loss)
        passed: tuple[Tensor, ...] = (torch.full_like(loss, scale),)
        gradients = []
        for piece in reversed(range(len(saved))):
            passed, weight_gradients = self.correction.backward((piece, microbatch), saved[piece], passed)
            gradients.append(weight_gradients if scale == 1 else {n: g / scale for n, g in weight_gradients.items()})
        return gradients[::-1]

    def _summed(self, microbatches: tuple[int, ...], piece: int, name: str) -> Tensor:
        """Sums a parameter's gradients over microbatches, and over all pieces that share it."""
        tie = next((names for names in self.job.ties if name in names), None)
        shared = [
            (p, n)
            for p in ((piece,) if tie is None else range(len(self.runners)))
            for n in tie or (name,)
            if n in self.runners[p].initial
        ]
        if self.job.byzantine is None:
            parts = [self._wide(self.gradients[i][p][n]) for i in microbatches for p, n in shared]
            return self.correction.summed(microbatches, piece, name, parts)
        return torch.stack([part for p, n in shared for part in self._sent_gradients(microbatches, p, n)]).sum(0)

    def _sent_gradients(self, microbatches: tuple[int, ...], piece: int, name: str) -> Iterator[Tensor]:
        """Yields a parameter's gradient as each replica sent it, with the faults that the job injects."""
        fault, number = self.job.byzantine, list(self.runners[piece].initial).index(name)
        assert fault is not None
        update = microbatches[0] // self.program.update_size
        for replica in sorted({self.readers[piece, i] for i in microbatches}):
            parts = [
                self._wide(self.gradients[i][piece][name]) for i in microbatches if self.readers[piece, i] == replica
            ]
            total = torch.stack(parts).sum(0)
            if fault.is_faulty(replica, self.program.num_replicas, self.program.pieces[piece].stage):
                total = fault.spoilt(total, self.job.seed, replica, update, piece, number)
            yield total

    def _cast(self, value: object) -> object:
        """Returns a value with its floating-point and complex tensors in the precision of the replay."""
        return pytree.tree_map_only(Tensor, widened_tensor, value) if self.in_double else moved(value, self.device)

    def _computed(self, name: str, master: Tensor) -> Tensor:
        """Returns what units compute with: a master, or its high half in the precision of the replay."""
        if name not in self.low:
            return master
        high = split(master.float())[0]
        return high.double() if self.in_double else high

    def _master(self, weight: Tensor) -> Tensor:
        is_split = weight.dtype == torch.bfloat16 and self.plan.precision.is_split
        return weight.to(self.device, torch.float32 if is_split else weight.dtype)

    def _wide(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of a microbatch in the format in which gradients are added."""
        return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
