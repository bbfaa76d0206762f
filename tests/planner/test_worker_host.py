"""Where workers run: devices, threads and the machine that follow from what each host has."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import Host, InputError, Machine
from pipedejavu.plan import preset
from pipedejavu.planner import worker_host as site_file
from pipedejavu.planner.worker_host import (
    Gpu,
    WorkerHost,
    describe_stand_ins,
    devices_to_measure,
    make_machine,
    num_threads,
    num_threads_beside,
    read_worker_hosts,
)
from pipedejavu.program.pipeline import assign_devices

H200 = Gpu(kind="nvidia-h200", memory_bytes=139 << 30)


def host(name: str, workers: int, gpus: int = 0) -> tuple[WorkerHost, ...]:
    one = WorkerHost(host=name, local_rank=0, cores=16, memory_bytes=128 << 30, gpus=(H200,) * gpus)
    return tuple(one.replace(local_rank=n) for n in range(workers))


def devices(plan, machine: Machine) -> list[tuple[str, str, str]]:
    found = [machine.device(name) for name in assign_devices(plan, machine)]
    return [(d.type, d.kind, d.host) for d in found]


GPU, CPU = ("gpu", "nvidia-h200", "a"), ("cpu", "cpu", "a")


def test_workers_take_the_gpus_first_and_the_cpu_then() -> None:
    plan, machine = make_machine(preset("1f1b").at(workers=3), host("a", 3, gpus=2), "auto")
    assert devices(plan, machine) == [GPU, GPU, CPU]
    assert plan.place.devices == ("gpu0", "gpu1", "cpu2")


def test_cpu_replicas_and_servers_leave_gpus_alone() -> None:
    plan, machine = make_machine(preset("coarse").at(workers=1), host("a", 2, gpus=4), "auto")
    assert devices(plan, machine) == [GPU, CPU]
    plan, machine = make_machine(preset("parameter-server").at(workers=2), host("a", 3, gpus=4), "auto")
    assert devices(plan, machine) == [GPU, GPU, CPU]


def test_all_workers_can_be_kept_on_the_cpu() -> None:
    plan, machine = make_machine(preset("1f1b").at(workers=2), host("a", 2, gpus=2), "cpu")
    assert devices(plan, machine) == [CPU, CPU]
    assert {d.memory_bytes for d in machine.devices} == {64 << 30}


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="worker 1 is number 2 on host 'a', which has 1 GPUs; use as many workers as"):
        make_machine(preset("1f1b").at(workers=2), host("a", 2, gpus=1), "gpu")


def test_workers_share_gpus_in_turn_on_request() -> None:
    """Each has its share of the memory; the engine numbers the devices of a host modulo its GPUs."""
    plan, machine = make_machine(preset("1f1b").at(workers=3), host("a", 3, gpus=2), "shared-gpu")
    assert devices(plan, machine) == [GPU, GPU, GPU]
    assert [machine.device(f"gpu{n}").memory_bytes >> 20 for n in range(3)] == [139 << 9, 139 << 10, 139 << 9]
    _, machine = make_machine(preset("ddp").at(workers=2), host("a", 2, gpus=1), "shared-gpu")
    assert {d.memory_bytes for d in machine.devices if d.type == "gpu"} == {139 << 29}
    plan, machine = make_machine(preset("coarse").at(workers=1), host("a", 2, gpus=1), "shared-gpu")
    assert devices(plan, machine) == [GPU, CPU]


def test_a_host_without_a_gpu_has_none_to_share() -> None:
    with pytest.raises(InputError, match="worker 0 is on host 'a', which has no GPU to share; use --devices auto"):
        make_machine(preset("1f1b").at(workers=2), host("a", 2), "shared-gpu")


def test_a_host_without_cpu_workers_still_has_a_memory_for_state() -> None:
    plan, machine = make_machine(preset("fine").at(workers=2), host("a", 2, gpus=2), "gpu")
    assert devices(plan, machine) == [GPU, GPU]
    assert machine.cpu_of(machine.device("gpu1")).memory_bytes == 128 << 30


def test_workers_of_two_hosts_have_the_devices_of_their_own() -> None:
    worker_hosts = (*host("a", 2, gpus=1), *host("b", 2, gpus=1))
    plan, machine = make_machine(preset("1f1b").at(workers=2, replicas=2), worker_hosts, "auto")
    assert [(kind, where) for kind, _, where in devices(plan, machine)] == [
        ("gpu", "a"), ("cpu", "a"), ("gpu", "b"), ("cpu", "b"),
    ]  # fmt: skip
    near, far = machine.route("gpu0", "cpu1"), machine.route("gpu0", "gpu2")
    assert near.bytes_per_s > far.bytes_per_s


def test_gpu_workers_leave_the_cores_to_cpu_workers(monkeypatch) -> None:
    monkeypatch.setattr(site_file, "num_cores", lambda: 16)
    plan, machine = make_machine(preset("1f1b").at(workers=4), host("a", 4, gpus=2), "auto")
    assert [num_threads(machine, plan.place.devices, n) for n in range(4)] == [1, 1, 6, 6]
    plan, machine = make_machine(preset("1f1b").at(workers=2), host("a", 2, gpus=2), "auto")
    assert [num_threads(machine, plan.place.devices, n) for n in range(2)] == [7, 7]
    claimed = machine.replace(hosts=(Host(name="a", cores=64),))
    assert num_threads(claimed, plan.place.devices, 0) == 7  # a file may name more cores than there are


def test_a_cpu_worker_has_the_threads_of_its_host_beside_it(monkeypatch) -> None:
    monkeypatch.setattr(site_file, "num_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan, machine = make_machine(preset("1f1b").at(workers=4), host("a", 4, gpus=2), "auto")
    assert [num_threads_beside(machine, plan.place.devices, n) for n in range(4)] == [0, 0, 8, 8]
    plan, machine = make_machine(preset("ddp").at(workers=2), (*host("a", 1), *host("b", 1)), "cpu")
    assert num_threads_beside(machine, plan.place.devices, 0) == 0  # the other worker has a host of its own


@pytest.mark.parametrize(("there", "text"), [(0, "CPU workers stand in for them"), (1, "workers share them"), (2, "")])
def test_gpus_that_are_not_there_are_told(there: int, text: str) -> None:
    plan, machine = make_machine(preset("1f1b").at(workers=2), host("a", 2, gpus=2), "auto")
    found = describe_stand_ins(machine, plan.place.devices, host("here", 2, gpus=there))
    assert found.startswith(f"the plan has workers on 2 GPUs of one host, and {there} are there:") == bool(text)
    assert text in found


def test_this_host_has_a_site_for_each_worker() -> None:
    worker_hosts = read_worker_hosts(3)
    assert [s.local_rank for s in worker_hosts] == [0, 1, 2]
    assert {len(s.gpus) for s in worker_hosts} == {torch.cuda.device_count()}
    assert worker_hosts[0].cores >= 1


@pytest.mark.parametrize(("name", "types"), [("ddp", ["gpu"]), ("fine", ["gpu", "cpu"]), ("l2l", ["gpu", "cpu"])])
def test_the_host_is_measured_where_updates_run_on_it(name: str, types: list[str]) -> None:
    plan, machine = make_machine(preset(name).at(workers=1), host("a", 1, gpus=1), "gpu")
    found = devices_to_measure(plan, machine, assign_devices(plan, machine))
    assert [machine.device(device).type for _, device in found.values()] == types
