"""The kinds of files that the program reads: of each one that can be read, and what reads it, as `fuzz.py` does."""

import gzip
import json
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import save

from pipedejavu.cli import compare_command, runs_command
from pipedejavu.data.data_choice import DataChoice
from pipedejavu.facts import InputError, Machine, Profile, Record, Timeline, read_file, read_machine, read_profile
from pipedejavu.health.failure import read_failure
from pipedejavu.hybrid_report.recording import HybridRun
from pipedejavu.plan import preset
from pipedejavu.planner import cache as kept
from pipedejavu.planner.replan import PlanSwitch
from pipedejavu.profile.operator import known_rows, read_rows
from pipedejavu.program import parse_action
from pipedejavu.run import History, RunFolder, TrainOptions
from pipedejavu.run.logbook import _read_id
from pipedejavu.run.run_folder import RunStart
from pipedejavu.run.saved_facts import random_state, saved_in, set_random_state
from pipedejavu.run.settings import SEAL, Settings, read_settings
from pipedejavu.search import SearchOptions
from pipedejavu.session.loop_checkpoints import _optimizer_state, load_weights
from pipedejavu.source.hf_config import check_configuration
from pipedejavu.source.hf_model import build_hf_model
from pipedejavu.store import Checkpoint, CheckpointDir, Saver, export_dcp, import_dcp, import_hf, read_weights
from pipedejavu.zoo.idx import read_idx
from pipedejavu.zoo.image import read_cifar10, read_mnist

MACHINE = Machine.from_json("""{"name": "m", "hosts": [{"name": "a"}, {"name": "b", "cores": 4}],
  "devices": [{"name": "g", "kind": "h", "type": "gpu", "host": "a", "memory_bytes": "80 GiB", "flop_per_s": 1e15},
              {"name": "c", "kind": "e", "type": "cpu", "host": "b", "memory_bytes": 1, "reserved_bytes": 5}],
  "links": [{"source": "g*", "scope": "other-host", "latency_s": "3 us", "bytes_per_s": "5 GB/s",
             "wires": ["x{source}"]},
            {"bytes_per_s": 3}], "overlap": {"compute": 1.5}}""")
PROFILE = Profile.from_json("""{"name": "p", "units": [
    {"name": "u", "times": {"h": {"forward": {"fixed_s": 1, "per_sample_s": 2}, "update_s": 3}}, "parameter_bytes": 9},
    {"name": "v", "activation_bytes": 0.5, "has_batch_statistics": true}],
  "edges": [{"source": "u", "target": "v", "bytes": 7}], "ties": [{"units": ["u", "v"], "size_bytes": 4}]}""")
TIMELINE = Timeline.from_json("""{"origin": "measured", "makespan_s": 2, "bubble_fraction": 0.5,
  "workers": [{"worker": 0, "device": "g", "busy_s": 1, "peak_bytes": 5, "peak_live_microbatches": 1,
    "weight_versions": 1, "memory": [{"memory": "host", "capacity_bytes": 9, "times_s": [0, 1],
      "classes": {"weights": [1, 2]}, "peak_bytes": 2, "peak_classes": {"weights": 2}}]}],
  "worker": [0, 0], "lane": ["compute", "net"], "action": ["F0", "B0"], "start_s": [0, 1], "end_s": [1, 2]}""")
PLAN = preset("distreal").plan.replace(name="π", bucket_bytes=7)
SWITCH = PlanSwitch(plan=PLAN, profile=PROFILE, machine=MACHINE, now_s=2, then_s=1, reason="slow")
OPTIONS = TrainOptions(model="mlp", clip_norm=2.0, checkpoint_every=3)
RECORDING = HybridRun.model_validate(
    {
        "units": ({"name": "unit", "place": "host", "num_parameters": 10, "weight_bytes": 20, "gradient_bytes": 20,
                   "state_bytes": 100},),
        "spans": (("compute", "F0", 1.0, 2.0), ("compute", "F0", 5.0, 6.0), ("copy-out", "OFFLOAD:d0", 2.0, 2.5),
                  ("host", "UPDATE0~host", 6.0, 7.0)),
        "is_clipped": True,
    }
)  # fmt: skip
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
METRICS = b"""{"step": 1, "loss": 2.5, "count": 3, "samples": 3, "elapsed_s": 0.5, "peak_bytes": 9, "peak_gpu_bytes": 8}
{"saved": 1, "size_bytes": 10, "took_s": 0.1}
{"step": 2, "loss": 2.0, "count": 3, "samples": 3, "elapsed_s": 0.75, "skipped": true}
{"shares": [0.5, 0.5]}
{"not_saved": 2, "reason": "No space left"}
{"switched": 2, "before": "a", "plan": "b", "before_s": 1, "then_s": 2, "reason": "slow"}
{"resumed": 2}
{"straggler": 1, "lag": 1.5, "kinds": ["F"]}
{"step": 3, "loss": 1.5, "count": 3, "samples": 3, "elapsed_s": 1.5}
{"failed": "worker 1 was ended"}
"""
GPT2 = {
    "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 300, "n_inner": 8,
    "resid_pdrop": 0.1, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "dtype": "float32",
    "architectures": ["GPT2LMHeadModel"], "attn_implementation": "sdpa", "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8,
    "image_size": 8, "patch_size": 4, "num_channels": 3, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1},
}  # fmt: skip
T5 = {
    "model_type": "t5", "vocab_size": 300, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_decoder_layers": 1,
    "num_heads": 2, "is_encoder_decoder": True, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip


class Kind(NamedTuple):
    """A kind of file: one that can be read, what reads it, its name, and what is made anew around a change of it."""

    name: str
    good: bytes
    read: Callable[[Path], Any]
    file: str = "file"
    wrap: Callable[[bytes], bytes] = lambda data: data
    prepare: Callable[[Path], None] = lambda _: None
    """Puts beside it what it is read with."""
    is_shown: bool = False
    """Whether what is read is printed."""


def seal(data: bytes) -> bytes:
    """Gives a changed manifest its seal."""
    rest = data.partition(b"\n")[2]
    return b'{"seal": "%s",\n' % sha256(rest).hexdigest().encode() + rest


def with_size(data: bytes) -> bytes:
    """Gives a changed header of safetensors its size."""
    end = data.rfind(b"}") + 1
    return len(data[:end]).to_bytes(8, "little") + data


@cache
def checkpoint_files() -> dict[str, bytes]:
    """A small checkpoint: scalars, nothing, several types; and the same as DCP has it."""
    tensors = {"weight/a": torch.arange(6.0).view(2, 3), "state/step/a": torch.tensor(3), "weight/b": torch.empty(0, 2)}
    tensors |= random_state()
    with TemporaryDirectory() as folder:
        checkpoint_dir = CheckpointDir(folder)
        saver = Saver(checkpoint_dir)
        saver.save(1, tensors, lambda: {"samples": 3, "loss": 0.5, "facts": {"norm": 1.5, "parts": [[1]]}})
        saver.wait()
        files = {path.name: path.read_bytes() for path in checkpoint_dir.folder(1).iterdir()}
        with warnings.catch_warnings(action="ignore"):  # torch says that it is alone
            export_dcp(Checkpoint(checkpoint_dir.folder(1)), Path(folder) / "dcp")
        return files | {path.name: path.read_bytes() for path in (Path(folder) / "dcp").iterdir()}


def put_checkpoint(folder: Path) -> None:
    """Puts the files of a checkpoint beside one that is changed later."""
    _put_files(folder, ("manifest", "part"))


def put_dcp(folder: Path) -> None:
    """Puts the files of DCP beside one that is changed later."""
    _put_files(folder, (".metadata", "__"))


def _put_files(folder: Path, starts: tuple[str, ...]) -> None:
    for name, data in checkpoint_files().items():
        if name.startswith(starts):
            (folder / name).write_bytes(data)


def read_checkpoint(path: Path) -> None:
    """Reads a checkpoint of which one file was changed, in all ways: tensor by tensor, and all of it before."""
    found = Checkpoint(path.parent)
    faults = []
    state = torch.get_rng_state()
    for read in (found.verify, lambda: found.tensors(found.names()), lambda: saved_in(found), lambda: go_on(found)):
        try:
            read()
        except InputError as error:
            faults.append(error)
    torch.set_rng_state(state)
    if faults:
        raise faults[0]


def go_on(found: Checkpoint) -> None:
    """Takes up all that is there, as a loop of one's own does."""
    model = torch.nn.ParameterDict({"a": torch.zeros(2, 3), "b": torch.zeros(0, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    load_weights(model, found)
    _optimizer_state(model, optimizer, found)
    set_random_state(found)


def read_shelf(path: Path) -> None:
    """Looks for a checkpoint beside a changed file of the shelf."""
    checkpoint_dir = CheckpointDir(path.parent)
    checkpoint_dir.collect()
    found = checkpoint_dir.newest(lambda _: None)
    assert found is not None
    checkpoint_dir.prune()


def put_shelf(folder: Path) -> None:
    """Makes a shelf of one checkpoint."""
    (folder / "step-1").mkdir()
    put_checkpoint(folder / "step-1")


def read_imported(path: Path) -> None:
    """Makes a checkpoint of a folder of weights."""
    import_hf(path.parent, path.parent / "shelf", allow_pickle=True)


def put_part(folder: Path) -> None:
    """Puts a file of safetensors that an index names."""
    (folder / "part.safetensors").write_bytes(save({"a": torch.ones(2)}))


def put_run(folder: Path) -> None:
    """Makes the folder of a run that has ended."""
    files: dict[str, Record] = {
        "options.json": OPTIONS, "plan.json": preset("ddp").at(workers=2), "profile.json": PROFILE,
        "machine.json": MACHINE, "measured.json": TIMELINE, "predicted.json": TIMELINE.replace(origin="predicted"),
    }  # fmt: skip
    for name, record in files.items():
        (folder / name).write_text(record.to_json())
    (folder / "metrics.jsonl").write_bytes(METRICS)


def sealed_bytes() -> bytes:
    """Returns the sealed file of the run that `put_run` makes."""
    settings = Settings(OPTIONS, preset("ddp").at(workers=2), PROFILE, MACHINE)
    with TemporaryDirectory() as folder:
        settings.write(Path(folder))
        return (Path(folder) / SEAL).read_bytes()


def read_run(path: Path) -> None:
    """Prints a run of which one file was changed, as a row, alone, beside itself, as JSON; and compares it."""
    for as_json in (False, True):
        runs_command.run([str(path.parent.parent)], as_json)
        runs_command.run([str(path.parent)] * 2, as_json)
        compare_command.compare(str(path.parent), as_json)
    history = History.read(path.parent)
    assert len([*history.rates()]) <= len(history.steps)
    assert all(event.kind is not None for event in history.events)
    folder = RunFolder(path.parent)
    folder._forget(1)
    folder.elapsed_s()


def read_seal(path: Path) -> None:
    """Reads what a run was started with, and restores what is not as it was sealed."""
    read_settings(path.parent, None, lambda _: None)


def read_timeline(path: Path) -> None:
    """Reads the timeline of a run."""
    RunFolder(path.parent).timeline("measured")


def read_kept(path: Path) -> None:
    """A cache that cannot be read is no fault of the user's: there is nothing in it."""
    with mock.patch.object(kept, "store_folder", return_value=path.parent):
        key = {"any": 1}
        path.rename(kept._path(Machine, key))
        kept.find(Machine, key)


def read_left(path: Path) -> None:
    """What a worker leaves when it fails."""
    data = read_file(path)
    store = mock.Mock(check=lambda _: True, get=lambda _: data)
    assert str(read_failure(store, [1]))


def read_recording(path: Path) -> None:
    """A recording of a HybridAdamW, and what is made of it before anything is printed."""
    run = HybridRun.load(path)
    assert len(run.places) == len(run.units)
    assert all(work.step for work in run.work)


def read_configuration(path: Path) -> None:
    """Builds the model of a configuration, without memory."""
    build_hf_model(str(path), choice=DataChoice(name="random"), device="meta")


def read_published(path: Path) -> None:
    """Reads iteration times that others published."""
    _published().read_rows(str(path), read_machine("2x(8xa100-80gb), 800Gb/s"))


@cache
def _published() -> Any:
    spec = spec_from_file_location("published", Path(__file__).with_name("published.py"))
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put_mnist(folder: Path) -> None:
    """Puts both of MNIST's files, of which one is changed later."""
    (folder / "train-images-idx3-ubyte").write_bytes(idx_bytes(2, 3, 3))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(2))


def idx_bytes(*sizes: int) -> bytes:
    """Returns an IDX file of zeros."""
    return bytes([0, 0, 8, len(sizes)]) + b"".join(n.to_bytes(4) for n in sizes) + bytes(math.prod(sizes))


def pickled() -> bytes:
    """Returns what torch.save writes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "w.bin"
        torch.save({"a": torch.ones(2)}, path)
        return path.read_bytes()


def _text(path: Path) -> str:
    return read_file(path).decode("utf-8", "replace")


def _record(name: str, record: Record) -> Kind:
    return Kind(name, record.to_json().encode(), type(record).load)


def _kinds() -> list[Kind]:
    files = checkpoint_files()
    whole = save({"a": torch.ones(2), "b": torch.zeros(0, 3)})
    size = 8 + int.from_bytes(whole[:8], "little")
    cluster = b'{"name": "c", "hosts": [{"count": 2, "gpus": ["2xa100-80gb"], "cpu": "epyc-7763"}], '
    run = {"prepare": put_run, "is_shown": True}
    return [
        Kind("machine", MACHINE.to_json().encode(), lambda path: read_machine(str(path)), "machine.json"),
        Kind("cluster", cluster + b'"network_bytes_per_s": "100 Gb/s"}', lambda p: read_machine(str(p)), "c.json"),
        Kind("machine in a line", b"2x(4xa100-80gb + 2xepyc-7763), 100Gb/s", lambda path: read_machine(_text(path))),
        _record("profile", PROFILE),
        Kind("graph.txt", GRAPH, lambda path: read_profile(str(path), ("g",)), "graph.txt"),
        Kind("CSV profile", TABLE, lambda path: read_profile(str(path), ("g",)), "profile.csv"),
        Kind("operators.csv", ROWS.encode(), lambda path: read_rows(str(path))),
        Kind("published CSV", b"header\n" + b"8,32,4,1024,16,24,2048,2,2,2,1500\n" * 2, read_published),
        _record("plan", PLAN),
        _record("options", OPTIONS),
        _record("options of plan", SearchOptions(batch=4)),
        _record("start.json", RunStart(step=3, samples=9)),
        _record("switch.json", SWITCH),
        Kind("timeline", TIMELINE.to_json().encode(), read_timeline, "measured.json"),
        Kind("recording", RECORDING.to_json().encode(), read_recording),
        Kind("action", b"SEND:x0.0>1", lambda path: parse_action(_text(path))),
        Kind("cache", MACHINE.to_json().encode(), read_kept),
        Kind("failure", b"memory\n[1, 2]", read_left),
        Kind("logbook id", b"0123456789abcdef", _read_id),
        Kind("run: metrics.jsonl", METRICS, read_run, "run/metrics.jsonl", **run),
        Kind("run: options.json", OPTIONS.to_json().encode(), read_run, "run/options.json", **run),
        Kind("run: plan.json", PLAN.to_json().encode(), read_run, "run/plan.json", **run),
        Kind("run: measured.json", TIMELINE.to_json().encode(), read_run, "run/measured.json", **run),
        Kind("run: seal.json", sealed_bytes(), read_seal, "run/seal.json", prepare=put_run),
        Kind("manifest", files["manifest.json"], read_checkpoint, "manifest.json", seal, put_checkpoint),
        Kind("manifest, seal kept", files["manifest.json"], read_checkpoint, "manifest.json", prepare=put_checkpoint),
        Kind("part", files[(n := "part-00000.safetensors")], read_checkpoint, n, prepare=put_checkpoint),
        Kind("LATEST", b"step-1\n", read_shelf, "LATEST", prepare=put_shelf),
        Kind("safetensors", whole, read_imported, "model.safetensors"),
        Kind("safetensors header", whole[8:size].rstrip() + whole[size:], read_weights, "w.safetensors", with_size),
        Kind("index", b'{"weight_map": {"a": "part.safetensors"}}', read_imported, "model.safetensors.index.json",
             prepare=put_part),
        Kind("pickle", pickled(), read_imported, "pytorch_model.bin"),
        Kind("DCP metadata", files[".metadata"], _read_dcp, ".metadata", prepare=put_dcp),
        Kind("DCP", files["__0_0.distcp"], _read_dcp, "__0_0.distcp", prepare=put_dcp),
        Kind("hf: GPT-2", json.dumps(GPT2).encode(), read_configuration, "config.json"),
        Kind("hf: ViT", json.dumps(VIT).encode(), read_configuration, "config.json"),
        Kind("hf: T5", json.dumps(T5).encode(), read_configuration, "config.json"),
        Kind("hf: fields", json.dumps({**GPT2, "text_config": VIT}).encode(), _check_fields, "config.json"),
        Kind("IDX", idx_bytes(2, 3), lambda path: read_idx(path, 2)),
        Kind("IDX in gzip", idx_bytes(2, 3), lambda path: read_idx(path, 2), wrap=lambda d: gzip.compress(d, mtime=0)),
        Kind("gzip", gzip.compress(idx_bytes(2, 3), mtime=0), lambda path: read_idx(path, 2)),
        Kind("MNIST", idx_bytes(2), lambda path: read_mnist(path.parent, "train"), "train-labels-idx1-ubyte",
             prepare=put_mnist),
        Kind("CIFAR-10", bytes(2 * 3073), lambda path: read_cifar10(path.parent, "test"), "test_batch.bin"),
    ]  # fmt: skip


def _read_dcp(path: Path) -> None:
    import_dcp(path.parent, path.parent / "shelf", allow_pickle=True)


def _check_fields(path: Path) -> None:
    data, plain = read_file(path), None
    with suppress(ValueError, RecursionError):
        plain = json.loads(data)
    check_configuration(plain, "x")


KINDS = {kind.name: kind for kind in _kinds()}
