"""Numbers out of range, options that would be ignored, and files of another kind are refused in one sentence."""

from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from pipedejavu.cli.option_range import RANGES
from pipedejavu.cli.plan_command import PlanRequest
from pipedejavu.cli.profile_command import ProfileRequest
from pipedejavu.cli.simulate_command import SimulateRequest
from pipedejavu.cli.train_request import TrainRequest
from pipedejavu.facts import Machine, parse_cluster, read_machine
from pipedejavu.facts.cluster import compose
from pipedejavu.plan import preset
from pipedejavu.planner.worker_host import WorkerHost, describe_stand_ins, make_machine
from tests.cli.test_main import refused


@pytest.mark.parametrize("request_type", [TrainRequest, PlanRequest, ProfileRequest, SimulateRequest])
def test_every_numeric_option_has_a_range(request_type: type) -> None:
    hints = get_type_hints(request_type)
    numeric = {
        field.name
        for field in fields(request_type)
        if {int, float} & {hints[field.name], *get_args(hints[field.name])} or "int" in str(hints[field.name])
    }
    assert numeric <= RANGES.keys(), f"give {numeric - RANGES.keys()} a range in cli/option_range.py"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("train zoo:mlp --batch -4", "--batch is a number of samples, 1 or more, not -4"),
        ("train zoo:mlp --batch 0", "--batch is a number of samples, 1 or more, not 0"),
        ("train zoo:mlp --steps -1", "--steps is a number of updates, 1 or more, not -1"),
        ("train zoo:mlp --workers 0", "--workers is a number of workers, 1 or more, not 0"),
        ("train zoo:mlp --replicas -2", "--replicas is a number of replicas, 1 or more, not -2"),
        ("train zoo:mlp --microbatches 0", "--microbatches is a number of microbatches, 1 or more, not 0"),
        ("train zoo:mlp --samples 0", "--samples is a number of samples per microbatch, 1 or more, not 0"),
        ("train zoo:mlp --lr 0", "--lr is a number, above 0, not 0"),
        ("train zoo:mlp --lr nan", "--lr is a number, above 0, not nan"),
        ("train zoo:mlp --lr inf", "--lr is a number, above 0, not inf"),
        ("train zoo:mlp --hang-after -1", "--hang-after is a number of seconds, 0 or more, not -1"),
        ("train zoo:mlp --cpu-share 2", "--cpu-share is a part of the batch between 0 and 1, not 2"),
        ("train zoo:mlp --seed 99999999999999999999", "--seed is an integer between"),
        ("plan gpt-small --batch 0", "--batch is a number of samples, 1 or more, not 0"),
        ("plan gpt-small --candidates 0", "--candidates is a number of plans, 1 or more, not 0"),
        ("profile zoo:mlp --batch -1", "--batch is a number of samples, 1 or more, not -1"),
        ("profile zoo:mlp --parts 0", "--parts is a number of workers, 1 or more, not 0"),
        ("simulate preset:1f1b --workers 0", "--workers is a number of workers, 1 or more, not 0"),
        ("simulate preset:1f1b --steps 0", "--steps is a number of updates, 1 or more, not 0"),
        ("presets 1f1b --workers -1", "--workers is a number of workers, 1 or more, not -1"),
    ],
)
def test_a_number_out_of_range_is_refused(arguments: str, text: str) -> None:
    assert text in refused(*arguments.split())


def test_a_cpu_share_that_auto_would_ignore_is_refused() -> None:
    assert "--plan auto chooses the CPU's share itself" in refused("train", "zoo:mlp", "--cpu-share", "0.5")


def test_more_stages_than_units_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("pipedejavu.launch.planned_run.measure_messages", measure)
    monkeypatch.setattr("pipedejavu.launch.planned_run.measure_plan", measure)
    said = refused("train", "zoo:gpt-tiny", "--plan", "preset:1f1b", "--workers", "20")
    assert "the plan has 20 stages but profile 'gpt-tiny' has 6 units; use at most 6 stages" in said


@pytest.mark.parametrize("model", ["zoo:mlp", "hf:config.json"])
def test_weights_that_are_not_there_are_said_at_once(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("pipedejavu.launch.planned_run.measure_plan", measure)
    monkeypatch.setattr("pipedejavu.launch.planned_run.measure_messages", measure)
    weights = str(tmp_path / "nofile.safetensors")
    arguments = ("train", model, "--weights", weights, "--data", "random", "--plan", "preset:ddp")
    said = refused(*arguments)
    assert "nofile.safetensors" in said
    assert "there is no such file or folder" in said


@pytest.fixture
def files(tmp_path: Path) -> Path:
    machine: Machine = compose(parse_cluster("2xa100 + epyc-7763"))
    machine.save(tmp_path / "machine.json")
    preset("1f1b").at(workers=2).save(tmp_path / "plan.json")
    (tmp_path / "profile.json").write_text('{"name": "x", "units": [{"name": "a"}]}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("train zoo:mlp --plan machine.json", "machine.json: this is a machine, and a plan is read here"),
        ("train zoo:mlp --plan profile.json", "profile.json: this is a profile, and a plan is read here"),
        ("simulate machine.json", "machine.json: this is a machine, and a plan is read here; give it as --machine"),
        ("simulate preset:1f1b --machine plan.json", "plan.json: this is a plan, and a machine is read here"),
        ("simulate preset:1f1b --profile machine.json", "this is a machine, and a profile is read here"),
        ("plan plan.json --machine machine.json", "plan.json: this is a plan, and a profile is read here"),
        ("train zoo:mlp --machine config.json", "this is a configuration of transformers, and a machine is read"),
    ],
)
def test_a_file_of_another_kind_is_named(
    arguments: str, text: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    assert text in refused(*arguments.split())


def test_a_file_of_the_right_kind_keeps_its_own_faults(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    (files / "plan.json").write_text('{"cut": {}, "place": {}, "ordr": {}}')
    assert "unknown key 'ordr'; did you mean 'order'?" in refused("simulate", "plan.json")
    assert read_machine("machine.json").name == "2xa100 + epyc-7763"


def test_a_plan_for_gpus_on_cpu_workers_says_so() -> None:
    here = WorkerHost(host="here", local_rank=0, cores=4, memory_bytes=2**30, gpus=())
    hosts = [here.replace(local_rank=n) for n in range(4)]
    plan = preset("1f1b").at(workers=4)

    def said(*names: str) -> str:
        placed, machine = make_machine(plan.replace(place=plan.place.replace(devices=names or None)), hosts, "auto")
        assert placed.place.devices
        return describe_stand_ins(machine, placed.place.devices, hosts)

    assert said("a100-0", "a100-1", "a100-2", "a100-3").startswith("the plan names a100-0 and 3 more, and the hosts")
    assert said("cpu.0", "cpu.1", "cpu.2", "cpu.3") == said() == ""
