"""Which socket the host work of a GPU runs on, on described topologies of one and of two sockets."""

import os
from pathlib import Path

import pytest

from pipedejavu.runtime.socket_home import SocketHome, Topology, bound_to, describe_homes, home_of, read_topology

FIRST, SECOND = "0000:17:00.0", "0000:ca:00.0"
TWO = Topology(cores={0: (0, 1, 2, 3, 8, 9), 1: (4, 5, 6, 7, 10, 11)}, gpus={FIRST: 0, SECOND: 1})


@pytest.mark.parametrize(("gpu", "node", "cores"), [(FIRST, 0, (0, 1, 2, 3, 8, 9)), (SECOND, 1, (4, 5, 6, 7, 10, 11))])
def test_threads_run_on_the_socket_of_their_gpu(gpu: str, node: int, cores: tuple[int, ...]) -> None:
    home = home_of(TWO, gpu, range(12))
    assert (home.node, home.cores) == (node, cores)
    assert home.reason == f"GPU {gpu} is on node {node}; its host memory is mapped there too"


def test_only_cores_that_the_process_may_use_count() -> None:
    assert home_of(TWO, SECOND, [0, 1, 5, 6]).cores == (5, 6)
    home = home_of(TWO, SECOND, [0, 1, 2])
    assert (home.node, home.cores) == (None, (0, 1, 2))
    assert home.reason == "the process has the cores of one NUMA node"


@pytest.mark.parametrize(
    ("topology", "gpu", "reason"),
    [
        (Topology(cores={0: (0, 1)}, gpus={FIRST: 0}), FIRST, "the process has the cores of one NUMA node"),
        (Topology(cores={}, gpus={}), FIRST, "the process has the cores of one NUMA node"),
        (TWO, "0000:99:00.0", "the system does not state the NUMA node of 0000:99:00.0"),
        (TWO, None, "the system does not state the NUMA node of a device"),
        (
            Topology(cores={0: (0,), 1: (1,), 2: (7,)}, gpus={FIRST: 2}), FIRST,
            f"GPU {FIRST} is on node 2, of which the process may use no core",
        ),
    ],
)  # fmt: skip
def test_nothing_is_bound_if_there_is_nothing_to_choose(topology: Topology, gpu: str | None, reason: str) -> None:
    home = home_of(topology, gpu, [0, 1, 4])
    assert home == SocketHome(node=None, cores=(0, 1, 4), reason=reason)


def test_linux_states_the_nodes(tmp_path: Path) -> None:
    for node, cores in ((0, "0-3,8-9"), (1, "4-7,10-11"), (2, "")):  # a node of memory alone has no cores
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for address, kind, node in ((FIRST, "0x030200", "0"), (SECOND, "0x030200", "1"), ("0000:00:02.0", "0x020000", "1"),
                                ("0000:99:00.0", "0x030000", "-1")):  # fmt: skip
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "class").write_text(kind)
        (folder / "numa_node").write_text(node)
    assert read_topology(tmp_path) == TWO
    assert read_topology(tmp_path / "elsewhere") == Topology(cores={}, gpus={})


def test_threads_that_start_inherit_the_cores() -> None:
    every = os.sched_getaffinity(0)
    one = (min(every),)
    with bound_to(SocketHome(node=1, cores=one, reason="")):
        assert os.sched_getaffinity(0) == {*one}
    assert os.sched_getaffinity(0) == every
    with bound_to(SocketHome(node=None, cores=one, reason="")):
        assert os.sched_getaffinity(0) == every


def test_decisions_are_told() -> None:
    assert describe_homes(Topology(cores={0: (0,)}, gpus={}), [0]) == ["NUMA nodes: 1, so no thread is bound"]
    assert describe_homes(TWO, range(12)) == [
        f"NUMA nodes: 2; host work on 6 cores of node {node}: GPU {gpu} is on node {node}; its host memory is mapped"
        " there too"
        for node, gpu in enumerate((FIRST, SECOND))
    ]
