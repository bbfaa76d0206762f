"""Logbooks that others keep: TensorBoard for real where it is installed, the others by what they are told."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.run import RunFolder, TrainOptions, check_logbooks, logbook
from pipedejavu.run.logbook import Logbooks, open_logbooks


def test_one_that_is_not_installed_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logbook, "find_spec", lambda _: None)
    with pytest.raises(InputError) as refused:
        check_logbooks(("wandb",))
    assert str(refused.value) == "--log wandb needs wandb, which is not installed: pip install 'pipedejavu[wandb]'"


def test_the_command_refuses_it_with_one_sentence(processes, tmp_path: Path) -> None:
    code = "import sys; sys.modules['mlflow'] = None; from pipedejavu.cli.main import main; main()"
    arguments = ["train", "zoo:mlp", "--plan", "preset:ddp", "--steps", "2", "--log"]
    end, out, err = processes.run([sys.executable, "-c", code, *arguments, "mlflow"], tmp_path)
    assert (end, out) == (2, "")
    assert err == "pipedejavu: --log mlflow needs mlflow, which is not installed: pip install 'pipedejavu[mlflow]'\n"
    end, _, err = processes.run([sys.executable, "-c", code, *arguments, "paper"], tmp_path)
    assert end == 2
    assert "tensorboard" in err
    assert not [*tmp_path.iterdir()]


def test_tensorboard_shows_what_the_metrics_hold(processes, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    command = ["-m", "pipedejavu", "train", "zoo:mlp", "--plan", "preset:ddp", "--workers", "2", "--steps", "3"]
    end, _, err = processes.run([sys.executable, *command, "--run-dir", "run", "--log", "tensorboard"], tmp_path)
    assert end == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    read = (
        "import sys, json; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1]).Reload()\n"
        "print(json.dumps({tag: [[e.step, e.value] for e in found.Scalars(tag)] for tag in found.Tags()['scalars']}))"
    )
    _, out, err = processes.run([sys.executable, "-c", read, "run/tensorboard"], tmp_path)
    found = json.loads(out)
    expected = [[row["step"], torch.tensor(row["loss"]).item()] for row in rows if "loss" in row]  # kept in 32 bits
    assert found["loss"] == expected
    assert len(expected) == 3
    assert found.keys() >= {"samples_per_s", "elapsed_s", "peak_bytes"}


class FakeWandb:
    """Notes what it is told, as the package of that name would send it."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.told: list[tuple[int, dict[str, float]]] = []
        self.ended = 0

    def init(self, **settings: Any) -> "FakeWandb":
        self.begun.append(settings)
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.told.append((step, figures))

    def finish(self) -> None:
        self.ended += 1


def test_one_that_cannot_be_opened_is_refused_and_left_out_of_a_resumed_run(tmp_path: Path, monkeypatch) -> None:
    opened: list[FakeWandb] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("no way to the server\nand much more")

    def open_fake(*_: Any) -> SimpleNamespace:
        opened.append(FakeWandb())
        return SimpleNamespace(add=lambda step, figures: opened[-1].log(figures, step), close=opened[-1].finish)

    monkeypatch.setitem(logbook._OPEN, "wandb", open_fake)
    monkeypatch.setitem(logbook._OPEN, "mlflow", fail)
    options, told = TrainOptions(model="mlp", log=("wandb", "mlflow")), []
    said = r"--log mlflow cannot be opened; set it up or leave it out \(RuntimeError: no way to the server\)$"
    with pytest.raises(InputError, match=said), open_logbooks(RunFolder(tmp_path), options, {}, 0, told.append):
        pytest.fail("it is not there")
    assert opened[0].ended == 1
    with open_logbooks(RunFolder(tmp_path), options, {}, 3, told.append) as books:
        books.add(4, {"loss": 1.0})
    assert told == ["nothing goes to mlflow, which cannot be opened (RuntimeError: no way to the server)"]
    assert (opened[1].told, opened[1].ended) == ([(4, {"loss": 1.0})], 1)


def log_two(folder: RunFolder, name: str, start: int = 0) -> None:
    options = TrainOptions(model="mlp", log=(name,))
    with open_logbooks(folder, options, {"plan": "ddp"}, start, print) as books:
        for step in (start + 1, start + 2):
            books.add(step, {"loss": 1.0 / step})


def test_a_resumed_run_continues_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log_two(RunFolder(tmp_path), "wandb")
    log_two(RunFolder(tmp_path), "wandb", start=2)
    log_two(RunFolder(tmp_path), "wandb")
    assert [step for step, _ in fake.told] == [1, 2, 3, 4, 1, 2]
    first, second, anew = (begun["id"] for begun in fake.begun)
    assert first == second != anew
    assert fake.begun[0]["config"]["model"] == "mlp"
    assert fake.begun[0]["config"]["plan"] == "ddp"
    assert fake.ended == 3


class FakeMlflow:
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.run = ""

    def set_experiment(self, name: str) -> None:
        assert name == "pipedejavu"

    def start_run(self, run_id: str | None, run_name: str | None) -> SimpleNamespace:
        self.run = run_id or f"of {run_name}"
        return SimpleNamespace(info=SimpleNamespace(run_id=self.run))

    def log_params(self, settings: dict[str, Any]) -> None:
        assert settings["plan"] == "ddp"

    def log_metrics(self, figures: dict[str, float], step: int) -> None:
        assert figures == {"loss": 1.0 / step}
        self.told.append((self.run, step))

    def end_run(self) -> None:
        self.run = ""


def test_a_resumed_run_continues_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    log_two(RunFolder(tmp_path), "mlflow")
    log_two(RunFolder(tmp_path), "mlflow", start=2)
    assert fake.told == [(f"of {tmp_path.name}", step) for step in (1, 2, 3, 4)]


class Torn:
    def add(self, step: int, figures: dict[str, float]) -> None:
        raise OSError(f"the wire is cut at step {step} with {figures}")

    def close(self) -> None:
        raise AssertionError("it was left out")


def test_a_logbook_that_fails_is_left_out_and_told_once() -> None:
    said: list[str] = []
    books = Logbooks({"wandb": Torn()}, said.append)
    for step in (1, 2):
        books.add(step, {"loss": 1.0})
    books.close()
    assert said == ["no more to wandb from step 1 on: OSError: the wire is cut at step 1 with {'loss': 1.0}"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trace"), [("wandb", "wandb/offline-run-*/*.wandb"), ("mlflow", "mlflow.id")])
def test_a_real_one_takes_a_run(name: str, trace: str, processes, tmp_path: Path) -> None:
    pytest.importorskip(name)
    command = ["-m", "pipedejavu", "train", "zoo:mlp", "--plan", "preset:ddp", "--workers", "2", "--steps", "3"]
    settings = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    end, _, err = processes.run([sys.executable, *command, "--run-dir", "run", "--log", name], tmp_path, **settings)
    assert end == 0, err
    assert "no more to" not in err
    assert [*(tmp_path / "run").glob(trace)]
