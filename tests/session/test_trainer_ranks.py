"""A Trainer in the processes of a launcher: every rank runs the same script, and all end alike."""

import socket
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.processes import Processes

START = """
import copy, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import pipedejavu as pdv

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
plain = copy.deepcopy(model)
inputs = torch.randn(44, 6).double()
targets = torch.randint(0, 3, (44,))
data = TensorDataset(inputs, targets)
batches = list(zip(inputs.split(16), targets.split(16)))

def steps(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()

def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)

def distance(model, other):
    state, others = model.state_dict(), other.state_dict()
    return max((state[name] - others[name]).abs().max().item() for name in others)
"""

WHOLE = (
    START
    + """
plan, folder = sys.argv[1:]
trainer = pdv.Trainer(model, adamw(model), nn.CrossEntropyLoss(), plan=plan)
optimizer = adamw(plain)
before = trainer.evaluate(batches)
history = trainer.fit(batches, batches[:2], epochs=2)
expected = [*steps(plain, optimizer, batches), *steps(plain, optimizer, batches)]
assert max(abs(a - b) for a, b in zip(history.losses, expected, strict=True)) < 1e-12, (history.losses, expected)
assert distance(model, plain) < 1e-12, distance(model, plain)
metrics = trainer.evaluate(batches, {"square": lambda output, target: (output ** 2).mean()})
with torch.no_grad():
    output = plain(inputs)
    assert abs(metrics["loss"] - nn.functional.cross_entropy(output, targets).item()) < 1e-12
    assert metrics["accuracy"] == (output.argmax(1) == targets).double().mean().item()
    assert abs(metrics["square"] - (output ** 2).mean().item()) < 1e-12
    assert metrics["samples"] == 44 and before["loss"] > metrics["loss"]
trainer.save(folder)
trainer.wait()
other = copy.deepcopy(plain)
for parameter in other.parameters():
    parameter.data.zero_()
again = pdv.Trainer(other, adamw(other), nn.CrossEntropyLoss(), sample=batches[0], plan=plan)
assert again.load(folder) == 6 and again.samples == 88
for batch in batches:
    again.step(batch)
[*steps(plain, optimizer, batches)]
assert distance(other, plain) < 1e-12, distance(other, plain)
print(f"rank {rank} done")
"""
)

SHARDS = (
    START
    + """
sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True, seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler)
trainer = pdv.Trainer(model, adamw(model), nn.CrossEntropyLoss(), plan="ddp", batches="shard")
losses = trainer.fit(loader, epochs=2).losses
optimizer, expected = adamw(plain), []
shards = [DistributedSampler(data, num_replicas=size, rank=n, shuffle=True, seed=3) for n in range(size)]
for epoch in range(2):
    for shard in shards:
        shard.set_epoch(epoch)
    parts = [list(DataLoader(data, batch_size=8, sampler=shard)) for shard in shards]
    joined = [tuple(map(torch.cat, zip(*batch))) for batch in zip(*parts)]
    expected += steps(plain, optimizer, joined)
assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-12
assert distance(model, plain) < 1e-12
print(f"rank {rank} done")
"""
)

UNEQUAL = (
    START
    + """
trainer = pdv.Trainer(model, adamw(model), nn.CrossEntropyLoss(), plan="ddp", **{options})
{calls}
"""
)


def run_ranks(script: str, folder: Path, processes: Processes, *arguments: str) -> list[tuple[int, str, str]]:
    """Runs a script in two processes with the variables that torchrun sets; returns code and output of each."""
    path = folder / "script.py"
    path.write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        processes.start((sys.executable, str(path), *arguments), folder, RANK=str(n), LOCAL_RANK=str(n), **variables)
        for n in range(2)
    ]
    return [processes.finish(process) for process in started]


@pytest.mark.parametrize("plan", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "ddp"))])
def test_ranks_train_evaluate_save_and_load_as_a_plain_loop(plan: str, tmp_path: Path, processes) -> None:
    for n, (code, out, err) in enumerate(run_ranks(WHOLE, tmp_path, processes, plan, "saved")):
        assert code == 0, err
        assert out == f"rank {n} done\n"
        said = "pipedejavu: all 2 ranks give the same batch: a step trains on it once\n"
        assert err.count(said) == (n == 0)


def test_ranks_give_their_shares_of_a_batch(tmp_path: Path, processes) -> None:
    for n, (code, out, err) in enumerate(run_ranks(SHARDS, tmp_path, processes)):
        assert code == 0, err
        assert out == f"rank {n} done\n"


@pytest.mark.parametrize(
    ("options", "calls", "sentence"),
    [
        pytest.param(
            {"batches": "shard"},
            "trainer.step(batches[0])",
            "pipedejavu: all 2 ranks give the same batch, and batches are 'shard', each rank's share; give the"
            " DataLoader a DistributedSampler, or batches='global' to train on it once\n",
            id="equal shards",
        ),
        pytest.param(
            {"batches": "global"},
            "trainer.step(batches[rank])",
            "pipedejavu: rank 1 gives another batch than rank 0, and batches are 'global'; seed the order of the"
            " loaders alike, or give batches='shard' if each rank has its share\n",
            id="other batches",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {},
            "trainer.step(batches[0])\nif rank == 0:\n    model.state_dict()",
            "pipedejavu: rank 0 is at state_dict where rank 1 is at the end of the script; let all ranks make the same"
            " calls of the Trainer, state_dict() of its model included, with as many batches on each\n",
            id="a call of one rank",
        ),
        pytest.param(
            {},
            "trainer.step(batches[0])\ntrainer.save(f'/nowhere/{rank}')",
            "pipedejavu: the ranks call save with different folders, rank 0 with /nowhere/0; give all ranks one folder"
            " that all of them see, not a temporary one of their own\n",
            id="a folder per rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"workers": 3},
            "trainer.step(batches[0])",
            "pipedejavu: the plan has 3 workers and 2 ranks were started; start one for each\n",
            id="another number of workers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_ends_all_ranks_with_one_sentence(options, calls, sentence, tmp_path: Path, processes) -> None:
    script = UNEQUAL.replace("{options}", repr(options)).replace("{calls}", calls)
    ended = run_ranks(script.replace('plan="ddp", ', "" if "plan" in options else 'plan="ddp", '), tmp_path, processes)
    assert [code for code, _, _ in ended] == [2, 2]
    printed = "".join(err for _, _, err in ended)
    assert printed.count(sentence) == 1, printed
    assert "Traceback" not in printed


def test_a_rank_that_fails_ends_the_other(tmp_path: Path, processes) -> None:
    calls = "trainer.step(batches[0])\nif rank == 1:\n    raise ValueError('no such file')\ntrainer.step(batches[0])"
    script = UNEQUAL.replace("{options}", "{}").replace("{calls}", calls)
    ended = run_ranks(script, tmp_path, processes)
    assert [code for code, _, _ in ended] == [1, 1]
    assert ended[1][2].endswith("ValueError: no such file\npipedejavu: worker 1 raised ValueError\n")
    assert "Traceback" not in ended[0][2], ended[0][2]
