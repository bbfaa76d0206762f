"""Where the command line's inputs come from: files, presets, shapes and this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipedejavu.facts import InputError, Machine, Profile, read_machine, read_profile, with_part_times
from pipedejavu.plan import Plan, preset, sized
from pipedejavu.probe import read_shape
from pipedejavu.simulate import parse_unit_costs, unit_costs
from pipedejavu.zoo import estimate_profile
from pipedejavu.zoo.gpt_shape import EFFICIENCY

DEFAULT_MODEL = "gpt-small"


@dataclass(frozen=True)
class Inputs:
    """What the user asked for, as text."""

    plan: str
    sizes: Mapping[str, int | None]
    recompute: float | None
    unit_costs: str | None
    model: str | None
    profile: str | None
    machine: str | None


class ReadInputs(NamedTuple):
    """What `compile` needs, and what the user should know of where it came from."""

    plan: Plan
    profile: Profile
    machine: Machine
    notes: tuple[str, ...]


def read_inputs(request: Inputs) -> ReadInputs:
    """Reads and checks all inputs."""
    plan = read_plan(request.plan, request.sizes)
    if request.recompute is not None:
        if not 0 <= request.recompute <= 1:
            raise InputError(f"--recompute is a share between 0 and 1, not {request.recompute:g}")
        plan = plan.replace(order=plan.order.replace(recompute=request.recompute))
    if request.unit_costs is not None:
        for option in ("model", "profile", "machine"):
            if getattr(request, option) is not None:
                raise InputError(f"--unit-costs makes its own model and machine; leave out --{option}")
        return ReadInputs(
            *unit_costs(plan, parse_unit_costs(request.unit_costs)),
            ("unit costs: time in units, no communication, every size one byte",),
        )
    if request.model is not None and request.profile is not None:
        raise InputError("give --model or --profile, not both")
    notes = []
    if request.machine is not None:
        machine = read_machine(request.machine)
        if plan.place.devices is None:
            machine = machine.divided(plan.num_workers, by_kind=request.profile is not None)
        notes.extend(_origin(machine))
    else:
        machine = read_shape(plan.num_workers, by_kind=request.profile is not None)
        host = machine.hosts[0]
        notes.append(
            f"machine: the {host.cores} cores and the memory of this host, divided over {plan.num_workers} CPU workers;"
            " its rates are assumed, not measured"
        )
    if request.profile is not None:
        profile = read_profile(request.profile, [device.kind for device in machine.devices])
        profile, sentences = with_part_times(profile, machine)
        return ReadInputs(plan, profile, machine, (*notes, *(f"profile: {sentence}" for sentence in sentences)))
    profile = estimate_profile(request.model or DEFAULT_MODEL, machine)
    notes.append(f"model: {profile.name} from its shape, at {_efficiencies(machine)}")
    return ReadInputs(plan, profile, machine, tuple(notes))


def _origin(machine: Machine) -> list[str]:
    """Returns when a machine was measured, where it was."""
    return [f"machine: {machine.name}, measured {machine.survey.date}"] if machine.survey else []


def _efficiencies(machine: Machine) -> str:
    """Returns which share of their rates devices are taken to reach."""
    own = {d.kind: d.efficiency for d in machine.devices if d.efficiency is not None}
    if not own:
        return f"{EFFICIENCY:.0%} of each device's stated rate"
    rest = [f"{EFFICIENCY:.0%} of every other's"] if len(own) < len({d.kind for d in machine.devices}) else []
    return ", ".join([*(f"{share:.0%} of {kind}'s rate" for kind, share in own.items()), *rest])


def read_model(text: str) -> str:
    """Reads zoo:NAME, hf:CONFIG or FILE.py:FUNCTION, as the door for models knows them."""
    if not text.startswith(("zoo:", "hf:")) and ".py:" not in text:
        raise InputError(
            f"'{text}' is not a model that can be trained; use zoo:NAME, such as zoo:gpt-tiny, hf:CONFIG or"
            " FILE.py:FUNCTION"
        )
    return text.removeprefix("zoo:")


def read_plan(text: str, sizes: Mapping[str, int | None], *, is_run: bool = False) -> Plan:
    """Reads preset:NAME or a plan file, at the sizes given; for a run, microbatches must be those of an update."""
    kind, colon, name = text.partition(":")
    if kind == "preset" and colon:
        found = preset(name)
    elif text.endswith(".json") or "/" in text:
        found = sized(Plan.load(text))
    else:
        raise InputError(f"'{text}' is neither a plan file (.json) nor preset:NAME; did you mean 'preset:{text}'?")
    if is_run:
        found.check_update(sizes.get("microbatches"))
    return found.at(**sizes)
