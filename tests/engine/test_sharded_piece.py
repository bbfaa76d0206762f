"""ZeRO: weights equal plain large-batch training, memory and messages are what the stage promises."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipedejavu.analysis import verify
from pipedejavu.analysis.graph import BUCKETS
from pipedejavu.engine import AdamW, Sgd
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import Keep, Precision, preset
from pipedejavu.program import ActionKind, ValueKind
from pipedejavu.session import Trainer
from tests.engine.bf16 import SPLIT, in_precision, train_plainly
from tests.engine.case import Case, make_case

STAGES = ("zero-1", "zero-2", "zero-3")
ADAMW = AdamW(lr=0.01, eps=0.01, weight_decay=0.1)


def pipeline(keep: Keep, model: str = "gpt", microbatches: int = 3, **options) -> Case:
    """1F1B of as many stages as `keep.zeros` has entries, or 2, with two replicas."""
    stages = len(keep.zeros or (0, 0))
    case = make_case("1f1b", model, workers=stages, replicas=2, microbatches=microbatches, **options)
    case.plan = case.plan.replace(reduce=case.plan.reduce.replace(wire="reduce-scatter"), keep=keep)
    return case


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("optimizer", [ADAMW, Sgd(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_two_stages_of_two_shards_equal_plain_training(zero, optimizer):
    """With clipping, tied weights, dropout and microbatches of unequal sizes."""
    case = pipeline(
        Keep(kind=zero, persists=zero == "zero-3"), clip="global", clip_norm=0.1, rounds=2, optimizer=optimizer
    )
    assert len(case.job.ties) == 1
    assert case.furthest(case.trained_plainly()) <= min(case.tolerance, 1e-12)
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


@pytest.mark.parametrize("zeros", [(0, 1), (2, 0), (1, 3), (3, 2)])
def test_each_stage_may_divide_its_state_in_its_own_way(zeros):
    kind = f"zero-{max(zeros)}"
    case = pipeline(Keep(kind=kind, zeros=zeros, persists=3 in zeros), "mlp", optimizer=ADAMW, rounds=2)
    assert case.furthest(case.trained_plainly()) <= min(case.tolerance, 1e-12)
    assert case.audit() <= case.tolerance


class Net(nn.Module):
    """A model of a user, with an embedding that the head shares and dropout that is off in the comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens)))).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "workers"), [("zero-1", 2), ("zero-2", 4), ("zero-3", 2), ("zero-3", 4), ("zero-r", 2)]
)
def test_a_trainer_equals_a_plain_loop_with_a_mean_loss_and_an_uneven_last_batch(name, workers):
    torch.manual_seed(1)
    model = Net().double()
    tokens = torch.randint(0, 11, (43, 5), generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(tokens, tokens.roll(1, 1)), batch_size=16)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), plan=name, workers=workers, sample=next(iter(loader)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), clip_norm=0.5,
    )  # fmt: skip
    for batch in loader:
        trainer.step(batch)
    trained = trainer.save_to_model()
    for own, other in zip(trained.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)


def storages(tensors) -> int:
    """Returns the bytes of all storages of some tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def held_by(handlers: Handlers) -> dict[str, int]:
    """Returns the bytes that a worker holds, by class."""

    def values(kind):
        return [t for value, ts in list(handlers.values.items()) if value.kind == kind for t in ts.values()]

    shards = [*handlers.sharded.values()]
    buffers = [t for s in shards for t in (*s.wholes, *s.shards)]
    state = [
        t for slots in handlers.applier.state.values() for ts in slots.values() for n, t in ts.items() if n != "step"
    ]
    return {
        "weights": storages([*buffers, *values(ValueKind.WEIGHTS)]),
        "gradients": storages(values(ValueKind.WEIGHT_GRADIENT)),
        "optimizer": storages(state),
    }


def peaks(case: Case, monkeypatch) -> list[dict[str, int]]:
    """Returns, by worker, the most bytes of each class after any action of the second round."""
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    most = [dict.fromkeys(("weights", "gradients", "optimizer"), 0) for _ in threads.handlers]
    do = Handlers.do

    def counted(self, a):
        do(self, a)
        for name, size in held_by(self).items():
            most[self.index][name] = max(most[self.index][name], size)

    monkeypatch.setattr(Handlers, "do", counted)
    threads.run()
    return most


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("zero", [*STAGES, "zero-r"])
def test_the_bytes_of_each_class_are_those_of_the_formula(zero, replicas, monkeypatch):
    """Ψ bytes of weights and gradients each and 2Ψ of moments, divided as the stage says; padding counts once per unit.

    What a stage divides may be whole for as many units as are in use at once.
    """
    units = 12
    case = make_case(zero, "mlp", replicas=replicas, microbatches=1, steps=1, rounds=2, units=units, optimizer=ADAMW)
    sizes = [8 * sum(p.numel() for p in module.parameters()) for _, module in case.units]
    whole, largest = sum(sizes), max(sizes)
    divided = sum(8 * -(-size // 8 // replicas) for size in sizes)
    padded = divided * replicas
    number = {"zero-r": 2}.get(zero) or int(zero[-1])
    workers = peaks(case, monkeypatch)
    assert sum(worker["optimizer"] for worker in workers) == 2 * whole
    for worker in workers:
        assert worker["optimizer"] <= 2 * divided
        if number == 3:  # prefetched, in use, and the one before until it is dropped
            assert divided + largest < worker["weights"] <= divided + 3 * (largest + 8 * replicas)
        else:
            assert worker["weights"] == padded
        if number == 1:
            assert whole - 2 * largest <= worker["gradients"] <= padded  # what is being summed is not counted
        else:
            assert divided / 2 < worker["gradients"] <= divided + (BUCKETS + 1) * largest


def test_saved_tensors_do_not_keep_gathered_weights(monkeypatch):
    """Autograd saves the weights of every unit in the forward; only those in use have memory."""
    case = make_case("zero-3", "mlp", replicas=2, microbatches=1, steps=1, units=12)
    filled = []
    do = Handlers.do

    def counted(self, a):
        do(self, a)
        if self.index == 0 and a.kind == ActionKind.FORWARD:
            filled.append(sum(bool(s.wholes[0].untyped_storage().nbytes()) for s in self.sharded.values()))

    monkeypatch.setattr(Handlers, "do", counted)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert len(filled) == 12
    assert max(filled) <= 3


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize(("zero", "volumes"), [("ddp", 2), ("zero-1", 2), ("zero-2", 2), ("zero-3", 3)])
def test_the_bytes_that_a_worker_sends_are_the_least(zero, volumes, replicas):
    """Per update (n − 1) / n of Ψ for each gather and each scattered sum; one gather more if weights rest divided.

    The weights of the last unit stay from its forward to its backward.
    """
    case = make_case(zero, "mlp", replicas=replicas, microbatches=1, steps=1, rounds=3, units=8)
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    before = [handlers.wire.traffic()[1] for handlers in threads.handlers]
    threads.run()
    shards = [-(-sum(p.numel() for p in module.parameters()) // replicas) * 8 for _, module in case.units]
    if zero == "ddp":
        expected = (
            2 * (replicas - 1) * sum(8 * sum(p.numel() for p in m.parameters()) for _, m in case.units) // replicas
        )
    else:
        gathered_once = shards[-1] if zero == "zero-3" else 0
        expected = (replicas - 1) * (volumes * sum(shards) - gathered_once)
    for handlers, size in zip(threads.handlers, before, strict=True):
        assert handlers.wire.traffic()[1] - size == pytest.approx(expected, abs=8)


# Checkpoints.


def state_of(case: Case, rounds: int) -> tuple[Threads, dict[str, torch.Tensor]]:
    threads = Threads(case.program, case.job, case.batches)
    for _ in range(rounds):
        threads.run()
    return threads, take_all(threads)


FROM = [("zero-1", 2), ("zero-2", 3), ("zero-3", 4)]
TO = [("1f1b", {"workers": 2, "microbatches": 12}), ("ddp", {"workers": 3, "microbatches": 4}),
      ("zero-1", {"workers": 4, "microbatches": 3}), ("zero-3", {"workers": 2, "microbatches": 6}),
      ("stronghold", {"microbatches": 12})]  # fmt: skip


@pytest.mark.parametrize(("other", "sizes"), TO, ids=[name for name, _ in TO])
@pytest.mark.parametrize(("zero", "workers"), FROM)
def test_a_checkpoint_goes_on_under_any_plan_and_back(zero, workers, other, sizes):
    options = {"steps": 1, "units": 5, "rounds": 3, "optimizer": ADAMW, "sizes": (3,)}
    first = make_case(zero, "calm-gpt", workers=workers, microbatches=12 // workers, **options)
    threads, state = state_of(first, 2)
    names = {f"weight/{unit}.{name}" for unit, m in first.units for name, _ in m.named_parameters()}
    assert {name for name in state if name.startswith("weight/")} == names
    shapes = {f"{unit}.{n}": p.shape for unit, m in first.units for n, p in m.named_parameters()}
    assert all(t.shape == shapes[name.split("/")[-1]] for name, t in state.items() if "step" not in name)
    threads.run()
    expected = take_all(threads)
    second = make_case(other, "calm-gpt", **sizes, **options)
    second.batches = first.batches
    again = Threads(second.program, second.job, second.batches)
    put_all(again, 2, state.get)
    assert all(t.equal(state[name]) for name, t in take_all(again).items() if name in state)
    again.run()
    for name, tensor in take_all(again).items():
        if name in expected:
            assert torch.allclose(tensor, expected[name], rtol=0, atol=2 * first.tolerance)


@pytest.mark.parametrize("zero", STAGES)
def test_split_masters_have_the_bits_of_replicas_before_and_after_a_checkpoint(zero):
    torch.set_default_dtype(torch.float32)
    options = {"replicas": 2, "microbatches": 2, "steps": 3, "rounds": 2, "optimizer": ADAMW}
    case = in_precision(make_case(zero, "mlp", **options))
    expected = train_plainly(case, groups=2)
    for weights in case.outcome.weights.values():
        assert all(weight.equal(expected[name]) for name, weight in weights.items())
    threads, state = state_of(case, 1)
    assert all(t.dtype == torch.float32 for t in state.values())
    assert not any("low" in name for name in state)
    again = Threads(case.program, case.job, case.batches)
    put_all(again, 3, state.get)
    threads.run(), again.run()
    found, whole = take_all(again), take_all(threads)
    assert found.keys() == whole.keys()
    assert all(t.equal(whole[name]) for name, t in found.items())


def test_gradients_of_16_bits_are_summed_in_float32_and_halve_the_messages():
    torch.set_default_dtype(torch.float32)
    options = {"replicas": 2, "microbatches": 1, "steps": 1, "optimizer": ADAMW}
    sent = {}
    for accumulate in ("fp32", "bf16"):
        case = in_precision(make_case("zero-2", "mlp", **options), SPLIT.replace(accumulate=accumulate))
        threads, _ = state_of(case, 1)
        sent[accumulate] = threads.handlers[0].wire.traffic()[1]
    assert sent["bf16"] < sent["fp32"]


def test_a_scaled_loss_of_fp16_and_its_skips_are_alike_on_all_shards():
    torch.set_default_dtype(torch.float32)
    precision = Precision(compute="fp16", masters="fp32")
    ends = []
    for name in ("ddp", "zero-3"):
        torch.manual_seed(0)
        made = make_case(
            name, "mlp", replicas=2, microbatches=1, steps=4, optimizer=ADAMW, clip="global", clip_norm=1.0
        )
        case = in_precision(made, precision)
        ends.append((case.outcome.weights[0, 0], [sorted(log.skipped) for log in case.outcome.logs]))
    (weights, skipped), (others, other_skipped) = ends
    assert skipped == other_skipped
    assert all(torch.allclose(weights[name], others[name], rtol=0, atol=1e-6) for name in weights)


# Parameters that do not train, gradients that are not finite, and what is refused.


@pytest.mark.parametrize("zero", STAGES)
def test_frozen_parameters_stay_and_units_without_trained_ones_send_nothing(zero):
    case = make_case(zero, "mlp", replicas=2, microbatches=1, units=4, optimizer=ADAMW)
    case.units[0][1].requires_grad_(False)
    case.units[2][1][0].weight.requires_grad_(False)
    frozen = {f"{u}.{n}": p.clone() for u, m in case.units for n, p in m.named_parameters() if not p.requires_grad}
    plain = case.trained_plainly()
    for weights in case.outcome.weights.values():
        for name, weight in weights.items():
            assert torch.allclose(weight, plain[name], rtol=0, atol=case.tolerance)
            assert name not in frozen or weight.equal(frozen[name])


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("clip", ["none", "global"])
def test_a_gradient_that_is_no_number_is_told(zero, clip):
    case = make_case(zero, "mlp", replicas=2, microbatches=1, clip=clip, clip_norm=1.0 if clip == "global" else None)
    spoil(case)
    with pytest.raises(InputError, match=r"(the gradient of 'u0.0.\w+'|the loss) is (nan|inf)"):
        Threads(case.program, case.job, case.batches).run()


def test_an_update_with_a_gradient_that_is_no_number_is_skipped_by_all():
    case = make_case(
        "zero-2", "mlp", replicas=2, microbatches=1, steps=3, clip="global", clip_norm=1.0, extra={"on_nan": "skip"}
    )
    spoil(case, calls=1)
    skipped = [set(log.skipped) for log in case.outcome.logs]
    assert set.union(*skipped) == {1}
    assert all(torch.isfinite(w).all() for weights in case.outcome.weights.values() for w in weights.values())


def spoil(case: Case, calls: int = 10**9) -> None:
    """Makes gradients of a unit infinite, in the first `calls` backward passes of each worker's copy."""
    module = case.units[1][1][0]
    module.register_full_backward_hook(Spoiler(calls))


class Spoiler:
    """Replaces the gradient of an input by infinity."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, _module, of_input, _of_output):
        self.calls -= 1
        return tuple(torch.full_like(g, float("inf")) for g in of_input) if self.calls >= 0 else None


@pytest.mark.parametrize("zero", STAGES)
def test_versions_other_than_sync_are_refused_with_the_reason(zero):
    plan = preset("pipedream-2bw").at(workers=2, replicas=2, microbatches=2)
    plan = plan.replace(reduce=plan.reduce.replace(wire="reduce-scatter"), keep=Keep(kind=zero, persists=True))
    case = make_case("pipedream-2bw", "mlp", workers=2, replicas=2, microbatches=2)
    case.plan = plan
    message = f"keep '{zero}' updates its shards in place, and version 'double-buffer' reads weights that are older"
    with pytest.raises(FaultsError, match=message):
        verify(case.program)


def test_threads_that_end_free_their_shards():
    case = make_case("zero-3", "mlp", replicas=2, microbatches=1)
    gc.disable()
    try:
        threads = Threads(case.program, case.job, case.batches)
        assert all(worker.fellows[0] is threads.handlers[0] for worker in threads.handlers)
        fellows = threads.handlers[0].fellows
        threads.close()
        del threads
    finally:
        gc.enable()
    gc.collect()
    assert len(fellows) == 0
