"""The wire by NCCL: its protocol on CPUs with Gloo in the place of NCCL, and NCCL itself if there are two GPUs."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine.nccl_wire import NcclWire

on_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")]


def exchange(rank, folder, backend):
    """Sends messages of several kinds both ways, one with an empty tensor, and calls each collective."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    wire = NcclWire(rank, device, [(0, 1), (1, 0)], {"all": (0, 1)}, backend)
    for n in range(6):
        size = 1 + n % 2
        sent = (torch.full((2, size), n, device=device).t(), torch.empty(0, 3, device=device))
        if rank == 0:
            wire.send(sent, 1, ("x", size))
            received = wire.receive(1, ("g", size))
        else:
            received = wire.receive(0, ("x", size))
            wire.send(sent, 0, ("g", size))
        assert [t.device for t in received] == [device] * 2
        assert torch.equal(received[0], sent[0])
        assert received[1].shape == (0, 3)
    total = wire.add_up(torch.ones(4, device=device) * (rank + 1), "all")
    assert torch.equal(total, torch.full((4,), 3.0, device=device))
    assert wire.traffic() == (6 + 2, 8 * 2 * (3 * 1 + 3 * 2) + 16)
    rows = torch.arange(4.0, device=device) * (rank + 1)
    run = wire.reduce_scatter(rows, "all")
    assert run.tolist() == [[0.0, 3.0], [6.0, 9.0]][rank]
    assert wire.all_gather(run, "all").tolist() == [0.0, 3.0, 6.0, 9.0]
    assert wire.all_to_all(rows, "all", [[1, 3], [4, 0]]).tolist() == [[0.0, 0.0, 2.0, 4.0, 6.0], [1.0, 2.0, 3.0]][rank]
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=on_gpus)])
def test_messages_keep_their_order_and_sums_are_those_of_all(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(exchange, args=(str(tmp_path), backend), nprocs=2, start_method="spawn")
