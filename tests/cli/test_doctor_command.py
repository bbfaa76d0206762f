"""What is installed: the version, the doctor, and completion in a shell."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import pipedejavu
from pipedejavu.cli import doctor_command
from pipedejavu.probe import installation


def command(folder: Path) -> Path:
    """Returns the installed command, as pip would write it."""
    path = folder / "pipedejavu"
    path.write_text(f"#!{sys.executable}\nfrom pipedejavu.cli.main import main\nmain()\n")
    path.chmod(0o755)
    return path


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    real = installation.version

    def version(name: str) -> str:
        if name in missing:
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(installation, "version", version)


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    done = subprocess.run([command(tmp_path), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pipedejavu {pipedejavu.__version__}\n"


def test_the_doctor_says_what_is_here_and_how_to_get_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    without(monkeypatch, "wandb")
    doctor_command.run("1.2.3", as_json=False)
    said = capsys.readouterr().out
    assert "pipedejavu 1.2.3, Python 3." in said
    assert "wandb: pip install 'pipedejavu[wandb]'" in said
    assert said.endswith("ready to train\n")


def test_without_torch_the_doctor_says_so_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "torch")
    with pytest.raises(SystemExit) as left:
        doctor_command.run("1.2.3", as_json=True)
    assert left.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["can_train"] is False
    (torch,) = (part for part in found["parts"] if part["name"] == "torch")
    assert (torch["found"], torch["remedy"]) == (None, "pip install 'pipedejavu[train]'")


def test_every_remedy_is_an_extra_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for part in installation.inspect_installation().parts:
        if "pipedejavu[" in part.remedy:
            extra = part.remedy.partition("[")[2].partition("]")[0]
            assert f"\n{extra} = [" in text


def test_a_library_that_does_not_load_is_no_native_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "_native.so").write_bytes(b"torn")
    monkeypatch.setattr(installation, "PACKAGE", tmp_path)
    (native,) = (part for part in installation.inspect_installation().parts if part.name == "native pass")
    assert native.is_missing


def test_completion_installs_into_a_shell_and_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = command(tmp_path)
    ask = ["bash", "-c", f"{path} --install-completion; exit $?"]  # not the last command: bash stays its parent
    subprocess.run(ask, capture_output=True, check=True)
    script = (tmp_path / ".bash_completions" / "pipedejavu.sh").read_text()
    assert str(tmp_path / ".bash_completions" / "pipedejavu.sh") in (tmp_path / ".bashrc").read_text()
    press = f"{script}\nCOMP_WORDS=({path} si); COMP_CWORD=1; _pipedejavu_completion {path}; echo $COMPREPLY"
    done = subprocess.run(["bash", "-c", press], capture_output=True, text=True, check=True)
    assert done.stdout == "simulate\n"
