"""The summation service: the bits of vectors added in order, the bytes of the formula, over threads and processes."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine.summation_service import SummationService
from pipedejavu.engine.wire import Exchange, ThreadWire
from pipedejavu.plan import preset
from pipedejavu.program import summation
from pipedejavu.program.summation import interface_share
from pipedejavu.runtime.memory_group import sum_in_order
from pipedejavu.runtime.traffic import Traffic
from tests.engine.case import make_case

SIZES = [(2, 1), (2, 2), (3, 1), (4, 2), (3, 5)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUMEL = 10_007


def vector_of(rank: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    """Numbers of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (values * 10 ** torch.randint(-3, 4, (numel,), generator=generator)).to(dtype)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_get_the_sum_in_order_and_send_what_the_formula_says(n: int, k: int, dtype: torch.dtype) -> None:
    exchange = Exchange({"s0": tuple(range(n))}, {"s0": tuple(range(n, n + k))})
    wires, sums = [ThreadWire(exchange, rank) for rank in range(n + k)], {}

    def run(rank: int) -> None:
        if rank < n:
            sums[rank] = wires[rank].push_pull(vector_of(rank, dtype), "s0")
        else:
            wires[rank].serve("s0")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n + k)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    expected = sum_in_order([vector_of(rank, dtype) for rank in range(n)])
    assert all(torch.equal(sums[rank], expected) for rank in range(n))
    whole = NUMEL * expected.itemsize
    most = max(wire.traffic()[1] for wire in wires)
    assert most == pytest.approx(interface_share(n, k) * whole, abs=2 * n * expected.itemsize)


def run_process(rank: int, folder: str, n: int, k: int) -> None:
    torch.set_num_threads(1)
    summation.CHUNK_BYTES = 4000  # so that there are many chunks
    store = dist.FileStore(f"{folder}/store", n + k)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n + k)
    carried = Traffic()
    service = SummationService("s0", range(n), range(n, n + k), rank, carried)
    for dtype in DTYPES[1:3]:
        for numel in (NUMEL, 3, 0):
            if rank >= n:
                service.serve()
                continue
            found = service.push_pull(vector_of(rank, dtype, numel))
            assert torch.equal(found, sum_in_order([vector_of(r, dtype, numel) for r in range(n)]))
    dist.barrier()
    sizes = sum(NUMEL * dtype.itemsize for dtype in DTYPES[1:3])
    assert abs(carried.total()[1] - interface_share(n, k) * sizes) < 2000 if k <= n else True
    dist.destroy_process_group()


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2)])
@pytest.mark.slow
def test_processes_get_the_sum_in_order_chunk_by_chunk(tmp_path, monkeypatch, n, k):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(run_process, args=(str(tmp_path), n, k), nprocs=n + k, start_method="spawn")


@pytest.mark.parametrize(("n", "k"), [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_a_run_has_the_bits_of_an_all_reduce(n, k):
    """Both add the gradients of the replicas in their order."""
    found = []
    for name, servers in (("ddp", 0), ("byteps", k)):
        torch.manual_seed(0)
        place = preset(name).at(workers=n).place.replace(servers=servers)
        case = make_case(name, "mlp", workers=n, microbatches=2, steps=2, rounds=2, place=place)
        found.append(case.outcome.weights)
        assert case.audit() <= case.tolerance
    one, two = found
    assert one.keys() == two.keys()
    for key in one:
        assert all(torch.equal(one[key][name], two[key][name]) for name in one[key])
