"""Trainer.step beside HybridAdamW in a plain loop, taking turns in one process: python bench/one_gpu.py --model …

Both train the same transformers model with random weights in bf16, built on the GPU, with the same units recomputed and
as many units' state on the GPU. Without a GPU it only shows that it runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from pipedejavu.facts import Device, Host, Link, Machine
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.plan import Keep, preset
from pipedejavu.profile.model_cut import cut_model
from pipedejavu.session import Trainer

GB = 10**9
SHAPES = {
    "qwen-3b": (2048, 36, 16, 2, 11008, 151936),
    "gpt-125m": (768, 12, 12, 12, 3072, 50304),
    "tiny": (64, 3, 4, 2, 128, 256),
}
"""Hidden size, layers, heads, key-value heads, width of the feed-forward part, vocabulary; embeddings are tied."""
TOKENS = {"qwen-3b": (4, 2048), "gpt-125m": (32, 1024), "tiny": (2, 16)}
WARM_UP = 5
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
Step = Callable[[torch.Tensor], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="qwen-3b")
    parser.add_argument("--budget-gb", type=float, help="bytes of the GPU for each contender, in GB; all if left out")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = None if options.budget_gb is None else int(options.budget_gb * GB)
    contenders: dict[str, tuple[Step, list[float]]] = {}
    memory: dict[str, tuple[float, float]] = {}
    places: list[str] = []
    generator = torch.Generator().manual_seed(1)
    for name in ("HybridAdamW in a loop", "Trainer.step"):
        before = gpu_bytes(device)
        if name == "Trainer.step":
            step = trainer(build(options.model, device), options, device, budget, places)
        else:
            step, optimizer = plain(build(options.model, device), options, budget)
        reset_peak(device)
        for _ in range(WARM_UP):
            step(tokens(options.model, generator, device))
        if name != "Trainer.step":
            assert optimizer.plan is not None
            places = list(optimizer.plan.places)
            print(f"{name}: {'; '.join(optimizer.plan.reasons)}")
        contenders[name] = step, []
        allocated, reserved = gpu_peaks(device)
        memory[name] = (allocated - before[0]) / GB, (reserved - before[1]) / GB
    for _ in range(options.turns):
        for step, times in contenders.values():
            step(tokens(options.model, generator, device))
            synchronize(device)
            started = time.perf_counter()
            for _ in range(options.steps):
                step(tokens(options.model, generator, device))
            synchronize(device)
            times.append((time.perf_counter() - started) / options.steps)
    first = statistics.median(contenders["HybridAdamW in a loop"][1])
    for name, (_, times) in contenders.items():
        every = ", ".join(f"{t:.4f}" for t in times)
        print(
            f"{name:24} {statistics.median(times):.4f} s per step ({every})  {first / statistics.median(times):.3f} of"
            f" the loop's speed  GPU {memory[name][0]:.1f} GB allocated, {memory[name][1]:.1f} GB reserved"
        )


def plain(model: Any, options: Any, budget: int | None) -> tuple[Step, HybridAdamW]:
    """HybridAdamW as a user would write it."""
    optimizer = HybridAdamW(
        model, **SETTINGS, gpu_budget=budget or "auto", activations="keep" if options.no_recompute else "recompute"
    )

    def step(ids: torch.Tensor) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step, optimizer


def trainer(model: Any, options: Any, device: torch.device, budget: int | None, places: list[str]) -> Step:
    """A Trainer under a plan with the placement of the plain loop: as many units with their state on the GPU."""
    ids = tokens(options.model, torch.Generator().manual_seed(0), device)
    sample = {"input_ids": ids, "labels": ids}
    count = len(cut_model(model, {"input_ids": ids}).units)
    share = places.count("gpu") / len(places)
    keep = Keep() if share == 1 else Keep(kind="split", device_pieces=round(share * count))
    plan = preset("cotrain").at(microbatches=1)
    order = plan.order if options.no_recompute else plan.order.replace(recompute_units=tuple(range(count - 1)))
    trains = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), **SETTINGS),
        sample=sample,
        plan=plan.replace(keep=keep, order=order),
        machine=machine_of(device, budget),
        check_model=False,
        compile="off",
    )
    print(f"Trainer.step: {count} units, run by {type(trains.threads.workers[0]).__name__}, keep {keep}")
    return lambda ids: trains.step({"input_ids": ids, "labels": ids})


def build(name: str, device: torch.device) -> Any:
    """Returns a Qwen2 of transformers in bf16 with random weights, made on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, layers, heads, kv_heads, width, vocabulary = SHAPES[name]
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=width, vocab_size=vocabulary, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=TOKENS[name][1], attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.train()


def tokens(name: str, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Returns a batch of random tokens."""
    return torch.randint(0, SHAPES[name][5], TOKENS[name], generator=generator).to(device)


def machine_of(device: torch.device, budget: int | None) -> Machine:
    """Returns one GPU with the budget as its memory, and its host."""
    most = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else 2**36
    return Machine(
        name="one GPU",
        hosts=(Host(name="host"),),
        devices=(
            Device(name="gpu", kind="gpu", type="gpu", host="host", memory_bytes=budget or most),
            Device(name="cpu", kind="cpu", type="cpu", host="host", memory_bytes=2**37),
        ),
        links=(Link(bytes_per_s=50e9),),
    )


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def gpu_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that are allocated and reserved now."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def gpu_peaks(device: torch.device) -> tuple[int, int]:
    """Returns the most bytes that were allocated and reserved."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def reset_peak(device: torch.device) -> None:
    """Begins to measure peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
