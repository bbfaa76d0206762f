import pytest

pytest.importorskip("torch")

from pipedejavu.probe.gloo import measure_link


def test_workers_of_this_host_have_a_measured_link() -> None:
    link = measure_link()
    assert link.scope == "same-host"
    assert 0 < link.latency_s < 1
    assert 1e6 < link.bytes_per_s < 1e12
    assert link.sum_latency_s is not None
    assert 0 < link.sum_latency_s < 1
    assert link.sum_bytes_per_s is not None
    assert 1e6 < link.sum_bytes_per_s < 1e12
