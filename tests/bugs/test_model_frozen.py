"""Frozen parameters have no optimizer state, and stay under their names in results and checkpoints of any cut."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, audit
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.verdict import judge
from pipedejavu.facts import InputError
from pipedejavu.session import Trainer
from pipedejavu.session.loop_checkpoints import load_weights
from pipedejavu.store import CheckpointDir
from tests.bugs.plain import batch, sum_of_squares


class Recorded(nn.Sequential):
    """The same network, but with a forward of its own, so that it is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def make(kind: type[nn.Sequential], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    shared = nn.Linear(6, 6).requires_grad_(False)
    return kind(nn.Linear(6, 6), shared, nn.Tanh(), nn.Linear(6, 6), shared, nn.Tanh(), nn.Linear(6, 6))


def make_trainer(model: nn.Module) -> Trainer:
    optimizer = AdamW(lr=0.01, weight_decay=0.1)
    return Trainer(model, sum_of_squares, sample=batch(0), workers=2, optimizer=optimizer)


@pytest.mark.parametrize(("kind", "other"), [(nn.Sequential, Recorded), (Recorded, nn.Sequential)])
def test_a_checkpoint_has_them_for_any_cut_and_for_a_plain_loop(kind, other, tmp_path) -> None:
    trainer = make_trainer(make(kind, seed=1))
    trainer.step(batch(1))
    trainer.save(tmp_path)
    trainer.wait()
    expected = trainer.save_to_model().state_dict()
    checkpoint = CheckpointDir(tmp_path).newest(print)
    assert checkpoint is not None
    assert "weight/1.weight" in checkpoint.manifest.tensors
    assert not [name for name in checkpoint.manifest.tensors if name.startswith("state/") and "/1." in name]
    resumed = make_trainer(make(other, seed=2))
    assert resumed.load(tmp_path) == 1
    found = resumed.save_to_model().state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain = make(nn.Sequential, seed=3)
    load_weights(plain, checkpoint)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())


def test_checkpoints_that_called_them_buffers_are_read() -> None:
    trainer = make_trainer(make(Recorded, seed=1))
    state = take_all(trainer.threads)
    names = [f"1.{name}" for name in ("weight", "bias")]
    before = {name.replace("weight/", "buffer/", 1) if name[7:] in names else name: t for name, t in state.items()}
    assert before.keys() != state.keys()
    for kind in (nn.Sequential, Recorded):
        other = make_trainer(make(kind, seed=2))
        put_all(other.threads, 0, before.get)
        found = other.save_to_model().state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_a_checkpoint_without_them_is_refused() -> None:
    trainer = make_trainer(make(nn.Sequential, seed=1))
    state = {name: t for name, t in take_all(trainer.threads).items() if ".bias" not in name or name[7] not in "14"}
    with pytest.raises(InputError, match=r"the checkpoint has no weight '1.bias'"):
        put_all(trainer.threads, 0, state.get)


@pytest.mark.parametrize("kind", [nn.Sequential, Recorded])
def test_the_audit_compares_them_too(kind) -> None:
    model = make(kind, seed=1)
    trainer = make_trainer(copy.deepcopy(model))
    trainer.step(batch(1))
    trainer.batch.take(batch(1), first=0)
    found = audit(trainer.program, trainer._job, trainer.batch, trainer.threads.outcome())
    assert judge(trainer.program, trainer._job, trainer.batch, trainer.threads.outcome()).is_passed
    assert found["1.weight"] == 0
    assert max(found.values()) < 1e-13
    assert {name for name, _ in model.named_parameters()} <= found.keys()
