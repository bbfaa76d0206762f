"""Threads of a host that loads a graph, moved between loaders and trainers."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import Span
from pipedejavu.program import Program
from pipedejavu.source.host_threads import HostThreads
from pipedejavu.zoo import build
from tests.source.test_graph_run import plan_of, program_of, task_of


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def program(is_controlled: bool = True) -> Program:
    plan = plan_of((0.7, 0.3), 2, 1)
    return program_of(plan.replace(feed=plan.feed.replace(is_controlled=is_controlled)), task_of("sage"))


def test_all_workers_move_the_same_thread_to_the_slowest_stage() -> None:
    views = [HostThreads(program(), rank, task_of("sage").data, 16) for rank in (0, 1)]
    assert [view.stages for view in views] == [[("loader", 0), ("loader", 1), ("trainer", 0), ("trainer", 1)]] * 2
    assert [view.threads for view in views] == [(4, 4, 4, 4)] * 2
    times = [0.1, 0.2, 0.3, 0.8]
    tables = {view.follow(times) for view in views}
    assert tables == {"loader of worker 0 3, loader of worker 1 4, trainer of worker 0 4, trainer of worker 1 5"}
    assert [view.data.num_threads for view in views] == [3, 4]
    assert torch.get_num_threads() == 5
    assert views[0].follow([1.0, 1.0, 1.0, 1.0]) == ""


def test_a_worker_measures_its_own_stages() -> None:
    view = HostThreads(program(), 1, task_of("sage").data, 16)
    view.data.batch(range(4))
    spans = [Span(1, "compute", "F0.0@0", 1.0, 3.0), Span(1, "copy-in", "FETCH:b0.1", 0.0, 9.0)]
    loader, trainer = view.times(spans)[1], view.times(spans)[3]
    assert view.times(spans)[::2] == [0.0, 0.0]
    assert loader > 0
    assert trainer == 2.0
    assert view.times(spans)[1] == 0.0  # nothing was loaded since


@pytest.mark.parametrize("change", ["forced shares", "other data", "few cores"])
def test_threads_stay_where_nothing_can_follow(change) -> None:
    data = build("mlp").data if change == "other data" else task_of("sage").data
    cores = 3 if change == "few cores" else 16
    assert not HostThreads(program(change != "forced shares"), 0, data, cores).is_followed
