"""Files that are no files, and links that others have planted: nothing waits, and nothing is written elsewhere."""

import gzip
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save

from pipedejavu.facts import InputError, Machine, Profile, Timeline, read_machine, read_profile, write_file
from pipedejavu.facts.file import fresh_path, open_file, read_file, remove, replace_file
from pipedejavu.plan import Plan
from pipedejavu.profile.operator import read_rows
from pipedejavu.run import RunFolder
from pipedejavu.store import Checkpoint, CheckpointDir, Saver, import_dcp, import_hf, read_weights
from pipedejavu.zoo.idx import read_idx
from pipedejavu.zoo.image import read_cifar10


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Ends a test that waits for the other end of a FIFO."""

    def give_up(*_: object) -> None:
        pytest.fail("the reader waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "machine": ("m.json", lambda path: read_machine(str(path))),
    "profile": ("p.json", Profile.load),
    "graph": ("graph.txt", lambda path: read_profile(str(path), ("g",))),
    "table": ("p.csv", lambda path: read_profile(str(path), ("g",))),
    "operators": ("o.csv", lambda path: read_rows(str(path))),
    "plan": ("plan.json", Plan.load),
    "timeline": ("measured.json", lambda path: RunFolder(path.parent).timeline("measured")),
    "IDX": ("images", lambda path: read_idx(path, 3)),
    "CIFAR": ("test_batch.bin", lambda path: read_cifar10(path.parent, "test")),
    "manifest": ("manifest.json", lambda path: Checkpoint(path.parent)),
    "weights": ("w.safetensors", read_weights),
    "folder of weights": ("w.safetensors", lambda path: read_weights(path.parent)),
    "index": ("model.safetensors.index.json", lambda path: read_weights(path.parent)),
    "pickle": ("pytorch_model.bin", lambda path: import_hf(path.parent, path.parent / "s", allow_pickle=True)),
    "DCP": (".metadata", lambda path: import_dcp(path.parent, path.parent / "s", allow_pickle=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    os.mkfifo(tmp_path / file)
    with pytest.raises(InputError, match=r"is a FIFO, not a regular file"):
        read(tmp_path / file)


@pytest.mark.parametrize("name", READERS)
def test_a_device_is_refused(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    (tmp_path / file).symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"is a character device, not a regular file"):
        read(tmp_path / file)


@pytest.mark.parametrize("name", READERS)
def test_a_folder_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    (tmp_path / file).mkdir()
    with pytest.raises(InputError, match=r"Is a directory|has no file"):
        read(tmp_path / file)


def test_metrics_that_are_a_fifo_hold_no_rows_and_take_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    folder = RunFolder(tmp_path)
    folder.add_metrics({"step": 1})
    assert folder.rows() == []


def test_part_of_a_checkpoint_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    checkpoint_dir = saved(tmp_path)
    part = checkpoint_dir.folder(1) / "part-00000.safetensors"
    part.unlink()
    os.mkfifo(part)
    for read in (
        Checkpoint(checkpoint_dir.folder(1)).verify,
        lambda: Checkpoint(checkpoint_dir.folder(1)).tensor("weight/a"),
    ):
        with pytest.raises(InputError, match="is a FIFO, not a regular file"):
            read()


def test_a_file_larger_than_its_kind_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with path.open("wb") as file:
        file.truncate(10 << 30)  # sparse: no disk is taken
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"it has 10\.0 GiB, and files of this kind have at most 64\.0 MiB"):
        Machine.load(path)
    with pytest.raises(InputError, match=r"at most 1\.0 GiB"):
        Timeline.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18


def test_a_name_that_no_file_can_have_is_a_sentence() -> None:
    for name in ("a\0b.json", "x" * 5000 + ".json", "\ud800.json"):
        with pytest.raises(InputError, match="cannot read"):
            read_file(name)
        with pytest.raises(InputError, match="cannot write"):
            write_file(name, "")


def test_what_is_read_is_followed_through_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(save({"a": torch.ones(2)}))  # as the hub's cache keeps them
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert read_weights(tmp_path / "model.safetensors")["a"].tolist() == [1, 1]
    with open_file(tmp_path / "model.safetensors") as file:
        assert len(file.read()) == (tmp_path / "blob").stat().st_size


def saved(path: Path, step: int = 1) -> CheckpointDir:
    checkpoint_dir = CheckpointDir(path / "checkpoints")
    saver = Saver(checkpoint_dir, tell=pytest.fail)
    saver.save(step, {"weight/a": torch.ones(2)}, lambda: {"samples": 3})
    saver.wait()
    return checkpoint_dir


def test_planted_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("x.json.part", "x.json.tmp", "x.json", "model.part"):
        (run / name).symlink_to(victim / "file")
    write_file(run / "x.json", "{}")
    RunFolder(run).write_model({"a": torch.ones(2)})
    checkpoint_dir = CheckpointDir(run / "checkpoints")
    checkpoint_dir.path.mkdir()
    (checkpoint_dir.path / "step-1.tmp").symlink_to(victim)
    (checkpoint_dir.path / "LATEST.tmp").symlink_to(victim / "file")
    (checkpoint_dir.path / "LATEST").symlink_to(victim / "file")
    saved(run)
    (run / "metrics.jsonl").symlink_to(victim / "file")
    RunFolder(run).add_metrics({"step": 1})
    assert (victim / "file").read_text() == "precious"
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (run / "x.json").read_text() == "{}"
    assert (checkpoint_dir.path / "LATEST").read_text() == "step-1\n"
    Checkpoint(checkpoint_dir.folder(1)).verify()


def test_what_is_removed_is_a_link_and_not_what_it_names(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    checkpoint_dir = saved(tmp_path)
    for name in ("step-7.tmp", "step-8.bad", "step-0"):
        (checkpoint_dir.path / name).symlink_to(victim)
    checkpoint_dir.discard(7)
    (checkpoint_dir.path / "step-7.tmp").symlink_to(victim)
    checkpoint_dir.collect()
    checkpoint_dir._remove(0)
    assert (victim / "file").read_text() == "precious"
    assert sorted(path.name for path in checkpoint_dir.path.iterdir()) == ["LATEST", "step-1", "step-8.bad"]
    remove(tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()
    remove(tmp_path / "checkpoints")


def test_a_file_is_replaced_whole_under_fresh_names(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert fresh_path(path) != fresh_path(path)
    replace_file(path, b"1")
    replace_file(path, b"22")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"22"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "folder", b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "folder"]


@pytest.mark.parametrize("name", ["step-٣", "step-007", f"step-{10**30}", "step-²"])
def test_folders_that_only_look_like_checkpoints_are_left_alone(name: str, tmp_path: Path) -> None:
    checkpoint_dir = saved(tmp_path)
    (checkpoint_dir.path / name).mkdir()
    assert checkpoint_dir.steps() == [1]
    found = checkpoint_dir.newest(pytest.fail)
    assert found
    assert found.step == 1
    assert (checkpoint_dir.path / name).is_dir()


def test_export_of_a_damaged_checkpoint_is_a_sentence_and_moves_nothing(tmp_path: Path, monkeypatch) -> None:
    from pipedejavu.cli import export_command

    checkpoint_dir = saved(tmp_path)
    (checkpoint_dir.folder(1) / "manifest.json").write_text("{}")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(InputError, match=r"none of them can be used; step-1: .* does not begin with its hash"):
        export_command.run(str(tmp_path), str(tmp_path / "out"), "hugging", None, False)
    assert checkpoint_dir.steps() == [1]


@pytest.mark.parametrize("form", ["hugging", "dcp"])
def test_export_to_a_folder_that_cannot_be_made_is_a_sentence(form: str, tmp_path: Path) -> None:
    from pipedejavu.cli import export_command

    saved(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*Not a directory"):
        export_command.run(str(tmp_path), str(tmp_path / "file" / "out"), form, None, False)


def test_a_gzip_of_zeros_takes_no_more_memory_than_its_header_says(tmp_path: Path) -> None:
    """A gzip of 2 MB can hold 2 GiB of zeros; a header that says so is refused before any of them is made."""
    path = tmp_path / "images.gz"
    header = bytes([0, 0, 8, 3]) + (2**31 - 1).to_bytes(4) + (1).to_bytes(4) * 2
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header + bytes(1 << 24))
    code = """
import resource, sys
from pathlib import Path
from pipedejavu.facts import InputError
from pipedejavu.zoo.idx import read_idx
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_idx(Path(sys.argv[1]), 3)
except InputError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    sentence, grown = done.stdout.splitlines()
    assert "2147483647×1×1 bytes, more than 100 times its own" in sentence
    assert int(grown) < 64
