"""Trials of devices, links and the disk, on the CPU, which stands in for a GPU; no test says how long one takes."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.probe import compute, link
from pipedejavu.probe.compute import ComputeDevice, compute_trials, thread_counts, using_threads
from pipedejavu.probe.disk_speed import SIZE, disk_trials
from pipedejavu.probe.link import copy_trials, peer_trials
from pipedejavu.probe.series import TimedTrial, run_rounds

CPU = torch.device("cpu")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a trial is over at once."""
    sizes = {"squares": (8, 16), "tall": (8, 8, 32), "block": (1, 4, 64)}
    monkeypatch.setattr(compute, "SCALES", {name: scale._replace(**sizes) for name, scale in compute.SCALES.items()})
    monkeypatch.setattr(link, "SIZES", (4 << 10, 64 << 10))
    monkeypatch.setattr(link, "LARGEST", 64 << 10)
    monkeypatch.setattr(link, "BESIDE", {"cpu": 16, "cuda": 256})


def place(name: str, device: str = "cpu", threads: int = 2) -> ComputeDevice:
    return ComputeDevice(name, torch.device(device), 64 << 20, threads=threads)


def check_runs(trials: list[TimedTrial]) -> None:
    found = run_rounds(trials, 0.0)
    assert found.left_out == {}
    assert all(time_s > 0 for times in found.times_s.values() for time_s in times)
    assert len({trial.name for trial in trials}) == len(trials)


@devices
def test_trials_of_a_device_run(device: str) -> None:
    where = place("it", device)
    trials = compute_trials(where)
    assert {trial.what for trial in trials} == {"matrix", "block", "memory", "update"}
    check_runs(trials)
    where.clear()
    assert where.kept == {}


@devices
def test_trials_of_links_run(device: str) -> None:
    where = place("gpu0", device)
    trials = copy_trials(where)
    settings = {(trial.subject, trial.setting.split()[0]) for trial in trials}
    ways = {("cpu>gpu0", m) for m in ("pinned", "pageable")} | {("gpu0>cpu", m) for m in ("pinned", "pageable")}
    assert settings == ways | {("cpu<>gpu0", setting) for setting in ("both", "beside", "alone")}
    check_runs(trials)
    where.clear()


def test_copies_copy() -> None:
    where = place("gpu0")
    (trial,) = [t for t in copy_trials(where) if (t.subject, t.setting) == ("cpu>gpu0", "pageable 64.0 KiB")]
    trial.time_s(1)
    where.kept["pageable"].fill_(7)
    trial.time_s(1)
    assert int((where.kept["copied"] == 7).sum()) == trial.amount == 64 << 10


def test_each_gpu_copies_to_the_next() -> None:
    trials = peer_trials([place("gpu0"), place("gpu1"), place("gpu2")])
    assert [trial.subject for trial in trials] == ["gpu0>gpu1", "gpu1>gpu2", "gpu2>gpu0"]
    check_runs(trials)
    assert peer_trials([place("gpu0")]) == []


def test_operations_are_counted_as_torch_counts_them() -> None:
    """A block forward and backward, and a matrix product, against torch's own counter."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    where = place("cpu")
    for what in ("matrix", "block"):
        trial = next(t for t in compute_trials(where) if t.what == what)
        trial.time_s(1)
        # Attention in a fused kernel is hidden from the counter.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            trial.time_s(1)
        assert trial.amount == counter.get_total_flops()


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with using_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    for trial in compute_trials(place("cpu", threads=before + 1)):
        trial.time_s(1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("threads", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_updates_are_tried_over_threads(threads: int, counts: list[int]) -> None:
    assert thread_counts(place("cpu", threads=threads)) == counts
    trials = [trial for trial in compute_trials(place("cpu", threads=threads)) if trial.what == "update"]
    assert [trial.setting for trial in trials] == [f"AdamW, {count} threads" for count in counts]


def test_no_trial_takes_much_of_the_memory() -> None:
    where = place("cpu")
    for trial in compute_trials(where):
        trial.time_s(1)
    state = [t for v in where.kept["AdamW"].state.values() for t in v.values()]
    assert sum(t.nbytes for t in state) <= 64 << 20 >> 3
    assert where.kept["memory"].nbytes <= 64 << 20 >> 4


def test_the_disk_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    trials = disk_trials(path)
    assert [trial.what for trial in trials] == ["write", "read"]
    for trial in reversed(trials):
        assert trial.time_s(1) > 0
    assert path.stat().st_size == SIZE == trials[0].amount
