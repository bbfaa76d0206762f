"""Cases run by two processes, which compare their weights with those of workers as threads, to the bit.

On a GPU both processes share cuda:0 and pass tensors through CUDA IPC.
"""

import os
import random
import time

import torch
import torch.distributed as dist

from pipedejavu.engine import rank_wire
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.engine.threads import final_weights
from pipedejavu.engine.wire_choice import WireKind
from tests.engine.case import make_case

CASES = {
    "1f1b": ("1f1b", "mlp", {"workers": 2, "microbatches": 7}),
    "ddp": ("ddp", "mlp", {"workers": 2, "microbatches": 2}),
    "interleaved": ("interleaved", "mlp", {"workers": 2, "microbatches": 4}),
    "gems": ("gems-mast", "mlp", {"workers": 2, "microbatches": 2}),
    "zb-h1": ("zb-h1", "mlp", {"workers": 2, "microbatches": 4}),
    "coarse": ("coarse", "mlp", {"workers": 1, "microbatches": 2}),
    "tied": ("1f1b", "calm-gpt", {"workers": 2, "microbatches": 3}),
    "zero-1": ("zero-1", "gpt", {"workers": 2, "microbatches": 2, "clip": "global", "clip_norm": 0.1}),
    "zero-2": ("zero-2", "calm-gpt", {"workers": 2, "microbatches": 1}),
    "zero-3": ("zero-3", "gpt", {"workers": 2, "microbatches": 2}),
    "experts": ("moe", "moe", {"workers": 2, "microbatches": 2, "clip": "global", "clip_norm": 0.3}),
    "zero-r": ("zero-r", "mlp", {"workers": 2, "microbatches": 2}),
}
"""Preset, model and sizes."""


def case_of(name, type_):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    preset, model, sizes = CASES[name]
    if type_ == "gpu" and model in ("gpt", "moe"):  # a GPU draws other masks of dropout than the replay on the CPU
        model = f"calm-{model}"
    return make_case(preset, model, **sizes, steps=2, rounds=3, type_=type_)


def run_rank(rank, folder, names, type_, late, cycles=2_000_000, over_gloo=False):
    """Runs cases as one of two ranks; `late` delays what it does at random, lane by lane.

    With `over_gloo` the ranks are as those of hosts that share no memory.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in one order, whatever the stream
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    if late:
        delay(random.Random(rank), cycles)
    for name in names:
        case = case_of(name, type_)
        is_on_gpu = case.device.type == "cuda" and not case.plan.place.cpu_replicas
        wanted = WireKind.CUDA_IPC if is_on_gpu else WireKind.SHARED_MEMORY
        if over_gloo:
            rank_wire.open_listener, wanted = (lambda: None), WireKind.GLOO
        run = RankRun(case.program, case.job, case.batches)
        wire = run.wire
        assert {choice.kind for choice in (*wire.edges.values(), *wire.groups.values())} == {wanted}, wire.describe()
        first = case.plan.steps
        for _ in run.rounds(range(0, first * case.rounds, first)):
            pass
        if name == "ddp":
            check_collectives(wire, case.device)
        run.handlers.gather_masters()
        wire.close()
        check_same(case, run)
        if rank == 0:
            foreign = 8 * 2 * len(case.units) if case.device.type == "cuda" else 1
            assert case.audit() <= foreign * case.tolerance
        dist.barrier()
    dist.destroy_process_group()


def check_collectives(wire, device):
    """The collectives of this wire return what those of threads do."""
    rows = torch.arange(6, device=device).view(6, 1) * (wire.rank + 1.0)
    run = wire.reduce_scatter(rows, "s0")
    assert run.device.type == device.type
    assert run.tolist() == [[[0], [3], [6]], [[9], [12], [15]]][wire.rank]
    assert wire.all_gather(run, "s0").tolist() == [[3.0 * n] for n in range(6)]
    halves = [[0, 1, 2, 0, 2, 4], [3, 4, 5, 6, 8, 10]]
    assert wire.all_to_all(rows, "s0").flatten().tolist() == halves[wire.rank]
    uneven = [[0, 1, 0, 2, 4, 6, 8], [2, 3, 4, 5, 10]]
    assert wire.all_to_all(rows, "s0", [[2, 4], [5, 1]]).flatten().tolist() == uneven[wire.rank]
    assert torch.equal(wire.reduce_scatter(rows, "alone"), rows)


def check_same(case, run):
    """A rank's weights, losses and log are those of its worker as a thread; it has sent something."""
    held = final_weights(run.handlers)
    assert held.keys() >= {*case.program.held(run.rank)}
    for key, weights in held.items():
        for name, weight in weights.items():
            assert weight.device == case.outcome.weights[key][name].device
            assert torch.equal(weight, case.outcome.weights[key][name]), (case.plan.name, key, name)
    log, other = run.handlers.log, case.outcome.logs[run.rank]
    assert log.losses == other.losses
    assert sorted(map(str, log.events)) == sorted(map(str, other.events))


def delay(source, cycles):
    """Makes actions of all lanes late at random, on the device if there is one and on the host."""
    do = Handlers.do

    def late(self, a):
        if self.device.type == "cuda" and source.random() < 0.5:
            torch.cuda._sleep(int(source.random() * cycles))
        if source.random() < 0.5:
            time.sleep(source.random() * 2e-3)
        do(self, a)

    Handlers.do = late
