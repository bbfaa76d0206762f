"""Every file that is read: whatever its bytes are, reading it gives a value or one sentence, in little time and memory.

Bytes are those of a file that can be read with parts of it changed, or any at all. What a file is sealed or compressed
with is made anew around the change, so that what comes behind is reached.
"""

import gzip
import json
import math
import pickle
import resource
import warnings
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from pipedejavu.facts import InputError, Machine, Profile, Record, read_machine, read_profile
from pipedejavu.plan import Plan
from pipedejavu.profile.operator import known_rows, read_rows
from pipedejavu.program import parse_action
from pipedejavu.search import Options
from pipedejavu.store import Checkpoint, Saver, Shelf, export_dcp, import_dcp, import_hugging
from pipedejavu.train import RunFolder, TrainOptions
from pipedejavu.train import cache as kept
from pipedejavu.train.folder import Start
from pipedejavu.train.loop import _optimizer_state, load_weights
from pipedejavu.train.recording import HybridRun
from pipedejavu.train.saved import random_state, saved_in, set_random_state
from pipedejavu.zoo.idx import read_idx
from pipedejavu.zoo.image import read_cifar10
from tests.facts.test_fuzz import MACHINE, ODD, PLAN, PROFILE, TIMELINE
from tests.script import load_script
from tests.train.test_recording import STEP, made

pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries say of odd files is not ours

MOST_GROWN_BYTES = 1 << 29
"""What reading any number of small files may add to the memory of this process."""


class Readable(NamedTuple):
    """A kind of file: one that can be read, and how it is read from a path."""

    good: bytes
    read: Callable[[Path], Any]
    name: str = "file"
    wrap: Callable[[bytes], bytes] = lambda data: data


GRAPH = b"""node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0, parameter_size=0
node2 -- ReLU(inplace) -- forward_compute_time=1.5, backward_compute_time=2, activation_size=[3.0; 4], parameter_size=0
node3 -- Linear(1, 2) -- forward_compute_time=1, backward_compute_time=2, activation_size=3, parameter_size=9
\tnode1 -- node2
\tnode2 -- node3
"""
TABLE = b"unit,device,forward_s,backward_s,parameter_bytes\na,g,1 ms,2e-3,4 KiB\na,h,3,4,4 KiB\nb,,5,6,7\n"
ROWS = "device,type,dtype,operator,pass,shape,flop,bytes,time_s,flop_per_s,bytes_per_s\n" + "\n".join(
    ",".join(map(str, row)) for row in known_rows()[:3]
)
METRICS = b'{"step": 1, "loss": 2.5, "count": 3, "elapsed_s": 0.5}\n{"saved": 1}\n{"shares": [0.5, 0.5]}\n'


def seal(data: bytes) -> bytes:
    """Gives a changed manifest its seal."""
    rest = data.partition(b"\n")[2]
    return b'{"seal": "%s",\n' % sha256(rest).hexdigest().encode() + rest


@cache
def checkpoint_files() -> dict[str, bytes]:
    """A small checkpoint: scalars, nothing, several types."""
    tensors = {"weight/a": torch.arange(6.0).view(2, 3), "state/step/a": torch.tensor(3), "weight/b": torch.empty(0, 2)}
    tensors |= random_state()
    with TemporaryDirectory() as folder:
        shelf = Shelf(folder)
        saver = Saver(shelf, tell=pytest.fail)
        saver.save(1, tensors, lambda: {"samples": 3, "loss": 0.5, "facts": {"norm": 1.5, "parts": [[1]]}})
        saver.wait()
        files = {path.name: path.read_bytes() for path in shelf.folder(1).iterdir()}
        with warnings.catch_warnings(action="ignore"):  # torch says that it is alone
            export_dcp(Checkpoint(shelf.folder(1)), Path(folder) / "dcp")
        return files | {path.name: path.read_bytes() for path in (Path(folder) / "dcp").iterdir()}


def read_checkpoint(path: Path) -> None:
    """Reads a checkpoint of which one file was changed, in both ways: tensor by tensor, and all of it before."""
    for name, data in checkpoint_files().items():
        if name != path.name and name.startswith(("manifest", "part")):
            (path.parent / name).write_bytes(data)
    found = Checkpoint(path.parent)
    faults = []
    random = torch.get_rng_state()
    for read in (found.verify, lambda: found.tensors(found.names()), lambda: saved_in(found), lambda: go_on(found)):
        try:
            read()
        except InputError as error:
            faults.append(error)
    torch.set_rng_state(random)
    if faults:
        raise faults[0]


def go_on(found: Checkpoint) -> None:
    """Takes up all that is there, as a loop of one's own does."""
    model = torch.nn.ParameterDict({"a": torch.zeros(2, 3), "b": torch.zeros(0, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    load_weights(model, found)
    _optimizer_state(model, optimizer, found)
    set_random_state(found)


def read_dcp(path: Path) -> None:
    for name, data in checkpoint_files().items():
        if name != path.name and name.startswith((".metadata", "__")):
            (path.parent / name).write_bytes(data)
    import_dcp(path.parent, path.parent / "shelf", allow_pickle=True)


def read_hugging(path: Path) -> None:
    (path.parent / "part.safetensors").write_bytes(save({"a": torch.ones(2)}))
    import_hugging(path.parent, path.parent / "shelf", allow_pickle=True)


def read_alone(path: Path) -> None:
    import_hugging(path.parent, path.parent / "shelf", allow_pickle=True)


def read_metrics(path: Path) -> None:
    folder = RunFolder(path.parent)
    folder.elapsed_s()
    folder._forget(1)
    folder.elapsed_s()


def read_timeline(path: Path) -> None:
    RunFolder(path.parent).timeline("predicted")


def read_kept(path: Path) -> None:
    """A cache that cannot be read is no fault of the user's: there is nothing in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "store_folder", lambda: path.parent)
        key = {"any": 1}
        path.rename(kept._path(Machine, key))
        kept.find(Machine, key)


def record_of(kind: type[Record], good: Record) -> Readable:
    return Readable(good.to_json().encode(), kind.load)


def read_published(path: Path) -> None:
    PUBLISHED.read_rows(str(path), PUBLISHED_MACHINE, recomputes=False)


def read_recording(path: Path) -> None:
    """A recording of a HybridAdamW, and what is made of it before anything is printed."""
    run = HybridRun.load(path)
    assert len(run.places) == len(run.units)
    assert all(work.step for work in run.work)


def idx_bytes(*sizes: int) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + b"".join(n.to_bytes(4) for n in sizes) + bytes(math.prod(sizes))


def pickled() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "w.bin"
        torch.save({"a": torch.ones(2)}, path)
        return path.read_bytes()


PUBLISHED = load_script("published")
PUBLISHED_MACHINE = read_machine("2x(8xa100-80gb), 800Gb/s")
RECORDING = made(*STEP, ("copy-out", "OFFLOAD:d0", 2.0, 2.5), ("host", "UPDATE0~host", 6.0, 7.0))


FILES: dict[str, Readable] = {
    "machine": Readable(MACHINE.to_json().encode(), lambda path: read_machine(str(path)), "machine.json"),
    "cluster": Readable(
        b'{"name": "c", "hosts": [{"count": 2, "gpus": ["2xa100-80gb"], "cpu": "epyc-7763"}],'
        b' "network_bytes_per_s": "100 Gb/s"}',
        lambda path: read_machine(str(path)), "cluster.json",
    ),
    "composed machine": Readable(
        b"2x(4xa100-80gb + 2xepyc-7763), 100Gb/s",
        lambda path: read_machine(path.read_bytes().decode("utf-8", "replace")),
    ),
    "profile": record_of(Profile, PROFILE),
    "plan": record_of(Plan, PLAN),
    "timeline": Readable(TIMELINE.to_json().encode(), read_timeline, "predicted.json"),
    "options": record_of(TrainOptions, TrainOptions(model="mlp", clip_norm=2.0, checkpoint_every=3)),
    "options of plan": record_of(Options, Options(batch=4)),
    "start": record_of(Start, Start(step=3, samples=9)),
    "action": Readable(b"SEND:x0.0>1", lambda path: parse_action(path.read_bytes().decode("utf-8", "replace"))),
    "metrics": Readable(METRICS, read_metrics, "metrics.jsonl"),
    "cache": Readable(MACHINE.to_json().encode(), read_kept),
    "graph.txt": Readable(GRAPH, lambda path: read_profile(str(path), ("g",)), "graph.txt"),
    "CSV profile": Readable(TABLE, lambda path: read_profile(str(path), ("g",)), "profile.csv"),
    "operators.csv": Readable(ROWS.encode(), lambda path: read_rows(str(path))),
    "published CSV": Readable(b"header\n" + b"8,32,4,1024,16,24,2048,2,2,2,1500\n" * 2, read_published),
    "recording": Readable(RECORDING.to_json().encode(), read_recording),
    "IDX": Readable(idx_bytes(2, 3), lambda path: read_idx(path, 2)),
    "IDX in gzip": Readable(
        idx_bytes(2, 3), lambda path: read_idx(path, 2), wrap=lambda data: gzip.compress(data, mtime=0)
    ),
    "gzip": Readable(gzip.compress(idx_bytes(2, 3), mtime=0), lambda path: read_idx(path, 2)),
    "CIFAR": Readable(
        bytes(2 * 3073), lambda path: read_cifar10(path.parent, "test"), "test_batch.bin"
    ),
    "manifest": Readable(checkpoint_files()["manifest.json"], read_checkpoint, "manifest.json", seal),
    "manifest without its seal": Readable(checkpoint_files()["manifest.json"], read_checkpoint, "manifest.json"),
    "part": Readable(checkpoint_files()["part-00000.safetensors"], read_checkpoint, "part-00000.safetensors"),
    "safetensors": Readable(save({"a": torch.ones(2)}), read_alone, "model.safetensors"),
    "index": Readable(b'{"weight_map": {"a": "part.safetensors"}}', read_hugging, "model.safetensors.index.json"),
    "pickle": Readable(pickled(), read_alone, "pytorch_model.bin"),
    "DCP metadata": Readable(checkpoint_files()[".metadata"], read_dcp, ".metadata"),
    "DCP": Readable(checkpoint_files()["__0_0.distcp"], read_dcp, "__0_0.distcp"),
}  # fmt: skip

TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"9" * 400, b"-", b"e9", b"1e400", b"\\u", b"\n", b"\t", b"\0", b"nan",
    b"null", b"0", b".", b"=", b"\xff", b"\xf0\x9f\x92\xa9", b"[" * 3000, b"99999999999", b"\xff\xff\xff\xff\xff\xff",
]  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, good: bytes) -> bytes:
    """Returns some bytes: mostly good ones with a few changes, of bytes or of what the JSON in them says."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=200))
    start = good.find(b"{") if kind < 5 else -1
    if start >= 0:
        try:
            plain = json.loads(good[start:])
        except ValueError:
            pass
        else:
            return good[:start] + json.dumps(with_change(draw, plain)).encode()
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 8)))
        data[at:to] = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8), st.just(bytes(data[at:to]) * 20)))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data)


def with_change(draw: st.DrawFn, plain: Any) -> Any:
    """Puts an odd value in the place of any that is inside."""
    sizes = [-(2**63), 2**63, 2**62, 10**15, [0, 2**62], [0, 2**62, 2**62], [2**62, 2**62, 4]]
    odd = st.sampled_from([*ODD, *sizes, "../x", "part-00001.safetensors"])
    if not isinstance(plain, dict | list) or not plain or draw(st.integers(0, 4)) == 0:
        return draw(odd)
    key = draw(st.sampled_from(sorted(plain) if isinstance(plain, dict) else range(len(plain))))
    copied = plain.copy()
    copied[key] = with_change(draw, plain[key])
    if isinstance(copied, dict) and draw(st.integers(0, 9)) == 0:
        copied[draw(st.text(max_size=5))] = copied.pop(key)
    return copied


def read(kind: Readable, data: bytes) -> bool:
    """Whether data of a kind can be read; raises where reading raises what is no sentence."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / kind.name
        path.write_bytes(data)
        try:
            kind.read(path)
        except InputError:
            return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_a_good_file_is_read(name: str) -> None:
    assert read(FILES[name], FILES[name].good)


def check_any_bytes(name: str, examples: int) -> None:
    kind, counts = FILES[name], [0, 0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(derandomize=True, max_examples=examples, deadline=None, database=None)
    @given(data=changed(kind.good))
    def check(data: bytes) -> None:
        counts[read(kind, kind.wrap(data))] += 1

    check()
    assert name in ("metrics", "cache") or counts[False] > examples // 20  # of which whatever is left is used
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_GROWN_BYTES


@pytest.mark.parametrize("name", FILES)
def test_any_bytes_give_a_value_or_a_sentence(name: str) -> None:
    check_any_bytes(name, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_any_bytes_give_a_value_or_a_sentence_many_times(name: str) -> None:
    check_any_bytes(name, 1000)


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    """In every file that may be one, and in every file that may not."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    data = pickle.dumps({"a": Evil()})
    for kind in FILES.values():
        assert kind.name in ("metrics.jsonl", "file") or not read(kind, data)
    assert not (tmp_path / "executed").exists()
    pickle.loads(data)
    assert (tmp_path / "executed").exists()  # so it would have
