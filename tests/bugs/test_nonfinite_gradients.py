"""Gradients that are not finite under `on_nan="stop"`, while the loss is: they were applied, and saved as NaN weights.

The unit that makes them is one that users write: the derivative of a square root at zero is infinite, times zero NaN.
A sample of zeros has a finite loss and NaN gradients.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Sgd, run_threads
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads, final_weights
from pipedejavu.facts import InputError
from pipedejavu.plan import Feed, Reduce
from pipedejavu.session import Trainer
from tests.engine.case import Case, make_case


class Distance(nn.Module):
    """Distances from planes through zero, without the ε that a careful author adds."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.plane(x) ** 2).sqrt()


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def zeros_in_step_2(name: str, **settings: object) -> Case:
    """Three updates of a preset, one sample of the second being zero."""
    case = make_case(name, steps=3, **settings)
    case.units[0] = ("u0", Distance())
    case.batches.x[case.program.update_size][0] = 0.0
    return case


def large_in_step_2(size: float, **settings: object) -> Case:
    """Two updates of 1F1B with a linear model, one sample of the second being very large; its loss is finite."""
    case = make_case("1f1b", workers=2, microbatches=2, units=2, **settings)
    case.units[:] = [("u0", nn.Linear(5, 5)), ("u1", nn.Linear(5, 3))]
    case.batches.x[2][0] = size
    with torch.no_grad():
        likely = nn.Sequential(*(module for _, module in case.units))(case.batches.x[2][0]).argmax()
    case.batches.y[2][0] = (likely + 1) % 3
    return case


def plain_steps(case: Case, count: int) -> dict[str, Tensor]:
    """Trains a plain loop for some updates, with torch's own optimizer."""
    model = nn.ModuleDict(dict(case.units))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    size = case.program.update_size
    for update in range(count):
        members = range(update * size, (update + 1) * size)
        optimizer.zero_grad()
        for i in members:
            value = case.batches.inputs(i)
            for module in model.values():
                value = module(value)
            nn.functional.cross_entropy(value, case.batches.targets(i), reduction="sum").backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= sum(case.batches.count(i) for i in members)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


PRESETS = {
    "1f1b": {"workers": 2, "microbatches": 2},
    "ddp": {"workers": 2},
    "fine": {"workers": 2, "microbatches": 2},
    "zero-offload": {"workers": 1},
    "pipedream": {"workers": 2},
    "parameter-server": {"workers": 2},
    "easgd": {"workers": 2},
    "easgd-sync": {"workers": 2},
    "distreal": {
        "workers": 2,
        "feed": Feed(kind="own"),
        "reduce": Reduce(wire="all-reduce", combiner="average", period=2),
    },
    "hogwild": {"workers": 2},
    "hetpipe": {"workers": 2},
}


@pytest.mark.parametrize("name", PRESETS)
def test_no_update_is_made_of_gradients_that_are_not_finite(name: str) -> None:
    case = zeros_in_step_2(name, **PRESETS[name])
    threads = Threads(case.program, case.job, case.batches)
    with pytest.raises(InputError, match=r"the gradient of 'u0\.plane\.weight' is nan in step 2 on worker \d; lower"):
        threads.run()
    for handlers in threads.handlers:
        for weights in final_weights(handlers).values():
            assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_no_worker_makes_the_update_if_the_plan_has_a_norm() -> None:
    case = zeros_in_step_2("1f1b", workers=2, microbatches=2, clip="global")
    threads = Threads(case.program, case.job, case.batches)
    with pytest.raises(InputError, match=r"'u0\.plane\.weight' is nan in step 2 on worker 0; .* \(--on-nan skip\)"):
        threads.run()
    expected = plain_steps(case, 1)
    found = {n: w for own in threads.handlers for ws in final_weights(own).values() for n, w in ws.items()}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_delayed_clipping_stops_at_the_update_itself() -> None:
    case = zeros_in_step_2("pipedream", workers=2, clip="delayed", clip_norm=1.0)
    with pytest.raises(InputError, match=r"the gradient of 'u0\.plane\.weight' is nan in step 2"):
        run_threads(case.program, case.job, case.batches)


@pytest.mark.parametrize("clip", [None, "global"])
def test_gradients_whose_square_overflows_adam_are_refused(clip: str | None) -> None:
    case = large_in_step_2(1e30, clip=clip, optimizer=AdamW(lr=0.01))
    said = (
        r"'u\d\.weight' reaches \d\.\d+e\+\d\d in step 2 on worker \d, and the optimizer overflows beyond 9\.\d+e\+18;"
    )
    with pytest.raises(InputError, match=said):
        run_threads(case.program, case.job, case.batches)


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": Sgd(lr=1e-25)}, {"optimizer": AdamW(lr=0.01), "clip": "global", "clip_norm": 1.0}],
    ids=["sgd squares nothing", "clipped"],
)
def test_large_gradients_that_the_optimizer_can_take_are_taken(settings: dict[str, object]) -> None:
    case = large_in_step_2(1e25, **settings)
    assert all(bool(w.isfinite().all()) for weights in case.outcome.weights.values() for w in weights.values())
    assert max(log.losses[2] for log in case.outcome.logs if log.losses) > 1e20


def test_a_step_that_overflows_is_refused() -> None:
    case = make_case("1f1b", workers=2, microbatches=2, optimizer=Sgd(lr=1e39))
    with pytest.raises(InputError, match=r"in step 1 on worker \d, and the optimizer overflows beyond 0\.17"):
        run_threads(case.program, case.job, case.batches)


class Net(nn.Module):
    """A model of a user, with BatchNorm; a mask and the bias of an unused class are minus infinity on purpose."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle, self.norm, self.last = middle, nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1))
        with torch.no_grad():
            self.last.bias[2] = -math.inf

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.middle(x) @ self.mask.exp()))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 5), torch.randint(0, 2, (8,))


def test_a_trainer_stops_and_saves_nothing_that_is_not_finite(tmp_path) -> None:
    trainer = Trainer(Net(Distance()), loss, sample=batch(), workers=2, optimizer=Sgd(lr=0.1))
    trainer.step(batch())
    trainer.save(tmp_path)
    trainer.wait()
    bad = batch()
    bad[0][3] = 0.0
    with pytest.raises(InputError, match=r"the gradient of '.*plane\.weight' is nan in step 2") as stopped:
        trainer.step(bad)
    for refuses in (lambda: trainer.save(tmp_path), trainer.save_to_model):
        with pytest.raises(InputError) as refused:
            refuses()
        assert refused.value is stopped.value
    again = Trainer(Net(Distance()), loss, sample=batch(), workers=2, optimizer=Sgd(lr=0.1))
    assert again.load(tmp_path) == 1


def test_running_statistics_that_overflow_are_not_saved(tmp_path) -> None:
    """Of a sample of 1e25 BatchNorm makes finite activations and gradients, and an infinite running variance."""
    trainer = Trainer(Net(nn.Identity()), loss, sample=batch(), workers=1, plan="ddp", optimizer=Sgd(lr=0.1))
    bad = batch()
    bad[0][3] = 1e25
    assert math.isfinite(trainer.step(bad))
    with pytest.raises(
        InputError, match=r"buffer '.*norm\.running_var' on worker 0 holds inf after step 1, and is not"
    ):
        trainer.save(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_of_infinite_statistics_is_refused() -> None:
    case = make_case("1f1b", "convnet", workers=2, microbatches=2)
    threads = Threads(case.program, case.job, case.batches)
    state = take_all(threads)
    state["buffer/u1.1.running_var"][0] = math.inf
    with pytest.raises(InputError, match=r"buffer 'u1\.1\.running_var' of the checkpoint holds inf; go on from"):
        put_all(threads, 1, state.get)


def test_weights_that_overflow_are_not_saved() -> None:
    case = make_case("1f1b", workers=2, microbatches=2)
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    name, weight = next(iter(final_weights(threads.handlers[1])[1, 0].items()))
    weight.view(-1)[0] = math.inf
    with pytest.raises(InputError, match=rf"weight '{name}' on worker 1 holds inf after step 2, and is not saved"):
        take_all(threads)
