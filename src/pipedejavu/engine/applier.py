"""Updates: turns summed gradients into the next version of a piece's weights, for every combination of plan axes.

On a worker an update makes a new version of the weights. On a server it changes the server's only copy in place, in the
order in which pushes arrive.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.correction import Correction
from pipedejavu.engine.device import moved
from pipedejavu.engine.filter_masks import FilterMasks
from pipedejavu.engine.gradient_check import GradientCheck
from pipedejavu.engine.job import Applied, Batches, Job, Log, Reread, Scored
from pipedejavu.engine.loss_scale import LossScale
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.score import ScoreTrial, kept, number_of, score
from pipedejavu.engine.staleness import ReboundWeights, add_to_velocity, compensate, extrapolate
from pipedejavu.facts import InputError
from pipedejavu.program import Action, Program, UpdatePlace, Value
from pipedejavu.program.action import value_of
from pipedejavu.program.value import DEVICE, HOST, SHARD

PieceReplica = tuple[int, int]
"""A (piece, replica) pair."""
Deltas = Iterator[tuple[str, Tensor]]
"""What to add to each parameter, computed lazily one parameter at a time."""


class Applier:
    """The updates of one worker or server."""

    def __init__(
        self,
        program: Program,
        runners: dict[PieceReplica, PieceRunner],
        job: Job,
        batches: Batches,
        values: dict[Value, Any],
        log: Log,
        device: torch.device,
        check: GradientCheck,
        scale: LossScale,
    ):
        self.program, self.plan, self.runners, self.job = program, program.plan, runners, job
        self.batches, self.values, self.log, self.device = batches, values, log, device
        self.check, self.scale = check, scale
        self.state: dict[PieceReplica, dict[str, Tensors]] = {}
        self.center = program.num_replicas
        if self.plan.reduce.clip != "none" and self.plan.feed.is_own:
            raise InputError(
                f"plan '{self.plan.name}' clips by the norm over all workers, but with feed '{self.plan.feed.kind}'"
                " each makes updates of its own; set reduce.clip to 'none'"
            )
        if self.plan.reduce.clip == "none" and job.clip_norm is not None:
            raise InputError(
                f"the job clips gradients to the norm {job.clip_norm:g}, but plan '{self.plan.name}' takes no norm; set"
                " reduce.clip to 'global', or to 'delayed' where nothing flushes"
            )
        if job.byzantine is not None:
            job.byzantine.check(self.plan, program.num_replicas)
        self.first_version = 0
        self.pushed: dict[PieceReplica, dict[int, Tensors]] = {}
        """The push of each piece in each wave whose consensus it has not pulled yet."""
        self.correction = Correction(program, job)
        self.masks: FilterMasks | None = None
        """Which filters each update trains, if some are left out."""
        self.pulled: dict[PieceReplica, Tensors] = {}
        """On a server that compensates for delays, the weights that each replica read last."""

    @property
    def first_wave(self) -> int:
        """The number of this round's first wave among all waves of the run."""
        return self.first_version // self.plan.steps * -(-self.plan.steps // self.plan.place.workers)

    def last_version(self, replica: int) -> int:
        """Returns the last version of a round; a round-robin elastic centre has one version per replica and step."""
        is_in_turn = self.plan.reduce.combiner == "elastic" and self.plan.reduce.gate == "round-robin"
        return self.plan.steps * (self.center if is_in_turn and replica == self.center else 1)

    def begin(self, update: int) -> None:
        """Prepares a round that starts at an update."""
        self.first_version = update
        if self.masks is not None:
            self.masks.prepare(update * self.program.update_size)

    def update(self, a: Action) -> None:
        """Runs an UPDATE action."""
        if a.update_place == UpdatePlace.SERVER:
            self._on_server(a)
            return
        key, update = (a.piece, a.replica), a.version - 1
        if a.update_place == UpdatePlace.SHARD:
            self._on_shard(key, update)
            return
        place = HOST if a.update_place == UpdatePlace.HOST else DEVICE
        summed: Tensors = self.values[Value.weight_gradient(*key, update, place)]
        if self.plan.reduce.clip == "delayed":  # a later norm may still read them
            summed = {name: gradient.clone() for name, gradient in summed.items()}
        if a.update_place == UpdatePlace.SHARED:
            self._in_shared_memory(key, update, summed)
            return
        base: Tensors = self.values[Value.weights(*key, update, place)]
        self.values[Value.weights(*key, a.version, place)] = as_leaves(self._updated(key, update, base, summed))
        if Value.optimizer_state(*key, update) in self.values:
            self.values[Value.optimizer_state(*key, a.version)] = self.state[key]

    def move_state(self, key: PieceReplica, device: torch.device) -> dict[str, Tensors]:
        """Moves a piece's optimizer state between host and device, and returns it."""
        state = self.state.get(key, {})
        # The host reads the step, so it stays there.
        self.state[key] = {
            name: {slot: t if t.dim() == 0 and slot == "step" else moved(t, device) for slot, t in slots.items()}
            for name, slots in state.items()
        }
        return self.state[key]

    def _coefficient(self, replica: int, update: int) -> float:
        """Returns the factor of the summed gradients: one over the number of samples, times the clipping factor."""
        count = sum(self.batches.count(i) for i in self._microbatches(replica, update))
        if not count:
            number = self.first_version + update + 1
            raise InputError(
                f"no sample or label of update {number} counts; leave such samples out, or use larger batches"
            )
        coefficient = 1 / count
        delay = {"none": None, "global": 0, "delayed": 1}[self.plan.reduce.clip]
        norm = None if delay is None else self.values.get(Value.norm(update - delay))
        if norm is not None and not math.isfinite(norm):
            return 0.0  # all workers have the same norm, so all skip the update
        if norm is not None and delay is not None and self.job.clip_norm is not None:
            mean = norm / sum(self.batches.count(i) for i in self._microbatches(replica, update - delay))
            coefficient *= min(1.0, self.job.clip_norm / (mean + 1e-6))  # as torch clips
        return coefficient

    def _microbatches(self, replica: int, update: int) -> tuple[int, ...]:
        """Returns the microbatches of an update: of all replicas, or of one if replicas update separately."""
        size, number = self.program.update_size, self.first_version + update
        if self.plan.feed.is_own:
            first, count = number * size + replica * self.plan.feed.microbatches, self.plan.feed.microbatches
            return tuple(range(first, first + count))
        return tuple(range(number * size, (number + 1) * size))

    def _updated(self, key: PieceReplica, update: int, base: Tensors, summed: Tensors) -> Tensors:
        """Returns the next version of a piece's weights, in the memory of the sum if that has their format."""
        is_elastic, is_bound = self.plan.reduce.combiner == "elastic", self.plan.reduce.gate == "bound"
        if is_elastic or is_bound:  # they need what the update adds
            deltas = self._deltas(key, update, base, summed)
            if is_elastic:
                deltas = self._pulled(key, update, base, deltas)
            if is_bound:
                deltas = self._pushed_too(key, update, deltas)
            return {name: delta.add_(base[name].detach()) for name, delta in deltas}
        number, coefficient = self.first_version + update, self._begin(key, update, summed)
        state, decay = self.state.setdefault(key, {}), self.correction.decay(key[0])
        if coefficient == 0:
            out = {name: weight.detach().clone() for name, weight in base.items()}
        else:
            factor = coefficient / self.scale.applied
            if self.correction.compensates:
                read = self.values[Value.weights(*key, self.correction.version_read(key, update))]
                summed = compensate(summed, base, read, self.plan.version.compensation, factor)
            out = {name: like_weight(base[name], gradient) for name, gradient in summed.items()}
            optimizer = self.correction.optimizer(key[0], number)
            if self.masks is None:
                optimizer.step(number, base, summed, state, factor, out=out)
            else:
                self.masks.note_time(key[1], number, self.device)
                self.masks.optimizer(optimizer, key[1], number).step(number, base, summed, state, factor, out=out)
        if decay is not None:
            add_to_velocity(state, base, out, decay)
        return out

    def compensate_share(self, a: Action) -> None:
        """Before a REDUCE, compensates a late replica's share of a gradient, as the mean of the share's samples."""
        delay = self.program.delay_of(a.replica) if self.plan.compensates_shares else 0
        if not delay or not a.version:
            return
        share, newest = value_of(a), Value.weights(a.piece, a.replica, a.version)
        pair = self.values[newest], self.values[newest.at(max(0, a.version - delay))]
        count = sum(self.batches.count(i) for i in self.program.fed_by(a.replica, self.first_version + a.version))
        self.values[share] = compensate(self.values[share], *pair, self.plan.version.compensation, 1 / max(count, 1))

    def corrected(self, a: Action, weights: Tensors) -> tuple[Tensors, ReboundWeights | None]:
        """Returns the weights that a forward computes with, and a context in which what it saves forgets them."""
        late, state = a.microbatch // self.program.update_size - a.version, self.state.get((a.piece, a.replica), {})
        if late and self.correction.predicts:
            return as_leaves(extrapolate(weights, state, late)), None
        if late and self.correction.rebinds:
            rebound = ReboundWeights(weights)
            rebound.version = a.version
            return rebound.linked(weights), rebound
        return weights, None

    def rebind(self, a: Action, rebound: ReboundWeights | None, number: int) -> None:
        """Gives a backward the newest weights, moved back by their velocity to where its forward's were."""
        if rebound is not None:
            newest = self.values[Value.weights(a.piece, a.replica, a.version)]
            state = self.state.get((a.piece, a.replica), {})
            rebound.bound = extrapolate(newest, state, rebound.version - a.version)
            self.log.events.append(Reread(a.piece, a.replica, number, self.first_version + a.version))

    def _on_shard(self, key: PieceReplica, update: int) -> None:
        """Updates this worker's shard of a piece in place: no microbatch in flight reads it."""
        zero = self.plan.zero_of(self.program.pieces[key[0]].stage)
        parts: Tensors = self.values[Value.weights(*key, update, SHARD)]
        summed: Tensors = self.values[Value.weight_gradient(*key, update, DEVICE if zero == 1 else SHARD)]
        coefficient = self._begin(key, update, summed)
        if coefficient:
            factor, state = coefficient / self.scale.applied, self.state.setdefault(key, {})
            self.job.optimizer.step(self.first_version + update, parts, summed, state, factor, out=parts)
        self.values[Value.weights(*key, update + 1, SHARD)] = parts

    def _deltas(self, key: PieceReplica, update: int, base: Tensors, summed: Tensors) -> Deltas:
        number, coefficient = self.first_version + update, self._begin(key, update, summed)
        if coefficient == 0:
            return iter([(name, torch.zeros_like(weight)) for name, weight in base.items()])
        return self.job.optimizer.deltas(number, base, summed, self.state.setdefault(key, {}), coefficient)

    def _begin(self, key: PieceReplica, update: int, summed: Tensors) -> float:
        """Logs an update and checks its gradients; returns the factor of their sum, 0 if the update is skipped."""
        coefficient, number = self._coefficient(key[1], update), self.first_version + update
        self.log.events.append(Applied(*key, number + 1, self._microbatches(key[1], update), coefficient))
        if coefficient:
            self._check(number + 1, summed, coefficient)
        return coefficient

    def _check(self, step: int, summed: Tensors, coefficient: float) -> None:
        """Raises InputError if gradients are not finite, unless the global norm has checked them already."""
        if self.job.on_nan == "stop" and self.plan.reduce.clip != "global":
            self.check.check(step, summed, coefficient)

    def _in_shared_memory(self, key: PieceReplica, update: int, summed: Tensors) -> None:
        """Updates weights that other workers read and write concurrently, outside of autograd."""
        base: Tensors = self.values[Value.weights(*key, -1)]
        for name, delta in self._deltas(key, update, base, summed):
            weight, is_touched = base[name].data, delta != 0
            if is_touched.all():
                weight.add_(delta)
            else:  # adding zeros would undo concurrent writes
                weight[is_touched] += delta[is_touched]

    def _pulled(self, key: PieceReplica, update: int, base: Tensors, deltas: Deltas) -> Deltas:
        """Pulls the updated weights towards the elastic centre."""
        turn = update * self.center + key[1] if self.plan.reduce.gate == "round-robin" else update
        center = self._weights_of(key[0], self.center, turn)
        pull = self.job.optimizer.rate(self.first_version + update) * self.job.elasticity
        for name, delta in deltas:
            yield name, delta.sub_(pull * (base[name].detach() - center[name]))

    def _on_server(self, a: Action) -> None:
        piece, replica, update = a.piece, a.replica, a.version - 1
        if self.plan.reduce.combiner == "elastic":
            self._move_center(piece, update)
        elif self.plan.reduce.gate == "bound":
            self._take_wave(piece, update)
        elif self.plan.reduce.combiner == "score-trim":
            self._average_trusted(piece, update)
        else:
            key, cell = (piece, self.center), self.values[Value.weights(piece, self.center, 0)]
            coefficient = self._coefficient(replica, update)
            pushed = self.values[Value.weight_gradient(piece, replica, update)]
            self._check(self.first_version + a.version, pushed, coefficient)
            if self.correction.compensates:
                read = self.pulled.get((piece, replica)) or moved(self.runners[key].initial, self.device)
                pushed = compensate(pushed, cell, read, self.plan.version.compensation, coefficient)
            # A worker of the same process may still use what it has pushed: the gradients stay as they are.
            number = self.first_version + a.version
            state = self.state.setdefault(key, {})
            self.job.optimizer.step(number - 1, cell, pushed, state, coefficient, out=cell)
            self.log.events.append(Applied(piece, replica, number, self._microbatches(replica, update), coefficient))
            made = as_leaves({n: w.clone() for n, w in cell.items()})
            self.values[Value.weights(piece, replica, a.version)] = made
            if self.correction.compensates:
                self.pulled[piece, replica] = made

    def evaluate(self, a: Action) -> None:
        """Scores one replica's gradient on the server's own samples."""
        piece, replica, update = a.piece, a.replica, a.version
        number = number_of(self.first_version + update)
        inputs, targets = (moved(find(number), self.device) for find in (self.batches.inputs, self.batches.targets))
        rate, penalty = self.job.optimizer.rate(self.first_version + update), self.plan.reduce.penalty
        trial = ScoreTrial(number, inputs, targets, self.batches.count(number), rate, penalty)
        count = sum(self.batches.count(i) for i in self.program.fed_by(replica, self.first_version + update))
        summed, pieces = self.values[Value.weight_gradient(piece, replica, update)], range(len(self.program.pieces))
        runners = [self.runners[p, self.center] for p in pieces]
        weights = [self.values[Value.weights(p, self.center, 0)] for p in pieces]
        result = score(runners, self.job, trial, weights, piece, summed, count)
        self.values[Value.score(piece, replica, update)] = result
        self.log.events.append(Scored(piece, replica, self.first_version + update + 1, result))

    def _average_trusted(self, piece: int, update: int) -> None:
        """Updates the server's weights by the mean gradient of the replicas with the highest scores."""
        key, number = (piece, self.center), self.first_version + update
        cell, replicas = self.values[Value.weights(*key, 0)], range(self.program.num_replicas)
        trusted = kept([self.values[Value.score(piece, q, update)] for q in replicas], self.plan.reduce.trim)
        fed = tuple(i for q in trusted for i in self.program.fed_by(q, number))
        coefficient = (
            1 / sum(self.batches.count(i) for i in fed) if fed else 0.0
        )  # no replica is trusted: skip the update
        self.log.events.append(Applied(*key, number + 1, fed, coefficient))
        if not fed:
            self.log.skipped[number + 1] = f"no contribution to step {number + 1} has a score that is a number"
        else:
            trusted_gradients: list[Tensors] = [self.values[Value.weight_gradient(piece, q, update)] for q in trusted]
            summed = {name: torch.stack([gradients[name] for gradients in trusted_gradients]).sum(0) for name in cell}
            self.job.optimizer.step(number, cell, summed, self.state.setdefault(key, {}), coefficient, out=cell)
        for q in replicas:
            self.values[Value.weights(piece, q, update + 1)] = as_leaves({n: w.clone() for n, w in cell.items()})

    def _move_center(self, piece: int, update: int) -> None:
        """Moves the elastic centre towards one replica's weights, or towards those of all."""
        center = self._weights_of(piece, self.center, update)
        turns = self.center if self.plan.reduce.gate == "round-robin" else 1
        if turns > 1:
            others = [self._weights_of(piece, update % self.center, update // self.center)]
        else:
            others = [self._weights_of(piece, q, update) for q in range(self.center)]
        pull = self.job.optimizer.rate(self.first_version + update // turns) * self.job.elasticity
        moved = {
            n: w + sum((pull * (m[n].detach() - w) for m in others), torch.zeros_like(w)) for n, w in center.items()
        }
        self.values[Value.weights(piece, self.center, update + 1)] = as_leaves(moved)
        self.log.events.append(Applied(piece, self.center, self.first_version * turns + update + 1, (), pull))

    def _pushed_too(self, key: PieceReplica, update: int, deltas: Deltas) -> Deltas:
        """Adds an update to the push of its wave."""
        wave = update // self.plan.place.workers
        push: Tensors = self.values.setdefault(Value.push(*key, wave), {})
        self.pushed.setdefault(key, {})[wave] = push
        for name, delta in deltas:
            push[name] = push[name] + delta if name in push else delta.clone()
            yield name, delta

    def _take_wave(self, piece: int, update: int) -> None:
        """Adds a replica's push to the consensus of its wave."""
        wave, replica = divmod(update, self.center)
        push = self.values[Value.push(piece, replica, wave)]
        consensus = self.values.setdefault(
            Value.consensus(piece, wave), {n: torch.zeros_like(t) for n, t in push.items()}
        )
        for name, tensor in push.items():
            consensus[name] += tensor

    def pull(self, key: PieceReplica, version: int, wave: int) -> None:
        """Adds the pushes of all other replicas in `wave` to a piece's weights; microbatches in flight keep theirs."""
        consensus, push = self.values[Value.consensus(key[0], wave)], self.pushed[key].pop(wave)
        weights: Tensors = self.values[Value.weights(*key, version)]
        moved = {name: w.detach() + (consensus[name] - push[name]) for name, w in weights.items()}
        self.values[Value.weights(*key, version)] = as_leaves(moved)

    def _weights_of(self, piece: int, replica: int, version: int) -> Tensors:
        """Returns weights that were received, or the initial ones, which are the same on all workers."""
        if version == 0 and Value.weights(piece, replica, 0) not in self.values:
            weights = next(runner.initial for (p, _), runner in self.runners.items() if p == piece)
        else:
            weights = self.values[Value.weights(piece, replica, version)]
        return {name: w.detach().to(self.device) for name, w in weights.items()}


def like_weight(weight: Tensor, gradient: Tensor) -> Tensor:
    """Returns memory for the next version of a weight: that of its gradient if the formats are the same."""
    if gradient.dtype == weight.dtype:
        return gradient
    return torch.empty_like(weight.detach(), pin_memory=weight.is_pinned())


def as_leaves(weights: dict[str, Tensor]) -> Tensors:
    """Returns the weights as autograd leaves that require gradients."""
    return {name: w.detach().requires_grad_() for name, w in weights.items()}
