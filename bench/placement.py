"""Placements that are chosen beside a sweep: python bench/placement.py [--models llama-1.3b gpt-medium] [--quick].

HybridAdamW trains each model within five budgets of the GPU, between all state on the host and all of it on the GPU,
clipped to norm 1.0 without speculative updates. For each budget, a sweep gives the first k units that have their state
on the GPU and the first s of the others whose state is streamed; the chosen placement must be within 2 % of the best.
All placements of a budget are steps of one model: state moves between them. After one turn the best ones and the chosen
one take turns again, so that a busy machine slows all alike. `--quick` runs on the CPU, where lanes are threads: it
shows that places change and that the table is made, and its times mean nothing.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from pipedejavu.hybrid import HybridAdamW
from pipedejavu.hybrid.placement import Place, Placement, assigned_placement, estimate_placement
from pipedejavu.hybrid.step_time import StepTimes

GB = 10**9
SHAPES = {
    "llama-1.3b": (2048, 24, 16, 5504, 32000),
    "gpt-medium": (1024, 24, 16, 4096, 32000),
    "tiny": (64, 4, 4, 128, 256),
}
"""Hidden size, layers, heads, width of the feed-forward part, vocabulary."""
TOKENS = {"llama-1.3b": (8, 1024), "gpt-medium": (8, 1024), "tiny": (2, 16)}
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
"""Budgets: what all state on the host takes of the GPU, and these shares of what all state on the GPU takes beyond."""
WARM_UP = 6
LIMIT = 0.02
FINALISTS = 2
"""Placements of the sweep that are timed again beside the chosen one."""


def build(name: str, device: torch.device) -> Any:
    """Returns a Llama of transformers in bf16 with random weights and its own checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, width, vocabulary = SHAPES[name]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=width, vocab_size=vocabulary, max_position_embeddings=TOKENS[name][1], use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Run:
    """A model that trains under placements which change between its steps."""

    def __init__(self, name: str, device: torch.device, budget: int | None, warm_up: int = WARM_UP):
        self.device, self.name = device, name
        self.model = build(name, device)
        self.optimizer = HybridAdamW(
            self.model, lr=1e-4, clip_norm=1.0, speculate=False, head_chunks=1, gpu_budget=budget or "auto"
        )
        self.generator = torch.Generator().manual_seed(1)
        self.train(warm_up)
        self.placer = self.optimizer.scheduler.placer
        assert self.optimizer.plan is not None
        self.chosen: Placement = self.optimizer.plan
        self.times: StepTimes | None = self.measure_times()

    def measure_times(self) -> StepTimes | None:
        """Returns what a step takes by unit, by which its placement is estimated; None without a GPU."""
        if self.device.type != "cuda":
            return None
        self.synchronize()
        self.placer.begin_timing()
        self.train(1, ends=False)
        return self.placer.end_timing()

    def train(self, steps: int, *, ends: bool = True) -> None:
        """Runs steps; the optimizer's own timing is left to it unless `ends` is False."""
        optimizer, tune = self.optimizer, self.optimizer.scheduler.tune
        for _ in range(steps):
            tokens = torch.randint(0, SHAPES[self.name][4], TOKENS[self.name], generator=self.generator)
            tokens = tokens.to(self.device)
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.scheduler.tune = tune if ends else (lambda: None)  # type: ignore[method-assign]
            optimizer.step()
            self.optimizer.scheduler.tune = tune  # type: ignore[method-assign]
            optimizer.zero_grad()

    def synchronize(self) -> None:
        self.optimizer.synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def change_to(self, plan: Placement) -> None:
        """Moves state to the places of a plan, with moments deferred as far as that pays."""
        self.synchronize()
        self.placer.change_to(plan)
        self.placer.defer_moments(self.times)
        self.train(1, ends=False)  # the first step after a change fills the pipeline of copies

    def time(self, steps: int) -> float:
        """Returns the seconds of a step, over steps that reach into each other."""
        self.synchronize()
        began = time.perf_counter()
        self.train(steps, ends=False)
        self.synchronize()
        return (time.perf_counter() - began) / steps

    def close(self) -> None:
        self.optimizer.close()
        del self.optimizer, self.model, self.placer
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def places_of(units: int, on_gpu: int, streamed: int) -> list[Place]:
    """Returns the first units on the GPU, the next ones streamed and the rest on the host."""
    return [*["gpu"] * on_gpu, *["visit"] * streamed, *["host"] * (units - on_gpu - streamed)]  # type: ignore[list-item]


def sweep(run: Run) -> dict[str, Placement]:
    """Returns placements within the budget of the chosen one: fewer units on the GPU, and other streamed parts."""
    sizes, limits = run.optimizer.scheduler.model_state.sizes, run.placer.limits()
    begin = max((forward.peak_bytes for forward in run.placer.meter.forwards[:2]), default=0)
    count, found = len(sizes), dict[str, Placement]()
    most = run.chosen.places.count("gpu")
    for on_gpu in sorted({most, max(0, most - 2)}):
        rest = count - on_gpu
        for streamed in sorted({round(share * rest) for share in (0, 0.3, 0.5, 0.6, 0.75)}):
            places = places_of(count, on_gpu, streamed)
            plan = assigned_placement(sizes, run.placer._intervals, limits, places, count, begin)
            if plan.gpu_bytes <= limits.gpu_bytes and plan.host_bytes <= limits.host_bytes:
                needed = min(2, streamed) * max(
                    (sizes[n].streamed_bytes for n in range(on_gpu, on_gpu + streamed)), default=0
                )
                arrived = sum(sizes[n].streamed_bytes for due in plan.arrivals.values() for n in due)
                if arrived >= needed:
                    found[f"{on_gpu}+{streamed}"] = replace(plan, reasons=())
    return found


def compare(run: Run, label: str, steps: int, turns: int) -> tuple[float, str]:
    """Times the chosen placement and a sweep in turns; returns the chosen over the best, and a row."""
    plans = {"chosen": run.chosen} | sweep(run)
    names = shortlist(run, plans)
    times: dict[str, list[float]] = {name: [] for name in names}

    def turn(of: Sequence[str]) -> None:
        for name in of:
            run.change_to(plans[name])
            times[name].append(run.time(steps))

    turn(names)
    for _ in range(turns - 1):
        nearest = sorted(names[1:], key=lambda name: min(times[name]))[:FINALISTS]
        turn(["chosen", *nearest])
        turn([*reversed(nearest), "chosen"])
    typical = {name: median(each) for name, each in times.items()}
    repeated = [name for name in names if len(times[name]) == max(map(len, times.values()))]
    best = min(repeated, key=lambda name: typical[name])
    ratio = typical["chosen"] / typical[best]
    places = run.chosen.places
    mine = f"{places.count('gpu')}+{places.count('visit')}+{places.count('host') + places.count('lean')}"
    others = " · ".join(f"{name}: {1e3 * typical[name]:.0f}" for name in names if name != "chosen")
    estimate = estimate_placement(run.chosen, run.optimizer.scheduler.model_state.sizes, run.times)
    return (
        ratio,
        f"| {label} | {mine} | {1e3 * typical['chosen']:.0f} | {1e3 * estimate:.0f} | {ratio:.3f} | {others} |",
    )


def shortlist(run: Run, plans: dict[str, Placement], most: int = 6) -> list[str]:
    """Returns the chosen placement, and of the others those with the most even spread over the sweep."""
    others = [name for name in plans if name != "chosen" and plans[name].places != run.chosen.places]
    step = max(1.0, len(others) / most)
    return ["chosen", *(others[int(n * step)] for n in range(min(most, len(others))))]


def budgets(name: str, device: torch.device) -> list[int | None]:
    """Returns the budgets: between the needs of all state on the host, and of all state on the GPU."""
    if device.type != "cuda":
        return [None]
    run = Run(name, device, None, warm_up=1)
    sizes, intervals = run.optimizer.scheduler.model_state.sizes, run.placer._intervals
    limits = run.placer.limits()
    needs = []
    for on_gpu in (0, len(sizes)):
        plan = assigned_placement(sizes, intervals, limits, places_of(len(sizes), on_gpu, 0), 1, 0)
        needs.append(limits.budget_for(plan.gpu_bytes))
    run.close()
    least = 1.02 * needs[0]
    return [round(least + share * (needs[1] - least)) for share in SHARES]


def main(report: Callable[[str], None] = print, arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["llama-1.3b", "gpt-medium"])
    parser.add_argument("--steps", type=int, default=3, help="timed steps per turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args(arguments)
    if not options.quick and not torch.cuda.is_available():
        raise SystemExit("bench/placement.py needs a GPU; --quick runs a tiny model on the CPU")
    device = torch.device("cpu" if options.quick else "cuda")
    ratios = []
    for name in ["tiny"] if options.quick else options.models:
        report(f"\n{name}, {TOKENS[name][0]} × {TOKENS[name][1]} tokens, {device}, ms per step")
        report("| budget | chosen: on the GPU + streamed + on the host | chosen | estimated | chosen / best | others |")
        report("|---|---|---|---|---|---|")
        for budget in budgets(name, device):
            run = Run(name, device, budget)
            label = "auto" if budget is None else f"{budget / GB:.1f} GB"
            ratio, row = compare(run, label, options.steps, options.turns)
            ratios.append(ratio)
            report(row)
            run.close()
    within = sum(ratio <= 1 + LIMIT for ratio in ratios)
    report(f"within {LIMIT:.0%} of the best: {within} of {len(ratios)}; the furthest is {max(ratios):.3f} × the best")
    return ratios


if __name__ == "__main__":
    main()
