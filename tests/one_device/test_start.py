"""A Trainer under plans of one GPU and its host: like AdamW in a plain loop, saved, loaded, and switched."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipedejavu.facts import Device, Host, InputError, Link, Machine
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.plan import Keep, Plan, preset
from pipedejavu.plan.axis import Rest
from pipedejavu.planner.replan import PlanSwitch
from pipedejavu.session import Trainer
from tests.one_device.lab import SETTINGS, SPLIT, check_equal, furthest, plan_of

MACHINE = Machine(
    name="m",
    hosts=(Host(name="h"),),
    devices=(
        Device(name="gpu", kind="gpu", type="gpu", host="h", memory_bytes=2**33),
        Device(name="cpu", kind="cpu", type="cpu", host="h", memory_bytes=2**34),
    ),
    links=(Link(bytes_per_s=1e10),),
)
PLACES: tuple[Rest, ...] = ("device", "visit", "host", "lean")
CASES = [
    pytest.param(PLACES, torch.bfloat16, id="places, bfloat16"),
    *(
        pytest.param(places, dtype, marks=pytest.mark.slow)
        for places in (None, PLACES, ("window",) * 4)
        for dtype in (torch.float32, torch.bfloat16)
        if (places, dtype) != (PLACES, torch.bfloat16)
    ),
]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(6, 3)).to(dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=random).to(dtype), torch.randint(0, 3, (8,), generator=random)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.float(), target)


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n]},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.02},
    ]


def trainer_of(model: nn.Module, plan: Plan, **options: Any) -> Trainer:
    options = {
        "optimizer": torch.optim.AdamW(model.parameters(), **SETTINGS),
        "loss": mean_loss,
        "compile": "off",
    } | options
    return Trainer(model, sample=batch_of(0, next(model.parameters()).dtype), plan=plan, machine=MACHINE, **options)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def is_by_hybrid(trainer: Trainer) -> bool:
    return type(trainer.threads.workers[0]).__name__ == "DeviceWorker"


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_torch_optimizer_with_groups_and_a_scheduler_steps_as_in_a_plain_loop(microbatches: int) -> None:
    plain, model = model_of(), model_of()
    expected = torch.optim.AdamW(groups_of(plain), **SETTINGS)
    schedule = torch.optim.lr_scheduler.StepLR(expected, 2, 0.5)
    optimizer = torch.optim.AdamW(groups_of(model), **SETTINGS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    trainer = trainer_of(model, plan_of(PLACES, microbatches=microbatches), optimizer=optimizer, scheduler=scheduler)
    assert is_by_hybrid(trainer)
    for step in range(5):
        inputs, targets = batch_of(step)
        loss = mean_loss(plain(inputs), targets)
        loss.backward()
        expected.step()
        schedule.step()
        expected.zero_grad()
        assert trainer.step((inputs, targets)) == pytest.approx(loss.item(), rel=1e-5)
    assert furthest(weights_of(model), weights_of(plain)) <= 5 * 8 * 2**-24 * 0.02 / SETTINGS["eps"]


@pytest.mark.parametrize(("places", "dtype"), CASES)
def test_a_step_has_the_bits_of_hybrid_adamw(places: Any, dtype: torch.dtype) -> None:
    plain, model = model_of(dtype), model_of(dtype)
    optimizer = HybridAdamW(plain, **SETTINGS, window=None, host_threads=1)
    trainer = trainer_of(model, plan_of(places))
    for step in range(4):
        mean_loss(plain(batch_of(step, dtype)[0]), batch_of(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer.step(batch_of(step, dtype))
        if step % 2:
            check_equal(weights_of(model), weights_of(plain))
    optimizer.close()


@pytest.mark.parametrize(("places", "dtype"), CASES)
def test_a_saved_run_goes_on_with_the_same_bits(places: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    whole, first, second = model_of(dtype), model_of(dtype), model_of(dtype)
    trainer = trainer_of(whole, plan_of(places))
    for step in range(6):
        trainer.step(batch_of(step, dtype))
    before = trainer_of(first, plan_of(places))
    for step in range(3):
        before.step(batch_of(step, dtype))
    before.save(tmp_path)
    before.wait()
    after = trainer_of(second, plan_of(None if places else PLACES))
    assert after.load(tmp_path) == 3
    after.save(tmp_path / "again")  # before a step of its own
    after.wait()
    for step in range(3, 6):
        after.step(batch_of(step, dtype))
    check_equal(weights_of(second), weights_of(whole))
    last = trainer_of(model_of(dtype), plan_of(places))
    assert last.load(tmp_path / "again") == 3
    for step in range(3, 6):
        last.step(batch_of(step, dtype))
    check_equal(weights_of(last.model), weights_of(whole))


def switch_to(trainer: Trainer, plan: Plan) -> None:
    program = trainer.program
    trainer._replanner.switch = PlanSwitch.model_construct(
        plan=plan, profile=program.profile, machine=program.machine, reason="a test"
    )


def test_plans_switch_to_the_engine_and_back() -> None:
    plain, model = model_of(), model_of()
    expected = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    here = plan_of(PLACES)
    trainer = trainer_of(model, here)
    there = here.replace(keep=Keep(kind="host"), order=preset("l2l").at(microbatches=2).order, feed=here.feed.replace(
        microbatches=2, samples=here.feed.samples), cut=preset("l2l").at(microbatches=2).cut)  # fmt: skip
    kinds = []
    for step in range(6):
        mean_loss(plain(batch_of(step)[0]), batch_of(step)[1]).backward()
        expected.step()
        expected.zero_grad()
        if step in (2, 4):
            switch_to(trainer, there if step == 2 else here)
        trainer.step(batch_of(step))
        kinds.append(is_by_hybrid(trainer))
    assert kinds == [True, True, False, False, True, True]
    assert furthest(weights_of(model), weights_of(plain)) <= 6 * 16 * 2**-24 * SETTINGS["lr"] / SETTINGS["eps"]


def test_the_model_is_the_users_own_between_steps() -> None:
    model = model_of()
    trainer = trainer_of(model, plan_of(PLACES))
    assert trainer.threads.handlers[0].job.units[0][1] is model[0]
    trainer.step(batch_of(0))
    mean_loss(model(batch_of(1)[0]), batch_of(1)[1]).backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    kept = [gradient.clone() for gradient in gradients if gradient is not None]
    before = weights_of(model)
    trainer.step(batch_of(2))
    assert all(torch.equal(one, p.grad) for one, p in zip(kept, model.parameters(), strict=True) if p.grad is not None)
    assert not torch.equal(weights_of(model)["0.0.weight"], before["0.0.weight"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_equal(weights_of(other), weights_of(model))
        mean_loss(other(batch_of(1)[0]), batch_of(1)[1]).backward()


def test_a_bfloat16_model_is_trained_in_its_own_memory() -> None:
    model = model_of(torch.bfloat16)
    places = [weight.data_ptr() for weight in model.parameters()]
    trainer = trainer_of(model, plan_of(PLACES, precision=SPLIT))
    before = weights_of(model)
    trainer.step(batch_of(0, torch.bfloat16))
    assert not torch.equal(weights_of(model)["0.0.weight"], before["0.0.weight"])
    assert [weight.data_ptr() for weight in model.parameters()] == places


def test_a_second_trainer_takes_the_model_over() -> None:
    plain, model = model_of(), model_of()
    once = trainer_of(plain, plan_of(PLACES))
    first = trainer_of(model, plan_of(PLACES))
    for trainer in (once, first):
        trainer.step(batch_of(0))
    second = trainer_of(model, plan_of(("host",) * 4))
    second.step(batch_of(1))
    with pytest.raises(InputError, match=r"^another Trainer trains this model now; go on with that one$"):
        first.step(batch_of(1))
    third = trainer_of(plain, plan_of())
    third.step(batch_of(1))
    check_equal(weights_of(model), weights_of(plain))


def test_a_float32_model_trains_in_bf16_and_gets_its_masters(tmp_path: Path) -> None:
    whole, first, second = model_of(), model_of(), model_of()
    plan = plan_of(PLACES, precision=SPLIT)
    trainers = [trainer_of(model, plan, precision="bf16") for model in (whole, first)]
    assert is_by_hybrid(trainers[0])
    for step in range(4):
        trainers[0].step(batch_of(step))
        if step < 2:
            trainers[1].step(batch_of(step))
    trainers[1].save(tmp_path)
    trainers[1].wait()
    after = trainer_of(second, plan_of(precision=SPLIT), precision="bf16")
    assert after.load(tmp_path) == 2
    for step in (2, 3):
        after.step(batch_of(step))
    trainers[0].save_to_model()
    masters = {n: w for some in trainers[0].threads.outcome().weights.values() for n, w in some.items()}
    for number, module in enumerate(whole):
        for name, parameter in module.named_parameters():
            unit = trainers[0].units[number][0]
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, masters[f"{unit}.{name}"])
    assert not torch.equal(whole[3].weight, whole[3].weight.bfloat16().float())
    check_equal(weights_of(second), weights_of(whole))


def test_a_bfloat16_model_under_a_plan_of_the_engine_has_masters() -> None:
    model = model_of(torch.bfloat16)
    trainer = trainer_of(model, plan_of(PLACES, recompute=(0,), activations="host"))
    assert not is_by_hybrid(trainer)
    trainer.step(batch_of(0, torch.bfloat16))
    assert {w.dtype for some in trainer.threads.outcome().weights.values() for w in some.values()} == {torch.float32}
    assert {w.dtype for w in weights_of(model).values()} == {torch.bfloat16}


def test_a_model_that_is_traced_trains_by_hybrid_adamw_and_takes_other_shapes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = x + layer(x).tanh()
            return self.head(x)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    def tokens(step: int, width: int = 4) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 7, (4, width), generator=torch.Generator().manual_seed(step))
        return x, x.roll(1, 1)

    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    expected = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW(model.parameters(), **SETTINGS), "loss": loss}
    trainer = Trainer(model, sample=tokens(0), plan=plan_of(keep=Keep(kind="split")), machine=MACHINE, **options)
    assert is_by_hybrid(trainer)
    for step, width in enumerate([4, 4, 6, 4, 6]):
        loss(plain(tokens(step, width)[0]), tokens(step, width)[1]).backward()
        expected.step()
        expected.zero_grad()
        trainer.step(tokens(step, width))
    assert furthest(weights_of(model), weights_of(plain)) <= 5 * 24 * 2**-24 * SETTINGS["lr"] / SETTINGS["eps"]
