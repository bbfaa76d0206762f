"""What would be ignored or lost is refused in one sentence: half precision, autocast, GradScaler; weights stay true."""

import copy
import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu import HybridAdamW
from pipedejavu.engine import Sgd
from pipedejavu.facts import InputError
from pipedejavu.launch import plan_run
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.session import Trainer
from pipedejavu.source.model_source import open_task
from pipedejavu.source.task import prepare


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(size: int = 8):
    x = torch.linspace(-1, 1, size * 4).reshape(size, 4)
    return x, x[:, :2].square()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_without_masters_is_refused(dtype, tmp_path: Path) -> None:
    half = str(dtype).removeprefix("torch.")
    x, y = (t.to(dtype) for t in batch())
    said = rf"parameter '0.weight' is {half}, .* float32 .*model.float\(\)"
    with pytest.raises(InputError, match=said):
        Trainer(model().to(dtype), nn.MSELoss(), sample=(x, y))
    (tmp_path / "half.py").write_text(
        "import torch\nfrom torch import nn\ndef make():\n"
        f"    rows = torch.randn(16, 4, dtype={dtype})\n"
        f"    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to({dtype})\n"
        "    return model, nn.MSELoss(), [(row, row) for row in rows]\n"
    )
    with pytest.raises(InputError, match=said):
        prepare(TrainOptions(model=f"{tmp_path / 'half.py'}:make"), (4,))


def test_frozen_parameters_may_be_half() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.head = nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.base(x.bfloat16()).float())

    trainer = Trainer(Mixed(), nn.MSELoss(), sample=batch(), plan="ddp")
    assert trainer.step(batch()) > 0


def test_autocast_around_a_trainer_is_refused() -> None:
    said = "autocast is on for cpu around Trainer.*; leave it out"
    with torch.autocast("cpu"), pytest.raises(InputError, match=said):
        Trainer(model(), nn.MSELoss(), sample=batch())
    trainer = Trainer(model(), nn.MSELoss(), sample=batch())
    with torch.autocast("cpu"), pytest.raises(InputError, match=said):
        trainer.step(batch())
    with torch.autocast("cpu", enabled=False):
        assert trainer.step(batch()) > 0


@pytest.mark.parametrize("unscales", [True, False])
def test_a_grad_scaler_is_refused_by_the_hybrid_optimizer(unscales) -> None:
    own, (x, y) = model(), batch()
    optimizer, scaler = HybridAdamW(own, lr=0.1, device="cpu"), torch.amp.GradScaler("cpu")
    scaler.scale(nn.functional.mse_loss(own(x), y)).backward()
    before = copy.deepcopy(own.state_dict())
    said = "GradScaler scales a loss that HybridAdamW .* bfloat16"
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(InputError, match=said):
        scaler.step(optimizer)
    assert all(torch.equal(t, before[n]) for n, t in own.state_dict().items())
    optimizer.zero_grad()
    nn.functional.mse_loss(own(x), y).backward()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert not torch.equal(own.state_dict()["0.weight"], before["0.weight"])
    optimizer.close()


def test_the_state_of_the_users_model_is_the_trained_one(tmp_path: Path) -> None:
    plain, own, (x, y) = model(), model(), batch()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    trainer = Trainer(own, nn.MSELoss(), sample=(x, y), optimizer=Sgd(lr=0.5))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
        trainer.step((x, y))
        for name, tensor in own.state_dict().items():
            assert torch.allclose(tensor, plain.state_dict()[name], rtol=0, atol=1e-6), name
    trainer.save(tmp_path)
    trainer.wait()
    trainer.step((x, y))
    trainer.load(tmp_path)
    assert torch.allclose(own.state_dict()["0.weight"], plain.state_dict()["0.weight"], rtol=0, atol=1e-6)
    assert copy.deepcopy(own).state_dict().keys() == pickle.loads(pickle.dumps(own)).state_dict().keys()
    trainer.step((x, y))
    kept = {name: tensor.clone() for name, tensor in trainer.save_to_model().state_dict().items()}
    del trainer
    assert all(torch.equal(tensor, kept[name]) for name, tensor in own.state_dict().items())


def test_pretrained_weights_need_data_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}')
    options = TrainOptions(model=f"hf:{tmp_path}", weights=str(tmp_path))
    said = "begins with pretrained weights, and no data is named .*--data"
    with pytest.raises(InputError, match=said):
        plan_run(options, preset("ddp").at(replicas=1))
    with pytest.raises(InputError, match=said):
        open_task(options.model, weights=options.weights)
