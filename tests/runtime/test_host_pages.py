"""Memory that is mapped in the background: zeroed, taken in order, given back, and taken by an optimizer."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipedejavu.facts import InputError
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.runtime import host_pages
from pipedejavu.runtime.host_memory import Slab
from pipedejavu.runtime.host_pages import STRETCH_BYTES, end_warming, take_warm, warm_bytes, warm_host_memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _ended():
    yield
    end_warming()


def zero(address, size, progress):
    pytest.fail("memory that is mapped already was written again")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_ranges_are_zero_disjoint_and_reported_in_full() -> None:
    warm_host_memory(3 * STRETCH_BYTES, num_threads=2)
    sizes, ends, reported = (STRETCH_BYTES + 3, 5, STRETCH_BYTES // 2), [0], []
    for size in sizes:
        pages, start = take_warm(size, reported.append)
        assert start % (2 * MIB) == 0
        assert start >= ends[-1]
        ends.append(start + size)
        assert bytes(pages[start : start + size]).count(0) == size
        pages[start : start + size] = b"\1" * size
    assert sum(reported) == sum(sizes)
    assert take_warm(2 * STRETCH_BYTES, reported.append) is None  # less is left
    assert take_warm(MIB, reported.append) is not None


def test_slabs_take_what_is_mapped_and_map_the_rest_themselves() -> None:
    warm_host_memory(8 * MIB, num_threads=1)
    slab = Slab(6 * MIB, zero, is_pinned=False, progress=lambda _: None)
    first, second = slab.take(MIB, torch.float32), slab.take(10, torch.bfloat16)
    assert not first.any()
    assert second.data_ptr() - first.data_ptr() == 4 * MIB
    first.fill_(1)
    assert not second.any()
    sizes = []
    Slab(4 * MIB, lambda *given: sizes.append(given[1]), is_pinned=False, progress=lambda _: None)
    assert sizes == [4 * MIB]
    end_warming()
    assert first.sum() == MIB  # what was taken stays
    assert warm_bytes() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_not_taken_is_given_back() -> None:
    before = resident_bytes()
    warm_host_memory(4 * STRETCH_BYTES, num_threads=2)
    warm_host_memory(1)  # one is under way
    assert warm_bytes() == 4 * STRETCH_BYTES
    take_warm(4 * STRETCH_BYTES - 4 * MIB, lambda _: None)
    assert resident_bytes() - before > 3 * STRETCH_BYTES
    end_warming()
    warm_host_memory(4 * STRETCH_BYTES, num_threads=2)
    end_warming()
    assert resident_bytes() - before < STRETCH_BYTES


def test_no_bytes_and_more_than_there_are_are_refused(monkeypatch) -> None:
    with pytest.raises(InputError, match="warm_host_memory maps 0 bytes; give a number of bytes above 0"):
        warm_host_memory(0)

    def refuse(size_bytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_pages, "map_pages", refuse)
    with pytest.raises(InputError, match=r"the host refused 2\.0 GiB of memory to warm_host_memory: Cannot allocate"):
        warm_host_memory(2**31)


def test_the_state_of_an_optimizer_has_the_same_bits_in_it() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    trained = {}
    for is_warm in (False, True):
        if is_warm:
            warm_host_memory(64 * MIB, num_threads=2)
        other = copy.deepcopy(model)
        optimizer = HybridAdamW(other, lr=1e-2, clip_norm=1.0, gpu_units=0)
        before = warm_bytes()
        for step in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            (other(x) - x).square().mean().backward()
            optimizer.step()
            if step == 0:
                assert warm_bytes() == 0  # the rest is given back
        assert (before > 0) == is_warm
        trained[is_warm] = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        optimizer.close()
    assert all(torch.equal(tensor, trained[True][name]) for name, tensor in trained[False].items())


def test_it_can_be_the_first_line_of_a_program() -> None:
    script = (
        "import sys; from pipedejavu import warm_host_memory; warm_host_memory(2**20); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
