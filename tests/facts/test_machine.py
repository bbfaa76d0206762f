import pytest
from pydantic import ValidationError

from pipedejavu.facts import Device, FaultsError, Host, InputError, Link, Machine


def device(name: str, host: str = "a", type_: str = "gpu") -> Device:
    return Device.model_validate({"name": name, "kind": "h200", "type": type_, "host": host, "memory_bytes": 2**30})


def cluster(*links: Link) -> Machine:
    """Two hosts, each with a CPU and two GPUs."""
    devices = [device(f"{h}-{n}", h, "cpu" if n == "cpu" else "gpu") for h in "ab" for n in ("cpu", "gpu0", "gpu1")]
    return Machine(name="m", hosts=(Host(name="a"), Host(name="b")), devices=tuple(devices), links=links)


def faults_of(**changes: object) -> tuple[str, ...]:
    with pytest.raises(ValidationError) as caught:
        cluster().replace(**changes)
    (detail,) = caught.value.errors()
    error = detail["ctx"]["error"]
    assert isinstance(error, FaultsError)
    return error.faults


def test_a_device_on_a_missing_host() -> None:
    assert faults_of(hosts=(Host(name="a"), Host(name="bee"))) == tuple(
        f"device 'b-{n}' is on host 'b', which is missing; did you mean 'bee'?" for n in ("cpu", "gpu0", "gpu1")
    )


def test_two_of_one_name() -> None:
    assert faults_of(hosts=(Host(name="a"), Host(name="a"), Host(name="b"))) == ("two hosts are called 'a'",)
    assert faults_of(devices=(device("x"), device("y"), device("x"))) == ("two devices are called 'x'",)


def test_a_link_that_matches_no_device() -> None:
    assert faults_of(links=(Link(bytes_per_s=1.0), Link(source="c-*", target="b-gpu2", bytes_per_s=1.0))) == (
        "links[1].source 'c-*' matches no device; known: a-cpu, a-gpu0, a-gpu1, b-cpu, b-gpu0, b-gpu1",
        "links[1].target 'b-gpu2' matches no device; did you mean 'b-gpu1'?",
    )


@pytest.mark.parametrize(
    "wire",
    [
        "{sorce}", "{", "}", "{}", "{0}", "{source.name}", "{source[0]}", "{source!r}", "{source:>9}",
        "{source:9999999999}", "{source:{target}}", "{source.__class__}",
    ],
)  # fmt: skip
def test_a_wire_that_cannot_be_named(wire: str) -> None:
    assert faults_of(links=(Link(wires=("net", wire), bytes_per_s=1.0),)) == (
        f"links[0].wires: '{wire}' may hold only {{source}}, {{target}}, {{source_host}}, {{target_host}}",
    )


def test_all_faults_come_at_once() -> None:
    link = Link(source="none", target="none", wires=("{x}",), bytes_per_s=1.0)
    devices = (device("d"), device("d"), device("e", "zz"))
    assert faults_of(hosts=(Host(name="a"), Host(name="a")), devices=devices, links=(link,)) == (
        "two hosts are called 'a'",
        "two devices are called 'd'",
        "device 'e' is on host 'zz', which is missing; known: a",
        "links[0].wires: '{x}' may hold only {source}, {target}, {source_host}, {target_host}",
        "links[0].source 'none' matches no device; known: d, e",
        "links[0].target 'none' matches no device; known: d, e",
    )


def test_a_file_without_hosts_or_devices() -> None:
    with pytest.raises(FaultsError) as caught:
        Machine.from_json('{"name":"m","hosts":[],"devices":[]}')
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["hosts", "devices"]


def test_the_first_link_that_matches_holds() -> None:
    machine = cluster(
        Link(source="a-gpu0", target="a-gpu1", bytes_per_s=9.0),
        Link(source="*-gpu?", target="*-gpu?", scope="same-host", bytes_per_s=8.0),
        Link(scope="same-host", bytes_per_s=7.0),
        Link(source="*-gpu*", target="*-gpu*", scope="other-host", bytes_per_s=6.0),
        Link(bytes_per_s=5.0),
    )
    speeds = {
        ("a-gpu0", "a-gpu1"): 9.0,
        ("a-gpu1", "a-gpu0"): 8.0,
        ("b-gpu0", "b-gpu1"): 8.0,
        ("a-cpu", "a-gpu0"): 7.0,
        ("a-gpu0", "b-gpu0"): 6.0,
        ("a-gpu0", "b-cpu"): 5.0,
        ("a-cpu", "b-cpu"): 5.0,
    }
    assert {pair: machine.route(*pair).bytes_per_s for pair in speeds} == speeds


def test_wires_are_named_after_their_ends() -> None:
    wires = ("{source}>{target}", "nic-{source_host}", "nic-{target_host}", "{{spine}}")
    machine = cluster(Link(scope="other-host", latency_s=2.0, bytes_per_s=1.0, wires=wires), Link(bytes_per_s=4.0))
    route = machine.route("a-gpu0", "b-gpu1")
    assert route.wires == ("a-gpu0>b-gpu1", "nic-a", "nic-b", "{spine}")
    assert (route.latency_s, route.bytes_per_s) == (2.0, 1.0)
    assert machine.route("a-gpu0", "a-gpu1").wires == ("a-gpu0>a-gpu1",)
    assert machine.route("a-gpu0", "b-gpu1") is route


def test_no_route() -> None:
    machine = cluster(Link(scope="same-host", bytes_per_s=1.0))
    with pytest.raises(InputError) as caught:
        machine.route("a-cpu", "b-cpu")
    assert str(caught.value) == "machine 'm' has no link from 'a-cpu' to 'b-cpu'; add one to its links"


def test_no_such_device() -> None:
    machine = cluster(Link(bytes_per_s=1.0))
    for call in (lambda: machine.device("a-gpu9"), lambda: machine.route("a-gpu9", "a-cpu")):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value) == "machine 'm' has no device 'a-gpu9'; did you mean 'a-gpu1'?"
    assert machine.device("b-cpu").host == "b"


def test_cpu_of() -> None:
    machine = cluster()
    assert machine.cpu_of(machine.device("b-gpu1")).name == "b-cpu"
    assert machine.cpu_of(machine.device("a-cpu")).name == "a-cpu"
    bare = machine.replace(devices=(device("g", "a"), device("c", "b", "cpu")))
    with pytest.raises(InputError) as caught:
        bare.cpu_of(bare.device("g"))
    assert str(caught.value) == (
        "host 'a' lists no device of type 'cpu', but the plan keeps state in its memory;"
        " add one with the host's memory_bytes"
    )


@pytest.mark.parametrize("field", ["compute", "transfer"])
def test_overlap_never_speeds_up(field: str) -> None:
    with pytest.raises(
        FaultsError, match=rf"^overlap: {field}: Input should be greater than or equal to 1, found 0\.5$"
    ):
        type(cluster().overlap).from_json(f'{{"{field}": 0.5}}')


def test_a_cluster_of_a_thousand_devices_is_checked_quickly() -> None:
    hosts = tuple(Host(name=f"h{i}") for i in range(250))
    devices = tuple(device(f"h{i // 4}-gpu{i % 4}", f"h{i // 4}") for i in range(1000))
    machine = Machine(name="big", hosts=hosts, devices=devices, links=(Link(bytes_per_s=1.0),))
    assert Machine.from_json(machine.to_json()) == machine


def whole(**changes: object) -> Machine:
    """A host with a CPU of eight cores and a GPU."""
    cpu = device("cpu", type_="cpu").replace(
        memory_bytes=800, reserved_bytes=80, flop_per_s=8.0, memory_bytes_per_s=16.0, parameters_per_s=4.0,
        most_workers=8, efficiency=0.5,
    )  # fmt: skip
    links = (Link(source="cpu*", target="cpu*", bytes_per_s=3.0), Link(bytes_per_s=1.0))
    return Machine(
        name="m", hosts=(Host(name="a", cores=8),), devices=(device("gpu0"), cpu.replace(**changes)), links=links
    )


def test_a_cpu_is_divided_over_the_workers_that_have_no_gpu() -> None:
    machine = whole().divided(5)
    assert [d.name for d in machine.devices] == ["gpu0", "cpu.0", "cpu.1", "cpu.2", "cpu.3"]
    part = machine.device("cpu.3")
    assert (part.memory_bytes, part.reserved_bytes, part.most_workers, part.efficiency) == (200, 20, 2, 0.5)
    assert (part.flop_per_s, part.memory_bytes_per_s, part.parameters_per_s) == (2.0, 4.0, 1.0)
    assert machine.route("cpu.0", "cpu.1").bytes_per_s == 3.0
    assert machine.cpu_of(machine.device("gpu0")).name == "cpu.0"


def test_parts_of_a_cpu_have_a_kind_of_their_own_where_asked() -> None:
    kinds = [[d.kind for d in whole().divided(n, by_kind=True).devices] for n in (2, 3)]
    cpu = whole().device("cpu").kind
    assert [found[1:] for found in kinds] == [[cpu], [f"{cpu}/2"] * 2]
    assert {d.kind for d in whole().divided(3).devices[1:]} == {cpu}


@pytest.mark.parametrize(("workers", "devices"), [(1, 2), (2, 2), (3, 3), (9, 9), (10, 9)])
def test_a_cpu_is_divided_no_further_than_needed_nor_than_it_has_cores(workers: int, devices: int) -> None:
    assert len(whole().divided(workers).devices) == devices


def test_a_cpu_that_says_nothing_of_cores_is_never_divided() -> None:
    machine = whole(most_workers=1)
    assert machine.divided(5) is machine


def test_cpus_of_several_hosts_are_divided_alike() -> None:
    hosts = (Host(name="a", cores=4), Host(name="b", cores=2))
    cpus = [device(f"{h.name}-cpu", h.name, "cpu").replace(most_workers=h.cores) for h in hosts]
    machine = Machine(name="m", hosts=hosts, devices=tuple(cpus), links=(Link(bytes_per_s=1.0),)).divided(3)
    assert [d.name for d in machine.devices] == ["a-cpu.0", "a-cpu.1", "b-cpu.0", "b-cpu.1"]
