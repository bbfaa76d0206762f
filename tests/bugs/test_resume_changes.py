"""A run that goes on is the run that was begun: what has changed since is named, restored, or refused."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.facts import InputError
from pipedejavu.launch import RankGroup, Resumed, plan_run, reopen, train
from pipedejavu.plan import preset
from pipedejavu.run import RunFolder, TrainOptions
from pipedejavu.source.fingerprint import read_fingerprints
from pipedejavu.store import Checkpoint
from tests.cli.test_main import say

NET = """
import torch
from torch import nn

import layers
from rows import Rows


def make():
    return nn.Sequential(nn.Linear(4, 6), layers.act(), nn.Linear(6, 2)), loss, Rows(SCALE)


def loss(output, target):
    return ((output - target) ** 2).sum()


SCALE = 1.0
"""
LAYERS = "from torch import nn\n\nact = nn.Tanh\n"
ROWS = """
import torch


class Rows:
    def __init__(self, scale):
        made = torch.Generator().manual_seed(1)
        self.x, self.y = scale * torch.randn(24, 4, generator=made), torch.randn(24, 2, generator=made)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        return self.x[n], self.y[n]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A run of four steps of a user's file, and the file with two modules beside it."""
    folder = tmp_path_factory.mktemp("base")
    for name, text in (("net.py", NET), ("layers.py", LAYERS), ("rows.py", ROWS)):
        (folder / name).write_text(text)
    options = TrainOptions(model=f"{folder}/net.py:make", steps=4, lr=0.01, optimizer="sgd", checkpoint_every=2)
    options, program, _ = plan_run(options, preset("ddp").at(workers=1, samples=3))
    train(options, program, str(folder / "run"))
    return folder


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run that ended after step 2; the user's files are put back."""
    kept = {path: path.read_text() for path in base.glob("*.py")}
    folder = Path(shutil.copytree(base / "run", tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / "step-4")
    (folder / "model.safetensors").unlink()
    yield folder
    for path, text in kept.items():
        path.write_text(text)


def resume(folder: Path, **more: bool) -> tuple[Resumed, list[str]]:
    told: list[str] = []
    resumed = reopen(str(folder), RankGroup(), told.append, **more)
    assert resumed is not None
    assert resumed.known is not None
    return resumed, told


def change(path: Path, before: str, now: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, now))


def set_lr(folder: Path) -> None:
    change(folder / "options.json", '"lr": 0.01', '"lr": 0.03')


def test_a_changed_option_is_named_and_restored(run: Path) -> None:
    set_lr(run)
    resumed, told = resume(run)
    assert told == [f"{run}/options.json has been changed (lr 0.03, before 0.01): restored from seal.json"]
    assert resumed.known.options.lr == RunFolder(run).options().lr == 0.01
    given = resumed.options(TrainOptions(model=resumed.known.options.model, lr=0.5), {"lr"})
    assert given.lr == 0.5  # on the command line it may change


def test_a_changed_option_can_be_accepted(run: Path) -> None:
    set_lr(run)
    resumed, told = resume(run, accept_changes=True)
    assert told[0].endswith("has been changed (lr 0.03, before 0.01); it is taken as it is")
    assert resumed.known.options.lr == 0.03


def test_without_the_sealed_file_a_difference_from_the_checkpoint_is_refused(run: Path) -> None:
    """As in folders of earlier versions."""
    (run / "seal.json").unlink()
    assert resume(run)[1] == []
    set_lr(run)
    said = r"options\.json has been changed \(lr 0\.03, before 0\.01\) in the checkpoint of step 2; .* --accept-changes"
    with pytest.raises(InputError, match=said):
        resume(run)
    assert resume(run, accept_changes=True)[0].known.options.lr == 0.03


@pytest.mark.parametrize("name", ["options", "plan", "profile", "machine"])
@pytest.mark.parametrize("damage", ["missing", "cut", "unsealed"])
def test_a_damaged_file_of_a_run_is_restored(run: Path, name: str, damage: str) -> None:
    known, path = resume(run)[0].known, run / f"{name}.json"
    path.unlink() if damage == "missing" else path.write_text(path.read_text()[:-9])
    if damage == "unsealed":
        change(run / "seal.json", '"lr": 0.01', '"lr": 0.03')
    resumed, told = resume(run)
    origin = "the checkpoint of step 2" if damage == "unsealed" else "seal.json"
    assert f"{path} is {'missing' if damage == 'missing' else 'damaged'}: restored from {origin}" in told
    assert resumed.known == known
    assert resume(run)[0].known == known


def test_without_a_checkpoint_and_a_sealed_file_a_damaged_file_is_refused(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "seal.json").unlink()
    (run / "plan.json").write_text("{")
    with pytest.raises(InputError, match=r"plan\.json is damaged, and nothing says what it was; put it back, or begin"):
        resume(run)


HASHES = r"\(before sha256 .{12}…, now sha256 .{12}…\)"


@pytest.mark.parametrize(
    ("file", "before", "now", "named"),
    [
        ("net.py", "target) ** 2", "target) ** 4", rf"the file net\.py {HASHES}"),
        ("layers.py", "Tanh", "ReLU", rf"the module layers\.py {HASHES}"),
        ("rows.py", "seed(1)", "seed(2)", rf"the module rows\.py {HASHES}; 8 items of the data {HASHES}"),
        ("rows.py", "24", "25", rf"the module rows\.py {HASHES}; the length of the data \(before 24, now 25\)"),
    ],
)
def test_a_changed_source_is_named_and_needs_to_be_accepted(base: Path, run: Path, file, before, now, named) -> None:
    change(base / file, before, now)
    forget_modules()
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=rf"since the checkpoint of step 2 .* changes: {named}.*--accept-changes"):
        resume(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    resumed, told = resume(run, accept_changes=True)
    assert told[0].startswith("changes since the checkpoint of step 2 are accepted: the ")
    assert resumed.start.fingerprints == read_fingerprints(resumed.known.options)
    forget_modules()


def forget_modules() -> None:
    """A new process imports the modules anew."""
    for name in ("layers", "rows"):
        sys.modules.pop(name, None)


def test_a_checkpoint_of_an_earlier_version_resumes_with_a_sentence(run: Path) -> None:
    folder = run / "checkpoints" / "step-2"
    manifest = Checkpoint(folder).manifest
    old = {name: manifest.facts[name] for name in ("norm", "parts", "options")}
    (folder / "manifest.json").write_bytes(manifest.replace(facts=old).to_bytes())
    (run / "seal.json").unlink()
    resumed, told = resume(run)
    assert str(resumed) == "training goes on after step 2"
    assert told[0].startswith("the checkpoint of step 2 is of an earlier version, which kept no fingerprints: whether")
    assert not told[1:]


def test_no_run_with_damaged_checkpoints_begins_at_step_0_by_itself(run: Path) -> None:
    part = run / "checkpoints" / "step-2" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(
        InputError, match=r"none of them can be used; step-2: .*; nothing was changed, and --allow-restart"
    ):
        resume(run)
    resumed, told = resume(run, allow_restart=True)
    assert resumed.start.step == 0
    assert told[0].startswith("checkpoint step-2 cannot be used and is set aside as step-2.bad: ")
    with pytest.raises(InputError, match="none of them can be used; nothing was changed, and --allow-restart"):
        resume(run)


def test_checkpoints_alone_are_a_run(run: Path) -> None:
    for name in ("options", "plan", "profile", "machine", "seal"):
        (run / f"{name}.json").unlink()
    with pytest.raises(InputError, match="holds a run already; go on with --resume"):
        RunFolder(run).check_new()
    resumed, told = resume(run)
    assert resumed.start.step == 2
    assert sum("restored from the checkpoint of step 2" in sentence for sentence in told) == 4


def test_a_run_that_has_made_its_steps_has_nothing_left_to_do(base: Path, run: Path) -> None:
    shutil.copytree(base / "run" / "checkpoints" / "step-4", run / "checkpoints" / "step-4")
    done = say("train", f"{base}/net.py:make", "--run-dir", str(run), "--resume", "--json")
    assert done.code == 0, done.stderr
    assert f"pipedejavu: nothing left to do: the run in {run} has made 4 of its 4 steps; --steps asks" in done.stderr
    summary = json.loads(done.stdout)
    assert (summary["run_dir"], summary["steps"], summary["model"]) == (str(run), 4, f"{run}/model.safetensors")
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["expected_s"] > 0
    # The run was ended before it wrote its weights; its checkpoint has them.
    expected, found = load_file(base / "run" / "model.safetensors"), load_file(run / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_data_that_are_random_have_a_fingerprint_only_if_a_seed_decides(tmp_path: Path) -> None:
    for name, noise in (("torch", "torch.rand(())"), ("clock", "(time.perf_counter_ns() % 1_000_003)")):
        (tmp_path / f"{name}_net.py").write_text(
            "import time\nimport torch\nfrom torch import nn\nclass Rows:\n    def __len__(self): return 3\n"
            f"    def __getitem__(self, n): return torch.ones(2) * {noise}, torch.ones(2)\n"
            "def make(): return nn.Linear(2, 2), nn.MSELoss(), Rows()\n"
        )
    state = torch.get_rng_state()
    found = {name: TrainOptions(model=f"{tmp_path}/{name}_net.py:make") for name in ("torch", "clock")}
    first, again = ({name: read_fingerprints(options) for name, options in found.items()} for _ in range(2))
    assert first == again
    assert "3 items of the data" in first["torch"]
    assert [*first["clock"]] == ["the file clock_net.py", "the length of the data"]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("model", "data", "names"),
    [
        ("mlp", None, ["pipedejavu, which has zoo:mlp"]),
        ("gpt-tiny", None, ["pipedejavu, which has zoo:gpt-tiny", "the text of Python's standard library"]),
        ("mlp", "digits", ["pipedejavu, which has zoo:mlp", "scikit-learn"]),
        ("hf:{}", "random", ["the configuration {}", "transformers"]),
    ],
)
def test_models_by_name_have_fingerprints_without_being_built(tmp_path: Path, model, data, names) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2"}')
    options = TrainOptions(model=model.format(config), data=data)
    assert [*read_fingerprints(options)] == [name.format(config) for name in names]
