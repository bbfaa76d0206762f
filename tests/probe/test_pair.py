"""Two processes and the messages between them."""

import multiprocessing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.probe.pair import Pair

on_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")]


@pytest.mark.parametrize("uses_nccl", [False, pytest.param(True, marks=on_gpus)])
def test_every_message_is_answered(uses_nccl: bool) -> None:
    with Pair(1, uses_nccl=uses_nccl) as pair:
        pair.wait()
        folder = Path(pair.folder.name)
        trials = pair.trials()
        for trial in trials:
            assert trial.time_s(1) > 0, trial.name
            assert trial.time_s(2) > 0, trial.name
    ways = {(trial.subject, trial.what) for trial in trials}
    if uses_nccl:
        assert ways == {("gpu0>gpu1", "nccl")}
    else:
        assert ways == {("cpu>cpu", way) for way in ("gloo", "gloo sum", "shared memory", "memory sum", "compute")}
    assert not folder.exists()
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_noticed_and_the_other_is_not_waited_for() -> None:
    with Pair(1) as pair:
        pair.wait()
        gloo = pair.trials()[0]
        assert gloo.time_s(1) > 0
        pair.processes[0].terminate()
        pair.processes[0].join()
        with pytest.raises((RuntimeError, OSError)):
            gloo.time_s(1)
        with pytest.raises((RuntimeError, OSError)):
            gloo.time_s(1)
    assert multiprocessing.active_children() == []
