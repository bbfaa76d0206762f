"""Sets estimated times of models beside measured ones, on this machine's CPU.

    python bench/estimates.py [MODEL …] [--batch 8] [--threads 1]

Of each model: the forward and the backward of a batch, measured unit by unit; what `profile --estimate` says of it
without running it, from the CPU's best product and its best copy; and the same at 40 % of that product and without
launches, as for types of devices that no operators were measured on. A ratio above 1 is an estimate that is too long.
"""

import argparse
import math
from statistics import mean

import operators
import torch

from pipedejavu.facts import Device, Host, Machine, Profile, Survey
from pipedejavu.planner import profiling
from pipedejavu.report import step_times

MODELS = ("mlp", "vgg-small", "resnet18", "gpt-tiny", "bert-tiny", "seq2seq-tiny", "moe-tiny")
RATES_S = 3.0
"""How long the two rates are measured."""


def this_cpu(threads: int) -> Machine:
    """Returns a machine with two rates, as if a survey had measured them."""
    operators.SHAPES["cpu"] = {name: operators.SHAPES["cpu"][name] for name in ("matmul", "copy")}
    rows = operators.measure(operators.Place("cpu", torch.device("cpu"), threads), RATES_S)
    rates = {"flop_per_s": rows[0]["flop_per_s"], "memory_bytes_per_s": rows[0]["bytes_per_s"]}
    device = Device(name="cpu", kind="cpu", type="cpu", host="here", memory_bytes=1 << 40, **rates)
    survey = Survey(date="now", time_s=RATES_S)
    return Machine(name="here", hosts=(Host(name="here"),), devices=(device,), survey=survey)


def times_of(profile: Profile, samples: int) -> list[float]:
    """Returns the forward and the backward."""
    step = step_times(profile, samples)["cpu"]
    return [step.forward_s, step.backward_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    machine = this_cpu(asked.threads)
    rates = f"{machine.devices[0].flop_per_s / 1e9:.0f} GFLOP/s, {machine.devices[0].memory_bytes_per_s / 1e9:.1f} GB/s"
    print(f"{asked.threads} threads, {rates}, batches of {asked.batch}\n")
    print("| model | forward | fitted | at 40 % | backward | fitted | at 40 % |\n|---|---|---|---|---|---|---|")
    logs: list[list[float]] = [[], []]
    for model in asked.models:
        measured = times_of(profiling.measure_model(model, asked.batch, [].append).profile, asked.batch)
        found = []
        for known, own in zip((profiling.known_efficiencies(), {}), logs, strict=True):
            estimated = profiling.estimate_model(model, asked.batch, machine, [].append, efficiencies=known)
            found.append(times_of(estimated.profile, asked.batch))
            own += [abs(math.log(b / a)) for a, b in zip(measured, found[-1], strict=True)]
        cells = [
            f"{m * 1e3:.2f} ms | {one / m:.2f} | {other / m:.2f}"
            for m, one, other in zip(measured, *found, strict=True)
        ]
        print(f"| {model} | {' | '.join(cells)} |", flush=True)
    fitted, plain = (math.exp(mean(own)) for own in logs)
    print(f"\noff by a factor of {fitted:.2f} on average, at 40 % by {plain:.2f}")


if __name__ == "__main__":
    main()
