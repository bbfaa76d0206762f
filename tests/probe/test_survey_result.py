"""From what was timed to a machine that the simulator can use."""

from collections.abc import Callable
from typing import Any

import pytest

from pipedejavu.facts import Machine
from pipedejavu.probe.survey_result import Circumstances, Findings, build_machine

WHEN = Circumstances("2026-01-01T00:00:00+00:00", {"torch": "2.11"}, 50.0)
CLOSE = 0.002
"""The times of the findings differ by a thousandth around their median, and the median is theirs."""


def built(found: Findings) -> Machine:
    machine = build_machine("here", found, WHEN)
    assert Machine.from_json(machine.to_json()) == machine
    return machine


def measurement(machine: Machine, name: str) -> Any:
    assert machine.survey
    (found,) = [m for m in machine.survey.measurements if m.name == name]
    return found


def test_a_host_without_gpus(make_cpu_book: Callable[[], Any]) -> None:
    machine = built(make_cpu_book().findings())
    (cpu,) = machine.devices
    assert cpu.flop_per_s == pytest.approx(2e12, rel=CLOSE)  # float32, the best shape
    assert cpu.efficiency == pytest.approx(0.75, rel=CLOSE)
    assert cpu.memory_bytes_per_s == pytest.approx(200e9, rel=CLOSE)
    assert cpu.parameters_per_s == pytest.approx(2e9, rel=CLOSE)
    assert (cpu.memory_bytes, cpu.reserved_bytes, cpu.most_workers) == (128 << 30, 28 << 30, 16)
    host = machine.hosts[0]
    assert (host.cores, host.sockets, host.numa_nodes) == (16, 2, None)
    assert host.disk_read_bytes_per_s == pytest.approx(3e9, rel=CLOSE)
    parts = machine.divided(4)
    route = parts.route("cpu.0", "cpu.3")
    assert route.latency_s == pytest.approx(50e-6, rel=CLOSE)
    assert route.bytes_per_s == pytest.approx(4e9, rel=CLOSE)
    assert route.sum_latency_s == pytest.approx(200e-6, rel=CLOSE)  # of each of two rounds
    assert route.sum_bytes_per_s == pytest.approx(1e9, rel=CLOSE)
    assert machine.overlap.compute == pytest.approx(1.5, rel=CLOSE)
    assert machine.overlap.transfer == pytest.approx(2.0, rel=CLOSE)


def test_a_gpu_has_the_rate_of_its_best_type(make_cpu_book: Callable[[], Any], make_gpu: Any) -> None:
    book = make_cpu_book()
    machine = built(book.findings([make_gpu(book, "gpu0")]))
    gpu = machine.device("gpu0")
    assert (gpu.kind, gpu.memory_bytes, gpu.reserved_bytes) == ("nvidia-h200", 140 << 30, 2 << 30)
    assert gpu.flop_per_s == pytest.approx(700e12, rel=CLOSE)
    assert gpu.efficiency == pytest.approx(0.5, rel=CLOSE)  # of the same type
    inwards, outwards = machine.route("cpu", "gpu0"), machine.route("gpu0", "cpu")
    assert inwards.bytes_per_s == pytest.approx(55e9, rel=CLOSE)  # pinned
    assert outwards.bytes_per_s == pytest.approx(50e9, rel=CLOSE)
    assert inwards.latency_s == pytest.approx(8e-6, rel=CLOSE)
    assert (inwards.wires, outwards.wires) == (("pcie-in:gpu0",), ("pcie-out:gpu0",))
    assert machine.overlap.compute == pytest.approx(1.05, rel=CLOSE)
    assert machine.overlap.transfer == pytest.approx(1.2, rel=CLOSE)
    assert measurement(machine, "gpu0 memory context").value == 600 << 20
    assert measurement(machine, "cpu>gpu0 bandwidth pageable").value == pytest.approx(11e9, rel=CLOSE)
    assert machine.divided(5).route("cpu.3", "gpu0").bytes_per_s == inwards.bytes_per_s


def test_directions_that_slow_each_other_share_a_wire(make_cpu_book: Callable[[], Any], make_gpu: Any) -> None:
    book = make_cpu_book()
    machine = built(book.findings([make_gpu(book, "gpu0", both_factor=1.9)]))
    assert machine.route("cpu", "gpu0").wires == machine.route("gpu0", "cpu").wires == ("pcie:gpu0",)


def test_gpus_reach_each_other_by_nccl_or_by_copies(make_cpu_book: Callable[[], Any], make_gpu: Any) -> None:
    book = make_cpu_book()
    gpus = [make_gpu(book, "gpu0"), make_gpu(book, "gpu1")]
    book.rate("gpu0>gpu1", "peer copy", "64 MiB", "B/s", 300e9)
    machine = built(book.findings(gpus))
    assert machine.route("gpu1", "gpu0").bytes_per_s == pytest.approx(300e9, rel=CLOSE)
    assert machine.survey
    assert any("NCCL was not measured" in line for line in machine.survey.unknown)
    book.line("gpu0>gpu1", "nccl", "", 15e-6, 200e9)
    machine = built(book.findings(gpus))
    assert machine.route("gpu0", "gpu1").bytes_per_s == pytest.approx(200e9, rel=CLOSE)
    assert machine.route("gpu0", "gpu1").latency_s == pytest.approx(15e-6, rel=CLOSE)


def test_what_was_not_measured_is_unknown_and_assumed(make_cpu_book: Callable[[], Any], make_gpu: Any) -> None:
    book = make_cpu_book()
    gpu = make_gpu(book, "gpu0")
    book.trials.clear()
    book.times_s.clear()
    machine = built(book.findings([gpu]))
    assert [machine.device(name).flop_per_s for name in ("cpu", "gpu0")] == [0.0, 0.0]
    assert machine.device("gpu0").efficiency is None
    assert machine.route("cpu", "gpu0").bytes_per_s > 0
    assert machine.survey
    assert machine.survey.unknown == (
        "NUMA nodes: the operating system does not say",
        "cpu>gpu0: copies were not measured; the link is assumed",
        "gpu0>cpu: copies were not measured; the link is assumed",
        "cpu>cpu: messages between processes were not measured; their link is assumed",
        "cpu>cpu: sums of processes were not measured; they take what their messages take",
        "overlap of compute and transfers: not measured, taken as none",
    )


def test_every_figure_has_its_spread(make_cpu_book: Callable[[], Any], make_gpu: Any) -> None:
    book = make_cpu_book()
    found = book.findings([make_gpu(book, "gpu0")])
    machine, again = built(found), built(found)
    assert machine.survey
    assert again.survey
    stated = {"total", "free", "context"}
    for row in machine.survey.measurements:
        assert row.spread > 0 or row.setting in stated, row.name
    assert machine.survey.measurements == again.survey.measurements
