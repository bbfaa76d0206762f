"""The forecast beside real runs on the CPU workers of this machine: the part of forecast.py that needs no GPU.

The model is measured once for all plans of a batch, as a search does: with all cores, and with a part of them while the
others work. Then each plan is compiled and simulated, and processes train it. The time of a step is the median over
rounds, from the end of one to the end of the next; of plans without a common moment it is the makespan over the
updates. Memory is what a worker's process grows by, with the weights that it had.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from pipedejavu.facts import Machine, Profile
from pipedejavu.launch import TrainedRun, plan_run, train
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.planning import known_machine, measure_setups
from pipedejavu.planner.profiling import choose_sizes, measure_task
from pipedejavu.run import TrainOptions

MODELS = {
    "mlp": (1024, 4096),
    "vgg-small": (64, 192),
    "resnet18": (4, 8),
    "gpt-tiny": (8, 24),
    "bert-tiny": (16, 48),
    "seq2seq-tiny": (16, 48),
    "moe-tiny": (4, 12),
}
"""Samples of an update, two sizes each, for which one takes 50 ms or more: below that threads that wake up decide."""
PRESETS = ("whole", "ddp", "gpipe", "1f1b", "2bw", "coarse")
NAMES = {"2bw": "pipedream-2bw"}
AGAIN = ("whole", "1f1b")
"""Run twice, for the noise floor."""
STEPS, WARM_UP, MICROBATCHES = 16, 6, 4
"""Steps of a run, and the first of them, in which its memory still grows."""


def plan_of(name: str, batch: int) -> Plan:
    """Returns a plan whose update has so many samples, over two workers but for `whole`."""
    if name == "whole":
        return preset("ddp").at(workers=1, microbatches=1, samples=batch)
    if name == "ddp":
        return preset("ddp").at(workers=2, microbatches=1, samples=batch // 2)
    if name == "coarse":
        return preset("coarse").at(workers=1, microbatches=1, samples=batch)
    return preset(NAMES.get(name, name)).at(workers=2, microbatches=MICROBATCHES, samples=batch // MICROBATCHES)


def run_model(model: str, folder: Path, presets: tuple[str, ...], limit_s: float) -> bool:
    """Runs the cases of a model that are left; returns whether all are done before the time was over."""
    path, started = folder / "cpu.jsonl", time.perf_counter()
    done = {json.loads(line)["case"] for line in path.read_text().splitlines()} if path.exists() else set()
    for batch in MODELS[model]:
        cases = [(name, turn) for name in presets for turn in range(1 + (name in AGAIN))]
        keys = {case: f"{model}, {batch} samples, {case[0]}, {case[1]}" for case in cases}
        left = {case: key for case, key in keys.items() if key not in done}
        if not left:
            continue
        machine, profile = measure_facts(model, batch)
        for (name, turn), key in left.items():
            if time.perf_counter() - started > limit_s:
                return False
            found = run_case(options_of(model), plan_of(name, batch), machine, profile)
            row = {"case": key, "model": model, "batch": batch, "preset": name, "turn": turn, **found}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(describe(row), flush=True)
    return True


def options_of(model: str) -> TrainOptions:
    return TrainOptions(model=model, steps=STEPS, data="random" if model in ("mlp", "vgg-small", "resnet18") else None)


def measure_facts(model: str, batch: int) -> tuple[Machine, Profile]:
    """Measures what the forecasts of all plans of a batch rest on."""
    machine = known_machine()
    return machine, measure_task(
        model, options_of(model).data, choose_sizes(batch), measure_setups(machine), lambda _: None
    )


def run_case(options: TrainOptions, plan: Plan, machine: Machine, profile: Profile) -> dict[str, Any]:
    """Plans, simulates and trains one case."""
    started = time.perf_counter()
    machine = machine.divided(plan.num_workers, by_kind=True)
    options, program, _ = plan_run(options, plan, machine, devices="cpu", profile=profile)
    with tempfile.TemporaryDirectory() as folder:
        found = train(options, program, str(Path(folder) / "run"))
    return {**figures(found), "wall_s": time.perf_counter() - started}


def figures(found: TrainedRun) -> dict[str, Any]:
    """Returns what was forecast and what was measured of a run."""
    program, steps = found.program, found.program.plan.steps
    sizes = [sum(program.profile.units[u].parameter_bytes for u in piece.units) for piece in program.pieces]
    held = [sum(sizes[piece] for piece, _ in program.held(w)) for w in range(len(program.workers))]
    worst = max(range(len(held)), key=lambda w: found.prediction.workers[w].peak_bytes)
    kinds: dict[str, list[float]] = {}
    for column, timeline in enumerate((found.prediction.timeline(), found.measured)):
        for span in timeline.spans():
            kind = "".join(c for c in span.action.split(":")[0] if c.isalpha())
            kinds.setdefault(f"{span.worker} {kind}", [0.0, 0.0])[column] += span.end_s - span.start_s
    return {
        "forecast": {
            "step_s": found.prediction.chance.mean_s / steps,
            "low_s": found.prediction.chance.low_s / steps,
            "high_s": found.prediction.chance.high_s / steps,
            "makespan_s": found.prediction.makespan_s / steps,
            "peak": found.prediction.workers[worst].peak_bytes,
        },
        "measured": {"step_s": found.step_s(WARM_UP), "peak": found.grown_bytes[worst] + held[worst]},
        "rounds_s": found.rounds_s,
        "last_round_s": found.measured.makespan_s / steps,
        "kinds": kinds,
    }


def describe(row: dict[str, Any]) -> str:
    ours, real = row["forecast"], row["measured"]
    error = ours["step_s"] / real["step_s"] - 1
    return (
        f"{row['case']:40} {1e3 * ours['step_s']:9.2f} {1e3 * real['step_s']:9.2f} ms {error:+7.1%}"
        f"  {ours['peak'] / 1e6:8.1f} {real['peak'] / 1e6:8.1f} MB  ({row['wall_s']:.0f} s)"
    )
