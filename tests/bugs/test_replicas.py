"""A bit that flipped in one replica's weights under data parallelism went unnoticed: it is found and named."""

import os
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy

from pipedejavu.engine import AdamW, Sgd, Threads
from pipedejavu.engine.byzantine import Byzantine
from pipedejavu.engine.device import CPU
from pipedejavu.engine.replicas import CHUNK, ReplicaCheck, checksum
from pipedejavu.health.failure import WorkerError
from pipedejavu.plan import preset
from pipedejavu.session import Trainer
from pipedejavu.store import CheckpointDir
from tests.bugs.test_verdict import flip, train
from tests.engine.case import make_case
from tests.engine.test_presets import SCORED, SYNCHRONOUS, VERSIONED

ADAMW = AdamW(lr=1e-2)
SIZES = {**SYNCHRONOUS, **VERSIONED, **SCORED}
SHARING = [
    n for n in SIZES if preset(n).plan.feed.kind != "own" and preset(n).plan.reduce.wire != "none" and n != "zero-3"
]
"""Replicas under ZeRO-3 have no copies: each has a part of the weights."""


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 2 * CHUNK + 3, 4 * CHUNK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_bit_changes_a_checksum_and_the_place_in_memory_does_not(size: int, dtype: torch.dtype) -> None:
    tensor, source = torch.randn(size).to(dtype), random.Random(size)
    before = int(checksum([tensor], CPU))
    memory = torch.zeros(size + 1, dtype=dtype)
    memory[1:] = tensor  # where words of 8 bytes do not begin
    assert int(checksum([memory[1:]], CPU)) == before
    raw = tensor.view(torch.uint8)
    for _ in range(20):
        at, bit = source.randrange(raw.numel()), 1 << source.randrange(8)
        raw[at] ^= bit
        assert int(checksum([tensor], CPU)) != before
        raw[at] ^= bit
    assert int(checksum([tensor], CPU)) == before
    if size > 1:
        assert int(checksum([tensor.flip(0)], CPU)) != before


@pytest.mark.parametrize("name", SHARING)
def test_replicas_of_sound_runs_agree_after_every_round(name: str) -> None:
    workers, microbatches = SIZES[name][0]
    replicas = 2 if preset(name).grows == "workers" and name != "coarse" else None
    case = make_case(
        name, "calm-gpt", workers=workers, microbatches=microbatches, steps=1, rounds=3,
        replicas=replicas, optimizer=ADAMW,
    )  # fmt: skip
    threads, check = Threads(case.program, case.job, case.batches), ReplicaCheck(case.program, case.job, 1)
    assert {copy.piece for copy in check.copies} == {*range(len(case.program.pieces))}
    for _ in range(case.rounds):
        threads.run()
        assert check.find(threads.updates, threads.handlers) == ""
    assert check.agreed == threads.updates


def test_replicas_that_update_by_themselves_are_not_compared() -> None:
    case = make_case("easgd", workers=2, microbatches=2)
    assert not ReplicaCheck(case.program, case.job, 1).copies


def test_gradients_that_are_faulty_on_purpose_leave_weights_equal() -> None:
    case = make_case("ddp", workers=3, microbatches=1, rounds=2, steps=1, extra={"byzantine": Byzantine(1, "random")})
    threads, check = Threads(case.program, case.job, case.batches), ReplicaCheck(case.program, case.job, 1)
    for _ in range(case.rounds):
        threads.run()
        assert check.find(threads.updates, threads.handlers) == ""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "sizes"), [("ddp", {"workers": 3}), ("1f1b", {"workers": 2, "replicas": 3})])
def test_a_flipped_bit_is_found_within_the_interval_and_named(name: str, sizes: dict[str, int], seed: int) -> None:
    source, every = random.Random(seed), 3
    case = make_case(name, microbatches=2, steps=1, rounds=9, optimizer=ADAMW, **sizes)
    threads, check = Threads(case.program, case.job, case.batches), ReplicaCheck(case.program, case.job, every)
    when, worker = source.randrange(1, 7), source.randrange(len(case.program.workers))
    replica = min(replica for _, replica in case.program.held(worker))
    for update in range(1, case.rounds + 1):
        if update == when:
            flip(threads, worker, source)
        threads.run()
        sentence = check.find(update, threads.handlers) if check.is_due(update, 1) else ""
        if sentence:
            break
    assert when <= update < when + every
    assert sentence.startswith(f"replica {replica} on worker {worker} holds other weights of '")
    assert f"than the 2 other replicas after update {update}, though" in sentence
    assert f"they last agreed after update {update - every}" in sentence


def test_optimizer_state_that_differs_is_found_before_it_reaches_the_weights() -> None:
    case = make_case("ddp", workers=3, microbatches=1, steps=1, rounds=2, optimizer=Sgd(lr=0.1, momentum=0.9))
    threads, check = Threads(case.program, case.job, case.batches), ReplicaCheck(case.program, case.job, 1)
    threads.run()
    home, state = next(iter(threads.handlers[2].applier.state.items()))
    name = next(iter(state))
    state[name]["momentum"].view(-1)[0] += 1
    sentence = check.find(threads.updates, threads.handlers)
    assert sentence.startswith(
        f"replica {home[1]} on worker 2 holds other optimizer state of '{name}' than the 2 other"
    )


def loss_sum(output, target):
    return cross_entropy(output, target, reduction="sum")


def test_a_trainer_stops_saves_nothing_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(6)]
    trainer = Trainer(model, loss_sum, sample=batches[0], plan="ddp", workers=2, optimizer=ADAMW, check_replicas=4)
    trainer.step(batches[0])
    trainer.save(tmp_path)
    trainer.wait()
    flip(trainer.threads, 1, random.Random(1))
    trainer.step(batches[1])
    told = r"replica 0 on worker 0 and replica 1 on worker 1 hold different weights of '.*last agreed after update 1: "
    for refused in (lambda: trainer.save(tmp_path), trainer.save_to_model):
        with pytest.raises(WorkerError, match=told):
            refused()
    trainer.step(batches[2])
    with pytest.raises(WorkerError, match=r"after update 4, though .* last agreed after update 1"):
        trainer.step(batches[3])
    assert CheckpointDir(tmp_path).steps() == [1]
    assert trainer.load(tmp_path) == 1
    for batch in batches[1:5]:
        trainer.step(batch)
    trainer.save_to_model()


@pytest.mark.slow
def test_a_run_with_processes_stops_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    """The bit flips in update 6; checkpoints are of 3, 6 and so on."""
    done = train(tmp_path, "--check-replicas", "50", "--checkpoint-every", "3")
    assert done.exit_code == 1
    expected = (
        "pipedejavu: replica 0 on worker 0 and replica 1 on worker 1 hold different weights of '2.weight' after update"
        " 6, though replicas that share every update are equal to the bit; they last agreed after update 3"
    )
    assert expected in done.stderr
    assert CheckpointDir(tmp_path / "run" / "checkpoints").steps() == [3]


def _sums_are_equal(rank: int, size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{size}", size), rank=rank, world_size=size)
    for count in (1, 2, 3, 7, 100, 4099, 100003):
        own = torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + count))
        dist.all_reduce(own)
        every = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(every, own)
        assert all(torch.equal(every[0], other) for other in every)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_processes_have_equal_bits_everywhere(tmp_path: Path, size: int) -> None:
    start_processes(_sums_are_equal, args=(size, str(tmp_path)), nprocs=size, start_method="spawn")


def test_copies_on_devices_of_other_models_are_not_compared(monkeypatch) -> None:
    """They may differ by rounding; two of one model are still compared."""
    case = make_case("ddp", workers=3, microbatches=1, steps=1)
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    flip(threads, 2, random.Random(0))
    with monkeypatch.context() as patch:
        models = iter([model for model in (1, 1, 2, 1, 2, 2) for _ in case.program.pieces])
        patch.setattr("pipedejavu.engine.replicas._model", lambda _: next(models))
        assert ReplicaCheck(case.program, case.job, 1).find(1, threads.handlers) == ""
        sentence = ReplicaCheck(case.program, case.job, 1).find(1, threads.handlers)
    assert sentence.startswith("replica 1 on worker 1 and replica 2 on worker 2 hold different weights of '")
