"""What a launcher hands to its workers in memory: the compiled program and its forecast, as one JSON object.

A program prints and parses, so no worker compiles or simulates it again.
"""

import json
from dataclasses import asdict, replace
from typing import NamedTuple

from pipedejavu.facts import Machine, Profile, Record, WorkerSummary
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.program.program import Group, GroupRole, Piece, Worker
from pipedejavu.simulate import Prediction


class RunForecast(Record):
    """The figures of a prediction that workers need: for watchdog, progress display and metrics."""

    makespan_s: float
    mean_s: float
    """The mean makespan, given how much the times of actions vary."""
    workers: tuple[WorkerSummary, ...]
    """One summary per worker, without its memory over time."""

    @classmethod
    def of(cls, prediction: Prediction) -> "RunForecast":
        """Returns the figures of a prediction."""
        workers = tuple(worker.replace(memory=()) for worker in prediction.workers)
        return cls(makespan_s=prediction.makespan_s, mean_s=prediction.chance.mean_s, workers=workers)


class Handover(NamedTuple):
    """A program, and its forecast if it has one."""

    program: Program
    forecast: RunForecast | None = None

    def pack(self) -> bytes:
        """Returns program and forecast as JSON."""
        program = self.program
        form = {
            "plan": program.plan.to_json(),
            "profile": program.profile.to_json(),
            "machine": program.machine.to_json(),
            "pieces": [{**asdict(p), "units": [p.units.start, p.units.stop, p.units.step]} for p in program.pieces],
            "inputs": program.inputs,
            "workers": [asdict(replace(worker, actions=())) for worker in program.workers],
            "text": program.to_text(),
            "groups": {name: asdict(group) for name, group in program.groups.items()},
            "devices": program.devices,
            "parts": program.parts,
            "num_replicas": program.num_replicas,
            "copies": program.copies,
            "forecast": self.forecast.to_json() if self.forecast else None,
        }
        return json.dumps(form).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Handover":
        """Reads the JSON that `pack` returns."""
        form = json.loads(data)
        program = Program(
            plan=Plan.from_json(form["plan"]),
            profile=Profile.from_json(form["profile"]),
            machine=Machine.from_json(form["machine"]),
            pieces=tuple(Piece(**{**piece, "units": range(*piece["units"])}) for piece in form["pieces"]),
            inputs=tuple(map(tuple, form["inputs"])),
            workers=tuple(Worker(**{**worker, "actions": ()}) for worker in form["workers"]),
            groups={name: _group(**group) for name, group in form["groups"].items()},
            devices=tuple(form["devices"]),
            parts=tuple(map(tuple, form["parts"])),
            num_replicas=form["num_replicas"],
            copies=form["copies"],
        ).with_text(form["text"])
        return cls(program, RunForecast.from_json(form["forecast"]) if form["forecast"] else None)


def _group(workers: list[int], role: str, number: int, helpers: list[int]) -> Group:
    return Group(workers=tuple(workers), role=GroupRole(role), number=number, helpers=tuple(helpers))
