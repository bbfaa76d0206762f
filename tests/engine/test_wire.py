"""Wires: channels keep their order, groups give all members one sum, a failure wakes everyone, traffic is counted."""

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine.wire import Exchange, ProcessWire, ThreadWire, WireStoppedError, flatten, unflatten


def on_threads(*calls):
    """Runs calls side by side; returns what each returned or raised."""
    results = [None] * len(calls)

    def run(n):
        try:
            results[n] = calls[n]()
        except BaseException as error:
            results[n] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    return results


def test_a_channel_is_first_in_first_out_and_apart_from_the_others():
    exchange = Exchange({})
    first, second, third = (ThreadWire(exchange, n) for n in range(3))

    def send(wire, base):
        for n in range(50):
            wire.send((torch.tensor(base + n), torch.tensor(-n)), 2, ("x", n))

    def receive():
        pairs = [[third.receive(source, ("x", n)) for n in range(50)] for source in (1, 0)]
        return [[tuple(map(int, pair)) for pair in found] for found in pairs]

    *_, found = on_threads(lambda: send(first, 0), lambda: send(second, 1000), receive)
    assert found == [[(1000 + n, -n) for n in range(50)], [(n, -n) for n in range(50)]]


def test_what_is_sent_back_is_another_channel():
    exchange = Exchange({})
    first, second = ThreadWire(exchange, 0), ThreadWire(exchange, 1)
    first.send((torch.tensor(1),), 1, ("x",))
    second.send((torch.tensor(2),), 0, ("g",))
    assert int(first.receive(1, ("g",))[0]) == 2
    assert int(second.receive(0, ("x",))[0]) == 1


def test_all_members_of_a_group_get_the_same_bits():
    """The order of a sum of floats matters; every member must use the same one."""
    exchange = Exchange({"all": (0, 1, 2, 3), "pair": (1, 3)})
    values = [torch.tensor([1e16, 0.1]), torch.tensor([1.0, 0.2]), torch.tensor([-1e16, 0.3]), torch.tensor([1.0, 0.7])]
    expected = [torch.stack([v * n for v in values]).sum(0) for n in range(1, 30)]

    def member(worker):
        wire = ThreadWire(exchange, worker)
        return [wire.add_up(values[worker] * n, "all") for n in range(1, 30)]

    results = on_threads(*(lambda w=w: member(w) for w in range(4)))
    for result in results:
        assert all(torch.equal(total, wanted) for total, wanted in zip(result, expected, strict=True))


def test_groups_meet_apart_and_leave_what_was_given_alone():
    exchange = Exchange({"a": (0, 1), "b": (0, 1)})
    given = [torch.ones(2), 2 * torch.ones(2)]

    def member(worker, groups):
        wire = ThreadWire(exchange, worker)
        return on_threads(*(lambda g=g: wire.add_up(given[worker] * (1 + (g == "b")), g) for g in groups))

    first, second = on_threads(lambda: member(0, "ab"), lambda: member(1, "ba"))
    assert torch.equal(first[0], torch.full((2,), 3.0))
    assert torch.equal(first[1], torch.full((2,), 6.0))
    assert torch.equal(second[1], first[0])
    assert torch.equal(given[0], torch.ones(2))


@pytest.mark.parametrize("waits", ["receive", "add_up"])
def test_stop_wakes_waiting_receivers(waits):
    exchange = Exchange({"all": (0, 1, 2)})
    started = threading.Barrier(3)

    def wait(worker):
        wire = ThreadWire(exchange, worker)
        started.wait()
        if waits == "receive":
            wire.receive(2, ("x",))
        else:
            wire.add_up(torch.ones(1), "all")

    def stop():
        started.wait()
        ThreadWire(exchange, 2).stop()

    results = on_threads(lambda: wait(0), lambda: wait(1), stop)
    assert [type(result) for result in results] == [WireStoppedError, WireStoppedError, type(None)]


@pytest.mark.parametrize("waits", ["receive", "add_up"])
def test_a_receive_after_the_stop_does_not_wait(waits):
    exchange = Exchange({"all": (0, 1)})
    wire = ThreadWire(exchange, 0)
    ThreadWire(exchange, 1).stop()
    call = {"receive": lambda: wire.receive(1, ("x",)), "add_up": lambda: wire.add_up(torch.ones(1), "all")}[waits]
    (result,) = on_threads(call)
    assert isinstance(result, WireStoppedError)


def test_tensors_survive_being_flattened():
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 4), torch.randn(5)]
    flat = flatten(tensors)
    assert flat.shape == (12,)
    assert all(torch.equal(a, b) for a, b in zip(unflatten(flat, tensors), tensors, strict=True))
    assert flatten([]).numel() == 0
    assert unflatten(flatten([]), []) == []


def between_processes(rank, folder):
    """Sends one kind of value twice and takes part in a sum; notes what the wire carried."""
    torch.set_default_dtype(torch.float64)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    wire = ProcessWire(rank, {"all": (0, 1)})
    carried = []
    for n in range(2):
        if rank == 0:
            wire.send((torch.full((3, 2), float(n)), torch.tensor([n])), 1, ("x", 0))
            wire.flush()
        else:
            x, index = wire.receive(0, ("x", 0))
            assert torch.equal(x, torch.full((3, 2), float(n)))
            assert int(index) == n
        carried.append(wire.traffic())
    total = wire.add_up(torch.ones(4) * (rank + 1), "all")
    assert torch.equal(total, torch.full((4,), 3.0))
    carried.append(wire.traffic())
    Path(folder, f"{rank}.json").write_text(json.dumps(carried))
    dist.destroy_process_group()


def test_a_process_counts_what_it_sends(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(between_processes, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    header = len('[[[3, 2], "float64"], [[1], "int64"]]')
    message = 8 * (6 + 1)
    assert first[0] == [4, 8 + header + message]  # the header's length and the header, once
    assert first[1] == [6, 8 + header + 2 * message]
    assert second[:2] == [[0, 0], [0, 0]]
    assert [n - m for n, m in zip(first[2], first[1], strict=True)] == [2, 32]  # half of four numbers, there and back
    assert second[2] == [2, 32]


def expect_in_a_process(rank, folder):
    """Takes values of three kinds in an order of its own, each with what comes behind it said or not."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    wire, kinds = ProcessWire(rank, {}), [0, 0, 1, 0, 1, 2, 2, 1, 0, 0]
    for n, kind in enumerate(kinds):
        if rank == 0:
            wire.send((torch.full((kind + 1,), n), torch.full((2, kind + 1), n)), 1, ("x", kind))
            continue
        if n % 4 and n + 1 < len(kinds):
            wire.expect(0, ("x", kinds[n + 1]))
        found = wire.receive(0, ("x", kind))
        assert [t.tolist() for t in found] == [[n] * (kind + 1), [[n] * (kind + 1)] * 2]
    wire.flush()
    dist.destroy_process_group()


def test_what_is_expected_keeps_the_order_of_its_channel(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(expect_in_a_process, args=(str(tmp_path),), nprocs=2, start_method="spawn")


def scattered(wire, rank):
    """Takes part in one collective of each kind; returns the results and what the wire carried."""
    generator = torch.Generator().manual_seed(rank)
    vector = torch.randn(6, 2, generator=generator, dtype=torch.float32) * 1e4
    low = vector.bfloat16()
    run = wire.reduce_scatter(vector, "all")
    results = [run, wire.reduce_scatter(low, "all"), wire.all_gather(run, "all"), wire.all_to_all(vector, "all")]
    return [*results, wire.all_to_all(vector, "all", [[0, 4, 2], [6, 0, 0], [1, 2, 3]])], wire.traffic()


def scattered_by_process(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    torch.save(scattered(ProcessWire(rank, {"all": (0, 1, 2)}), rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_threads_and_processes_scatter_gather_and_exchange_the_same_bits_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(scattered_by_process, args=(str(tmp_path),), nprocs=3, start_method="spawn")
    exchange = Exchange({"all": (0, 1, 2)})
    threads = on_threads(*(lambda r=r: scattered(ThreadWire(exchange, r), r) for r in range(3)))
    for rank, (expected, traffic) in enumerate(threads):
        results, carried = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
        exchanged = [6, 6, 3][rank]  # rows to others in the uneven exchange
        assert carried == traffic == (10, 8 * (4 + 2 + 4 + 4 + exchanged))
    drawn = [torch.empty(6, 2, dtype=torch.float32) for _ in range(3)]
    drawn = [t.normal_(generator=torch.Generator().manual_seed(r)) * 1e4 for r, t in enumerate(drawn)]
    assert torch.equal(threads[0][0][2], (drawn[0] + drawn[1]) + drawn[2])
    assert torch.equal(threads[1][0][4], torch.cat([drawn[0][:4], drawn[2][1:3]]))


def test_rows_that_cannot_be_divided_evenly_are_refused():
    wire = ThreadWire(Exchange({"all": (0, 1)}), 0)
    with pytest.raises(ValueError, match="7 rows cannot be divided evenly over 2 members; pad them"):
        wire.all_to_all(torch.ones(7), "all")
