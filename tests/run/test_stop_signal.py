"""How ranks agree on the update to stop behind."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import HashStore

from pipedejavu.run.stop_signal import StopSignal


@pytest.mark.parametrize("asked", [[0], [2], [0, 1, 2], []])
@pytest.mark.parametrize("steps", [1, 4])
def test_all_ranks_stop_after_the_same_update_whichever_received_the_signal(asked: list[int], steps: int) -> None:
    """Each update needs all ranks, as a sum does; they are asked at any time, and hear of it late."""
    store, ranks, most = HashStore(), 3, 4000
    halts = [StopSignal(store, rank, ranks) for rank in range(ranks)]
    meeting, ended = threading.Barrier(ranks, timeout=60), [0] * ranks

    def run(rank: int) -> None:
        for update in range(steps, most + steps, steps):
            meeting.wait()
            ended[rank] = update
            if rank in asked and update >= 40 + 8 * rank:
                halts[rank].asked.set()
            if update % (8 * (rank + 1)) == 0:  # what a thread beside training does now and then
                halts[rank].listen()
            if halts[rank].is_due(update, steps):
                return
            if not asked and update > 100:
                return

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ended)) == 1
    assert 40 <= ended[0] < most
    assert (halts[0].at is None) == (not asked)


def test_nothing_is_looked_up_without_a_signal() -> None:
    class Silent:
        def __getattr__(self, name: str):
            raise AssertionError(f"{name} was called")

    stop_signal = StopSignal(Silent(), 0, 2)  # type: ignore[arg-type]
    assert not any(stop_signal.is_due(update, 1) for update in range(100))


def test_a_rank_hears_what_another_was_asked() -> None:
    store = HashStore()
    first, second = StopSignal(store, 0, 2), StopSignal(store, 1, 2)
    second.listen()
    assert not second.asked.is_set()
    first.asked.set()
    first.listen()
    started_s = time.monotonic()
    while not second.asked.is_set() and time.monotonic() < started_s + 60:
        second.listen()
    assert second.asked.is_set()


def test_the_lead_stops_all_without_a_rank_that_is_dead() -> None:
    store, dead = HashStore(), set[int]()
    halts = [StopSignal(store, rank, 3, lead=2, is_dead=dead.__contains__) for rank in range(3)]
    halts[2].asked.set()
    for update in (4, 8):  # rank 1 does not come
        for halt in (halts[0], halts[2]):
            halt.listen()
            assert not halt.is_due(update, 4)
    dead.add(1)
    assert not halts[2].is_due(12, 4)
    assert [(halt.is_due(16, 4), halt.is_due(20, 4)) for halt in (halts[0], halts[2])] == [(False, True)] * 2
