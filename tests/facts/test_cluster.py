"""Machines that are not at hand, composed of known devices."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import (
    Cluster,
    FaultsError,
    InputError,
    Machine,
    compose,
    known_device,
    parse_cluster,
    read_machine,
)
from pipedejavu.facts.cluster import LINK_EFFICIENCY

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_eight_hosts_of_eight() -> None:
    machine = read_machine("8x(8xa100-80gb + 2xepyc-7763 + 1TiB), 100Gb/s, 5us")
    a100, epyc = known_device("a100"), known_device("epyc-7763")
    assert [host.cores for host in machine.hosts] == [128] * 8
    assert len(machine.devices) == 8 * 9
    gpu, cpu = machine.device("h3/a100-80gb-7"), machine.device("h3/cpu")
    assert (gpu.kind, gpu.host, gpu.memory_bytes) == ("a100-80gb", "h3", 80 << 30)
    assert (gpu.flop_per_s, gpu.efficiency) == (312e12, a100.efficiency)
    assert (cpu.kind, cpu.memory_bytes, cpu.most_workers) == ("2xepyc-7763", 1 << 40, 128)
    assert cpu.memory_bytes_per_s == 2 * epyc.memory_bytes_per_s
    assert machine.cpu_of(gpu) is cpu


def test_links_follow_the_devices() -> None:
    machine = read_machine("2x(2xa100 + 2xt4 + epyc-7763), 100Gb/s, 5us")

    def rate(source: str, target: str) -> float:
        return machine.route(source, target).bytes_per_s / LINK_EFFICIENCY

    assert rate("h0/a100-80gb-0", "h0/a100-80gb-1") == pytest.approx(300e9)  # NVLink
    assert rate("h0/t4-0", "h0/t4-1") == pytest.approx(15.75e9)  # PCIe 3
    assert rate("h0/a100-80gb-0", "h0/t4-1") == pytest.approx(15.75e9)  # the slower of two
    assert rate("h0/cpu", "h0/a100-80gb-1") == pytest.approx(31.5e9)
    assert rate("h0/a100-80gb-0", "h1/a100-80gb-0") == pytest.approx(12.5e9)
    assert machine.route("h0/t4-0", "h1/cpu").latency_s == pytest.approx(5e-6)


def test_what_shares_a_wire() -> None:
    machine = read_machine("2x(2xt4 + epyc-7763), 100Gb/s")
    peer, out = machine.route("h0/t4-0", "h0/t4-1"), machine.route("h0/t4-0", "h0/cpu")
    back = machine.route("h0/cpu", "h0/t4-0")
    assert set(peer.wires) & set(out.wires) == {"pcie-out:h0/t4-0"}
    assert not set(out.wires) & set(back.wires)
    far = [machine.route(f"h0/t4-{n}", f"h1/t4-{n}").wires for n in range(2)]
    assert far == [("nic-out:h0", "nic-in:h1")] * 2  # one interface for all GPUs of a host


def test_a_slow_processor_limits_pcie() -> None:
    machine = read_machine("h200 + xeon-6248")
    assert machine.route("cpu", "h200-141gb-0").bytes_per_s == pytest.approx(LINK_EFFICIENCY * 15.75e9)


def test_one_host_has_short_names() -> None:
    machine = read_machine("4x4090 + ryzen-7950x")
    assert [d.name for d in machine.devices] == ["rtx-4090-0", "rtx-4090-1", "rtx-4090-2", "rtx-4090-3", "cpu"]
    assert machine.device("cpu").memory_bytes == 16 * (8 << 30)


def test_every_pair_of_devices_has_a_route() -> None:
    machine = read_machine("2x(2xv100 + t4 + xeon-6248), (h200 + xeon-8480), (l4), 2xepyc-7742, 25 Gb/s").divided(40)
    names = [d.name for d in machine.devices]
    assert len(names) >= 40
    assert all(machine.route(a, b).bytes_per_s > 0 for a in names for b in names if a != b)


def test_a_file_says_the_same_as_a_line(tmp_path: Path) -> None:
    line = parse_cluster("8x(8xa100 + 2xepyc-7763 + 1TiB), 2x(t4), 100Gb/s")
    form = {
        "name": line.name,
        "hosts": [
            {"count": 8, "gpus": ["8 × A100"], "cpu": "2 x epyc-7763", "memory_bytes": "1 TiB"},
            {"count": 2, "gpus": ["t4"]},
        ],
        "network_bytes_per_s": "100 Gb/s",
    }
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(form))
    assert read_machine(str(path)) == compose(line)
    assert compose(Cluster.from_json(line.to_json())) == compose(line)


def test_a_machine_file_stays_one(tmp_path: Path) -> None:
    machine = read_machine("2x(t4), 1Gb/s")
    machine.save(tmp_path / "machine.json")
    assert read_machine(str(tmp_path / "machine.json")) == machine
    four = EXAMPLES / "four-gpus.json"
    assert read_machine(str(four)) == Machine.load(four)


def test_the_example_cluster_is_the_one_of_the_documents() -> None:
    machine = read_machine(str(EXAMPLES / "sixty-four-a100.json"))
    line = "8x(8xa100-80gb + 2xepyc-7763 + 1TiB), 100Gb/s, 5us"
    assert machine.replace(name=line) == read_machine(line)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8x(8xa1000), 1Gb/s", "the library of devices has no device 'a1000'; did you mean 'a100'?"),
        ("2x(t4)", "machine '2x(t4)': 2 hosts have no network between them; give its rate, such as '100 Gb/s'"),
        ("t4 + epyc-7763 + epyc-9654", "names two CPUs, 'epyc-7763' and 'epyc-9654'; write sockets as '2xepyc-9654'"),
        ("(t4", "is neither a file nor hosts of known devices; write it as '8x(8xa100-80gb + 2xepyc-7763), 100Gb/s'"),
        ("t4,", "is neither a file nor hosts of known devices"),
        ("0xt4", "'0xt4' has no device; give at least 1"),
        ("99999999x(t4), 1Gb/s", "the machine would have 199,999,998 devices; compose at most 65,536"),
        ("t4, 64 GiB", "hosts[1] has neither GPUs nor a CPU; name one, such as 'epyc-7763'"),
        ("t4 + 1e9GiB", "the library of devices has no device '1e9GiB'"),
        ("t4 + 1" + 400 * "0" + "GiB", "is not possible; it must be zero or more, and finite"),
        ("2x(t4), 100 Gq/s", "unit 'Gq/s' is not known; this needs bytes per second, such as '1 B/s'"),
        ("missing.json", "cannot read missing.json: No such file or directory"),
    ],
)
def test_what_cannot_be_composed(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        read_machine(text)
    assert sentence in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*"8x×*()+,., \0é", "a100", "t4", "epyc-7763", "GiB", "Gb/s", "us", "1", "9" * 5000])))
def test_any_line_is_a_machine_or_a_fault(parts: list[str]) -> None:
    try:
        machine = read_machine("".join(parts))
    except InputError:
        return
    assert machine.devices


def test_all_faults_of_a_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"hosts": [{"gpus": ["2 x t5"], "cpu": "t4"}, {"count": 2}], "network_byte_per_s": 3}')
    with pytest.raises(FaultsError) as caught:
        read_machine(str(path))
    assert caught.value.faults == (
        "unknown key 'network_byte_per_s'; did you mean 'network_bytes_per_s'?",
        "hosts[0]: the library of devices has no GPU 't5'; did you mean 't4'?",
        *[f for f in caught.value.faults if "no CPU 't4'" in f],
        "hosts[1] has neither GPUs nor a CPU; name one, such as 'epyc-7763'",
        "3 hosts have no network between them; give its rate, such as '100 Gb/s'",
    )
    assert len(caught.value.faults) == 5
