from pipedejavu.probe import read_shape
from pipedejavu.probe.machine_shape import num_cores, total_memory_bytes


def test_the_shape_divides_this_host_evenly() -> None:
    machine = read_shape(3)
    assert [d.name for d in machine.devices] == ["cpu0", "cpu1", "cpu2"]
    assert machine.hosts[0].cores == num_cores() >= 1
    total = total_memory_bytes()
    assert all(d.memory_bytes == total // 3 for d in machine.devices)
    assert sum(d.flop_per_s for d in machine.devices) == num_cores() * 50e9
    assert machine.route("cpu0", "cpu2").bytes_per_s == 5e9
