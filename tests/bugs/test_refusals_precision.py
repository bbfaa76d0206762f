"""What would be ignored or lost is refused in one sentence: fp16 weights, autocast, GradScaler; weights stay true."""

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


def test_fp16_parameters_are_refused(tmp_path: Path) -> None:
    x, y = (t.half() for t in batch())
    said = r"parameter '0.weight' is float16, .* only bfloat16 has float32 masters here; call model.float\(\) first"
    with pytest.raises(InputError, match=said):
        Trainer(model().half(), nn.MSELoss(), sample=(x, y))
    with pytest.raises(InputError, match=said):
        prepare(TrainOptions(model=own_model(tmp_path, torch.float16)), (4,))


def own_model(folder: Path, dtype: torch.dtype) -> str:
    """Writes a file with a function that makes a model of a format and its data; returns its name."""
    (folder / "half.py").write_text(
        "import torch\nfrom torch import nn\ndef make():\n"
        f"    rows = torch.randn(16, 4, dtype={dtype})\n"
        f"    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to({dtype})\n"
        "    return model, nn.MSELoss(), [(row, row) for row in rows]\n"
    )
    return f"{folder / 'half.py'}:make"


def test_bf16_parameters_are_trained_with_float32_masters() -> None:
    """Updates far below the resolution of bf16 add up, as they do in a float32 model."""
    x, y = (t.bfloat16() for t in batch())
    own = model().bfloat16()
    before = {name: tensor.float() for name, tensor in own.state_dict().items()}
    trainer = Trainer(own, nn.MSELoss(), sample=(x, y), optimizer=Sgd(lr=1e-4), plan="ddp", workers=1)
    assert str(trainer.program.plan.precision) == "bf16, split masters"
    trainer.step((x, y))
    masters = trainer.threads.outcome().weights[0, 0]
    assert all(master.dtype == torch.float32 for master in masters.values())
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).bfloat16()
    plain.load_state_dict({name: tensor.bfloat16() for name, tensor in before.items()})
    nn.functional.mse_loss(plain(x), y).backward()
    for name, p in plain.named_parameters():
        expected = before[name] - 1e-4 * p.grad.float()
        # The batch is 4 microbatches here, whose gradients round to bf16 one by one: 2**-8 of the largest.
        assert (masters[name] - expected).abs().max() <= 1e-4 * 2**-6 * p.grad.float().abs().max(), name
        assert not masters[name].equal(before[name])
    assert own.state_dict()["0.weight"].dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"the model is bfloat16, .* use precision bf16, or call model\.float"):
        Trainer(model().bfloat16(), nn.MSELoss(), sample=(x, y), precision="fp32")


def test_frozen_parameters_may_be_half() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.head = nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.base(x.bfloat16()).float())

    trainer = Trainer(Mixed(), nn.MSELoss(), sample=batch(), plan="ddp")
    assert trainer.step(batch()) > 0


def test_autocast_around_a_trainer_asks_for_its_precision() -> None:
    with torch.autocast("cpu"):
        trainer = Trainer(model(), nn.MSELoss(), sample=batch(), plan="ddp", workers=1)
        assert trainer.step(batch()) > 0
    assert trainer.program.plan.precision.compute == "bf16"
    assert trainer.step(batch()) > 0, "the precision is the Trainer's, not that of a step"
    assert trainer.model.state_dict()["0.weight"].dtype == torch.float32


def test_autocast_of_another_precision_is_refused() -> None:
    said = "autocast is on for cpu around Trainer.step.., and the Trainer computes fp32; leave it out"
    trainer = Trainer(model(), nn.MSELoss(), sample=batch())
    with torch.autocast("cpu"), pytest.raises(InputError, match=said):
        trainer.step(batch())
    with torch.autocast("cpu", enabled=False):
        assert trainer.step(batch()) > 0
    with torch.autocast("cpu", torch.float16), pytest.raises(InputError, match="with float16, which needs a scaled"):
        Trainer(model(), nn.MSELoss(), sample=batch())
    with pytest.raises(InputError, match=r"a precision is one of auto, bf16, .* not 'bfloat16'"):
        Trainer(model(), nn.MSELoss(), sample=batch(), precision="bfloat16")


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
