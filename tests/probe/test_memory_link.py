"""Links through shared memory: every figure is there and positive."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.probe.memory_link import measure_gpu_link, measure_memory_link, measure_worker_link

CPU = torch.device("cpu")


def check(link):
    assert link.scope == "same-host"
    assert 1e-7 < link.latency_s < 1
    assert 1e-7 < link.sum_latency_s < 1
    assert link.bytes_per_s > 1e6
    assert link.sum_bytes_per_s > 1e6


def test_a_link_through_host_memory():
    check(measure_memory_link())
    check(measure_worker_link([CPU, CPU, CPU]))


def test_a_link_between_gpus_with_cpus_in_their_place():
    check(measure_gpu_link(CPU, CPU))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_link_between_workers_on_one_gpu_and_one_to_a_cpu():
    gpu = torch.device("cuda", 0)
    check(measure_worker_link([gpu, gpu]))
    check(measure_worker_link([gpu, CPU]))
