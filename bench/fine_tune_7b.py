"""Full fine-tuning of Qwen2.5-7B's shape within hard caps of one GPU and its host: python bench/fine_tune_7b.py

The weights are random and made on the spot. Every phase says when it begins, so that a run that is cut off shows where
it was. The run ends after `--steps` or `--seconds`, whichever comes first. Beside the memory that was measured stands
what the optimizer foresaw before its first update; beside the step, its simulation from the times of its units, and
what bounds it.
"""

import argparse
import os
import resource
import statistics
import threading
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
GB = 10**9
SHAPES = {
    "qwen-7b": (3584, 28, 28, 4, 18944, 152064),
    "tiny": (64, 3, 4, 2, 192, 512),
}
"""Hidden size, layers, heads, key-value heads, width of the feed-forward part, vocabulary; the head is not tied."""
STATE_BYTES = 12
"""Per parameter in host memory: gradient, low half of the master, two moments; without a copy of the weights."""
UPDATE_BYTES = 26
"""Per parameter that an update reads and writes there."""
HOST_RATE, LINK_RATE, FLOPS = 150e9, 50e9, 450e12
"""Bytes per second of the host's DRAM and of PCIe, and operations per second, as measured on an H200 with 16 cores."""

WARM_UP, RECORDED = 5, 3
"""Steps that are not timed, as the fourth is used to order the updates; and steps recorded after the others."""


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen-7b")
    parser.add_argument("--gpu-gb", type=float, default=24.5, help="hard cap of the GPU")
    parser.add_argument("--host-gb", type=float, default=100.0, help="cap of the process's resident memory")
    parser.add_argument("--process-gb", type=float, default=6.0, help="part of it for Python, torch and CUDA")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=140.0, help="no step begins after this")
    parser.add_argument("--moments", default="fp32", choices=("fp32", "bf16", "int8"))
    parser.add_argument("--no-warm", action="store_true", help="map host memory only when the optimizer places state")
    options = parser.parse_args()
    threading.Thread(target=watch_memory, args=(options.host_gb,), daemon=True).start()
    budget = int((options.host_gb - options.process_gb) * GB)
    count = num_parameters(options.shape)
    say(f"{options.shape}: {count / 1e9:.2f}B parameters; {resident_gb():.1f} GB resident")
    if not options.no_warm:
        from pipedejavu import warm_host_memory

        warm_host_memory(min(budget, int(warm_share(options.moments) * count)))
        say("host memory is being mapped in the background; importing torch")
    import torch

    say(f"torch {torch.__version__}; importing transformers")
    model, device = build(options.shape, options.gpu_gb, options.context)
    train(model, device, options, budget, count)


def warm_share(moments: str) -> float:
    """Returns the bytes per parameter that lie on the host at least."""
    return STATE_BYTES - {"fp32": 0, "bf16": 4, "int8": 6}[moments]


def num_parameters(shape: str) -> int:
    hidden, layers, heads, kv_heads, width, vocabulary = SHAPES[shape]
    kv = hidden // heads * kv_heads
    block = 2 * hidden * hidden + hidden + 2 * (hidden * kv + kv) + 3 * hidden * width + 2 * hidden
    return layers * block + 2 * vocabulary * hidden + hidden


def build(shape: str, gpu_gb: float, context: int) -> tuple[Any, Any]:
    """Builds the model where it computes; the cap holds from the first byte on."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from pipedejavu import build_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(gpu_gb * GB / torch.cuda.get_device_properties(0).total_memory)
    hidden, layers, heads, kv_heads, width, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=width, vocab_size=vocabulary, tie_word_embeddings=False, use_cache=False,
        max_position_embeddings=context, attn_implementation="sdpa",
    )  # fmt: skip
    say(f"building the model on {device}")
    model = build_model(lambda: Qwen2ForCausalLM(config), device=device, dtype=torch.bfloat16, seed=0).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert sum(p.numel() for p in model.parameters()) == num_parameters(shape)
    return model, device


def train(model: Any, device: Any, options: argparse.Namespace, budget: int, count: int) -> None:
    """Trains, prints each step and the table, and records the last steps."""
    import torch

    from pipedejavu import HybridAdamW
    from pipedejavu.optim.native import library

    if library() is None:
        raise SystemExit("optim/_native.so is not there, without which updates on the host take ten times as long")
    say(f"built, {resident_gb():.1f} GB resident, {gpu_gb()[1]:.1f} GB of the GPU; making the optimizer")
    optimizer = HybridAdamW(
        model, lr=1e-5, clip_norm=1.0, host_budget=budget, window=None, device=device, moments=options.moments
    )
    say("first step: forward, backward, placing the state, update")
    vocabulary, draws = SHAPES[options.shape][5], torch.Generator().manual_seed(1)
    times: list[float] = []

    def step() -> None:
        ids = torch.randint(0, vocabulary, (options.batch, options.context), generator=draws).to(device)
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        value = loss.item()
        forward_s = time.perf_counter() - began
        loss.backward()
        synchronize(device)
        backward_s = time.perf_counter() - began - forward_s
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        say(
            f"step {len(times)}: {times[-1]:.3f} s (forward with the wait for weights {forward_s:.3f}, backward"
            f" {backward_s:.3f}), loss {value:.4f}, {resident_gb():.1f} GB resident"
        )

    while len(times) < options.steps and time.perf_counter() - STARTED < options.seconds:
        step()
        if len(times) == 1:
            assert optimizer.plan is not None
            say("; ".join(optimizer.plan.reasons))
    optimizer.synchronize()
    print_table(optimizer.plan, times, options, count)
    if time.perf_counter() - STARTED < options.seconds:
        review(optimizer, step)
    optimizer.close()
    say("done")


def review(optimizer: Any, step: Any) -> None:
    """Prints three recorded steps beside the simulation of their program."""
    from pipedejavu.hybrid_report import read_run
    from pipedejavu.hybrid_report import review as compare_with_program

    recorder = optimizer.record()
    for _ in range(RECORDED):
        step()
    optimizer.synchronize()
    print(compare_with_program(read_run(optimizer, recorder.finish())), flush=True)


def print_table(plan: Any, times: list[float], options: argparse.Namespace, count: int) -> None:
    """Prints what was foreseen, or bounds it, and what was measured."""
    allocated, reserved = gpu_gb()
    tokens = options.batch * options.context
    step_s = statistics.median(times[WARM_UP:] or times[-1:])
    products_s, update_s = 8 * count * tokens / FLOPS, UPDATE_BYTES * count / HOST_RATE
    copies_s = 2 * 2 * count / LINK_RATE  # gradients and the weights for the update one way, new weights the other
    bound_s = max(products_s, copies_s, update_s)
    say(f"{options.shape}, {options.batch}×{options.context} tokens, {options.moments} moments: {step_s:.3f} s a step,")
    print(f"  {tokens / step_s:,.0f} tokens per second, {8 * count * tokens / step_s / 1e12:.0f} TFLOP/s (8Nt)")
    resident = plan.host_bytes / GB + options.process_gb
    rows = (
        ("s per step, its bound", f"{bound_s:.2f}", f"{step_s:.2f}"),
        ("GPU allocated, GB", f"{plan.gpu_bytes / GB:.1f}", f"{allocated:.1f}"),
        ("GPU reserved, GB", f"{plan.reserved_bytes / GB:.1f}", f"{reserved:.1f} of {options.gpu_gb:.1f}"),
        ("resident at most, GB", f"{resident:.1f}", f"{peak_gb():.1f} of {options.host_gb:.1f}"),
    )
    print(f"  {'':24}{'forecast':>10}{'measured':>16}")
    for name, forecast, measured in rows:
        print(f"  {name:24}{forecast:>10}{measured:>16}")
    bounds = f"products {products_s:.2f} s, updates on the host {update_s:.2f} s, copies {copies_s:.2f} s"
    print(f"  {bounds}; steps {', '.join(f'{t:.2f}' for t in times)}", flush=True)


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def gpu_gb() -> tuple[float, float]:
    """Returns the peaks of allocated and reserved memory."""
    import torch

    if not torch.cuda.is_available():
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated() / GB, torch.cuda.max_memory_reserved() / GB


def status_gb(field: str) -> float:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field)) * 1024 / GB


def resident_gb() -> float:
    return status_gb("VmRSS")


def peak_gb() -> float:
    return status_gb("VmHWM")


def watch_memory(host_gb: float) -> None:
    """Ends the process if it takes more of the host than its cap."""
    while True:
        if resident_gb() > host_gb:
            say(f"{resident_gb():.1f} GB are resident, more than the cap of {host_gb} GB")
            os._exit(1)
        time.sleep(0.2)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
