import pytest

pytest.importorskip("torch")

from pipedejavu.probe.gloo import measure_link, time_of_bytes


def test_workers_of_this_host_have_a_measured_link() -> None:
    link = measure_link()
    assert link.scope == "same-host"
    assert 0 < link.latency_s < 1
    assert 1e6 < link.bytes_per_s < 1e12
    assert link.sum_latency_s is not None
    assert 0 < link.sum_latency_s < 1
    assert link.sum_bytes_per_s is not None
    assert 1e6 < link.sum_bytes_per_s < 1e12


def test_scatter_makes_no_link_infinitely_fast() -> None:
    assert time_of_bytes(1.0, 3.0) == 2.0
    assert time_of_bytes(3.0, 1.0) == 0.1
