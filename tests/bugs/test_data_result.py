"""What a run leaves is the whole model: buffers, frozen parameters and those that its forward does not use."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file
from torch import nn

from pipedejavu import store
from pipedejavu.engine import Sgd
from pipedejavu.launch import plan_run, train
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.session import Checkpoints, Trainer
from pipedejavu.source.model_source import open_task


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
    ).double()


class Residual(nn.Module):
    """No chain: it is recorded as a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = normalised()

    def forward(self, x):
        return self.inner(x) + x[:, :2]


@pytest.mark.parametrize("make", [normalised, Residual])
def test_statistics_come_back_to_the_users_model(make) -> None:
    torch.manual_seed(0)
    plain, model = make(), make()
    x, y = torch.randn(24, 4, dtype=torch.float64), torch.randn(24, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = Trainer(model, nn.MSELoss(), sample=(x, y), plan="1f1b", workers=2, optimizer=Sgd(lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        for inputs, targets in zip(x.split(6), y.split(6), strict=True):
            (nn.functional.mse_loss(plain(inputs), targets) / 4).backward()
        optimizer.step()
        trainer.step((x, y))
    expected = plain.state_dict()
    for name, own in trainer.save_to_model().state_dict().items():
        assert torch.allclose(own, expected[name], rtol=0, atol=1e-12), name
    assert model.eval()(x).allclose(plain.eval()(x))


ADAPTED = """
import torch
from torch import nn


class Adapted(nn.Module):
    # A frozen base with trained adapters of low rank, statistics, a parameter that no forward uses, and a tied one.
    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, 6, bias=False) for _ in range(3))
        self.norm, self.unused, self.again = nn.BatchNorm1d(6), nn.Linear(3, 3), nn.Linear(6, 2, bias=False)
        self.again.weight = self.down[0].weight

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up):
            x = base(x).tanh() + up(down(x))
        return self.norm(x)


def make():
    x = torch.randn(64, 6)
    return Adapted(), nn.MSELoss(), [(row, row.flip(0)) for row in x]
"""


def test_a_runs_own_result_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "adapted.py").write_text(ADAPTED)
    name = f"{tmp_path / 'adapted.py'}:make"
    options = TrainOptions(model=name, steps=2, optimizer="sgd", lr=0.1, checkpoint_every=2)
    options, program, _ = plan_run(options, preset("1f1b").at(workers=2, microbatches=2, samples=4))
    done = train(options, program, str(tmp_path / "run"))
    begun, loaded = open_task(name).model, open_task(name, weights=str(done.folder.model)).model
    written = load_file(done.folder.model)
    for key, tensor in loaded.state_dict().items():
        known = "down.0.weight" if key == "again.weight" else key
        assert torch.equal(tensor, written[known]), key
        is_changed = not torch.equal(tensor, begun.state_dict()[key])
        assert is_changed == (not key.startswith(("base", "unused"))), key
    assert written["norm.num_batches_tracked"] == 4
    checkpoint_dir = Checkpoints(tmp_path / "run" / "checkpoints")
    again = open_task(name, seed=1).model
    assert checkpoint_dir.load(again)[0] == 2
    store.export_hf(checkpoint_dir.checkpoint_dir.newest(print), tmp_path / "exported")
    exported = open_task(name, seed=1, weights=str(tmp_path / "exported")).model
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
        assert torch.equal(exported.state_dict()[key], tensor), key
