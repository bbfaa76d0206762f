"""`train` and `Trainer` beside the loops that a user would write, on one GPU: python bench/train_gpu.py [--cases …].

Each contender trains in a process of its own. The contenders of a case take turns, `--rounds` times, and the table sets
the median of each beside the first. A cap limits what the process may take from the GPU, as a smaller card would; peers
that are not installed, or do not fit, say so.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GB = 10**9
QWEN = {
    "qwen-3b": (2048, 36, 16, 2, 11008, 151936, True),
    "qwen-7b": (3584, 28, 28, 4, 18944, 152064, False),
}
"""Hidden size, layers, heads, key-value heads, width of the feed-forward part, vocabulary, tied embeddings."""
BATCHES = {"gpt-small": (32, 1024), "gpt-1.3b": (8, 2048), "qwen-3b": (4, 2048), "qwen-7b": (4, 2048)}
CASES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "gpt-small": [
        ("loop, bf16 autocast, compiled", "loop", {"is_compiled": True}),
        ("loop, bf16 autocast", "loop", {}),
        ("train --plan auto", "train", {}),
        ("train --plan auto --compile on", "train", {"mode": "on"}),
        ("train --compile on --deterministic", "train", {"mode": "on", "more": ["--deterministic"]}),
        ("Trainer, plan auto", "trainer", {}),
        ("Trainer, plan auto, compile=True", "trainer", {"compile": True}),
    ],
    "gpt-1.3b": [
        ("loop, bf16 autocast, compiled", "loop", {"is_compiled": True}),
        ("loop, bf16 autocast", "loop", {}),
        ("train --plan auto", "train", {}),
        ("train --plan auto --compile on", "train", {"mode": "on"}),
        ("train --compile on --deterministic", "train", {"mode": "on", "more": ["--deterministic"]}),
        ("Trainer, plan auto", "trainer", {}),
        ("Trainer, plan auto, compile=True", "trainer", {"compile": True}),
    ],
    "qwen-3b": [
        ("HybridAdamW in a loop", "hybrid", {}),
        ("Trainer", "trainer", {}),
        ("HybridAdamW in a loop, 24 GB", "hybrid", {"cap_gb": 24}),
        ("Trainer, 24 GB", "trainer", {"cap_gb": 24}),
        ("torchao, 24 GB", "torchao", {"cap_gb": 24}),
        ("DeepSpeed ZeRO-2 offload", "zero-2", {}),
        ("HybridAdamW in a loop, 16 GB", "hybrid", {"cap_gb": 16}),
        ("Trainer, 16 GB", "trainer", {"cap_gb": 16}),
    ],
    "qwen-7b": [
        ("torchao, bf16 moments, 1×2048", "torchao", {"cap_gb": 24.5, "batch": 1}),
        ("HybridAdamW, 1×2048", "hybrid", {"cap_gb": 24.5, "batch": 1, "host_gb": 100}),
        (
            "HybridAdamW, bf16 moments, 1×2048",
            "hybrid",
            {"cap_gb": 24.5, "batch": 1, "host_gb": 100, "moments": "bf16"},
        ),
        ("HybridAdamW, 4×2048", "hybrid", {"cap_gb": 24.5, "host_gb": 100}),
        ("HybridAdamW, int8 moments, 4×2048", "hybrid", {"cap_gb": 24.5, "host_gb": 100, "moments": "int8"}),
        ("Trainer, 4×2048", "trainer", {"cap_gb": 24.5}),
    ],
}
WARM_UP = 4
"""Steps that are not timed."""

Step = Callable[[Any], Any]
Forecast = Callable[[], dict[str, Any]]
"""Returns what was forecast; nothing by contenders that forecast nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--only", default="", help="words of which a contender's title must have one, by comma")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each contender")
    parser.add_argument("--timeout", type=int, default=200, help="seconds per contender and turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT", json.dumps(train_one(**json.loads(options.one))), flush=True)
        os._exit(0)  # peers leave threads and process groups behind
    results = {}
    for case in options.cases.split(","):
        contenders = [row for row in CASES[case] if any(word in row[0] for word in options.only.split(","))]
        turns: dict[str, list[dict[str, Any]]] = {title: [] for title, _, _ in contenders}
        for _ in range(options.rounds):
            for title, method, settings in contenders:
                setup = {"case": case, "method": method, "steps": options.steps, "settings": settings}
                turn = run_one(setup, options.timeout)
                turns[title].append(turn)
                done = f"{turn['step_s']:.4f} s, start {turn.get('phases')}" if "step_s" in turn else said(turn)
                print(f"{case}, {title}, {turn['wall_s']:.0f} s: {done}", file=sys.stderr, flush=True)
        print_case(case, turns)
        results[case] = turns
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))


def run_one(setup: dict[str, Any], timeout_s: int) -> dict[str, Any]:
    """Trains one contender in a process of its own; returns what it measured, or why it failed."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--one", json.dumps(setup)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # each process says where it was
        try:
            _, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # a process that pins memory, or waits for the GPU, ends late
            os.killpg(process.pid, signal.SIGKILL)
            err = "no end after a signal"
        return {"failed": f"no result in {timeout_s} s", "tail": err[-20000:], "wall_s": time.perf_counter() - started}
    for row in out.splitlines():
        if row.startswith("RESULT "):
            return {**json.loads(row.removeprefix("RESULT ")), "wall_s": time.perf_counter() - started}
    reason = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return {"failed": reason[:400], "tail": err[-20000:], "wall_s": time.perf_counter() - started}


def said(turn: dict[str, Any]) -> str:
    """Returns why a contender failed, with the last that it said."""
    return f"{turn['failed']}\n{turn['tail'][-3000:]}"


def print_case(case: str, turns: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the medians of a case, each with its ratio to the first contender's speed per token."""
    print(f"\n{case}, {'×'.join(map(str, BATCHES[case]))} tokens", flush=True)
    first_rate = None
    for title, all_turns in turns.items():
        done = [turn for turn in all_turns if "step_s" in turn]
        if not done:
            print(f"  {title:34} {all_turns[-1]['failed']}", flush=True)
            continue
        step_s = statistics.median(turn["step_s"] for turn in done)
        rate = done[0]["tokens"] / step_s
        first_rate = first_rate or rate
        spread = "" if len(done) == 1 else " (" + ", ".join(f"{turn['step_s']:.4f}" for turn in done) + ")"
        memory = max(turn["gpu_gb"] for turn in done), max(turn["reserved_gb"] for turn in done)
        firsts = ", ".join(f"{turn['first_s']:.0f}" for turn in done)
        print(
            f"  {title:34} {step_s:8.4f} s{spread}  {rate / first_rate:5.2f} of the first  {rate:9,.0f} tokens/s"
            f"  GPU {memory[0]:5.1f} / {memory[1]:5.1f} GB  host {max(t['host_gb'] for t in done):5.1f} GB"
            f"  first update after {firsts} s",
            flush=True,
        )
        print_forecast(done[-1], step_s, memory[1])
        for n, turn in enumerate(done):
            if phases := turn.get("phases"):
                parts = ", ".join(f"{name} {time_s:.1f}" for name, time_s in phases.items())
                print(f"    start of turn {n + 1}: {parts} s", flush=True)


def print_forecast(turn: dict[str, Any], step_s: float, reserved_gb: float) -> None:
    """Prints the forecast of a step and of reserved memory, and how far each is off."""
    if not turn.get("forecast_s"):
        return
    text = f"    forecast {turn['forecast_s']:.4f} s per step, {turn['forecast_s'] / step_s - 1:+.1%}"
    if turn.get("forecast_reserved_gb") and reserved_gb:
        text += (
            f"; {turn['forecast_reserved_gb']:.2f} GB reserved, {turn['forecast_reserved_gb'] / reserved_gb - 1:+.1%}"
        )
    print(text, flush=True)


def train_one(case: str, method: str, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains one contender and returns its seconds per step and its peaks of memory."""
    batch, sequence = settings.pop("batch", BATCHES[case][0]), BATCHES[case][1]
    tokens = batch * sequence
    if method == "train":
        return {"tokens": tokens, **train_by_command(case, batch, steps, **settings)}
    import torch

    started = time.perf_counter()
    if cap_gb := settings.pop("cap_gb", None):
        torch.cuda.set_per_process_memory_fraction(cap_gb * GB / torch.cuda.get_device_properties(0).total_memory)
    model = build(case, sequence)
    step, forecast = CONTENDERS[method](model, case, **settings)
    vocabulary = QWEN[case][5] if case in QWEN else 256
    generator, times = torch.Generator().manual_seed(1), []
    for n in range(WARM_UP + steps):
        ids = torch.randint(0, vocabulary, (batch, sequence), generator=generator).cuda()
        loss = step(ids)
        if n == 0:
            torch.cuda.synchronize()
            first_s = time.perf_counter() - started
        if n == WARM_UP - 1:
            gc.collect()
            gc.freeze()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()  # those of measurements, and of a first step that allocates
            times.append(time.perf_counter())
    torch.cuda.synchronize()
    return {
        "tokens": tokens,
        "step_s": (time.perf_counter() - times[0]) / steps,
        "first_s": first_s,
        **forecast(),
        "loss": float(loss),
        "gpu_gb": torch.cuda.max_memory_allocated() / GB,
        "reserved_gb": torch.cuda.max_memory_reserved() / GB,
        "host_gb": host_peak_gb(),
    }


def train_by_command(
    case: str, batch: int, steps: int, *, mode: str = "auto", more: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs `pipedejavu train`; its metrics say when each update was made."""
    with tempfile.TemporaryDirectory() as folder:
        run, started = Path(folder) / "run", time.time()
        total = WARM_UP + 50 * steps  # so many repay compiling
        command = [sys.executable, "-m", "pipedejavu", "train", f"zoo:{case}", "--plan", "auto", "--json"]
        command += ["--compile", mode, "--batch", str(batch), "--steps", str(total), "--clip-norm", "1"]
        command += ["--checkpoint-every", "0", *more, "--run-dir", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"exit {done.returncode}: {done.stderr[-3000:]}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(done.stdout)
    elapsed = [row["elapsed_s"] for row in rows if "elapsed_s" in row]
    starts = [row["start"] for row in rows if "start" in row]
    print(done.stderr, file=sys.stderr)
    return {
        "step_s": statistics.median(b - a for a, b in zip(elapsed[WARM_UP:], elapsed[WARM_UP + 1 :], strict=False)),
        "first_s": sum(phases.pop("total") for phases in starts),
        "phases": {name: time_s for phases in starts for name, time_s in phases.items()},
        "command_s": time.time() - started,
        "forecast_s": summary["expected_s"],
        "forecast_reserved_gb": summary["predicted_reserved_bytes"] / GB,
        "loss": summary["last_loss"],
        "gpu_gb": max(row.get("peak_gpu_bytes", 0) for row in rows) / GB,
        "reserved_gb": max(row.get("peak_reserved_bytes", 0) for row in rows) / GB,
        "host_gb": max(row.get("peak_bytes", 0) for row in rows) / GB,
        "said": done.stderr,
    }


def build(case: str, sequence: int) -> Any:
    """Returns a GPT of the zoo in float32, or a Qwen2 of transformers in bf16, with random weights on the GPU."""
    import torch

    if case not in QWEN:
        from pipedejavu.zoo.gpt import SIZES, Gpt

        return Gpt(SIZES[case], device="cuda").train()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, layers, heads, kv_heads, width, vocabulary, is_tied = QWEN[case]
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=width, vocab_size=vocabulary, tie_word_embeddings=is_tied, use_cache=False,
        max_position_embeddings=sequence, attn_implementation="sdpa",
    )  # fmt: skip
    from pipedejavu import build_model

    return build_model(lambda: Qwen2ForCausalLM(config), device="cuda", dtype=torch.bfloat16, seed=0).train()


def loss_of(model: Any, case: str, ids: Any) -> Any:
    """Returns the mean loss of the next token."""
    from torch.nn.functional import cross_entropy

    if case in QWEN:
        return model(input_ids=ids, labels=ids).loss
    return cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def loop(model: Any, case: str, *, is_compiled: bool = False) -> tuple[Step, Forecast]:
    """The loop that a user would write: autocast, fused AdamW, clipping."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    run = torch.compile(model) if is_compiled else model

    def step(ids: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(run, case, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, dict


def plain_step(model: Any, case: str, optimizer: Any) -> Step:
    """Returns a step whose optimizer clips, or does not."""

    def step(ids: Any) -> Any:
        loss = loss_of(model, case, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def hybrid(model: Any, case: str, host_gb: float | None = None, **options: Any) -> tuple[Step, Forecast]:
    """HybridAdamW in a plain loop; the model checkpoints its own layers."""
    from pipedejavu import HybridAdamW

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    host_budget = "auto" if host_gb is None else int(host_gb * GB)
    optimizer = HybridAdamW(model, lr=1e-4, clip_norm=1.0, device="cuda", host_budget=host_budget, **options)
    return plain_step(model, case, optimizer), dict


def trainer(model: Any, case: str, **options: Any) -> tuple[Step, Forecast]:
    """The Trainer with everything chosen by it."""
    import torch
    from torch.nn.functional import cross_entropy

    from pipedejavu import Trainer
    from pipedejavu.facts.start_phase import START

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    loss = None if case in QWEN else lambda output, ids: cross_entropy(output.flatten(0, 1), ids.flatten())
    trains = Trainer(model, optimizer, loss=loss, plan="auto", clip_norm=1.0, **options)

    def step(ids: Any) -> Any:
        return trains.step({"input_ids": ids, "labels": ids} if case in QWEN else (ids, ids))

    def forecast() -> dict[str, Any]:
        prediction = trains.predict()
        reserved = max(worker.reserved_bytes or 0 for worker in prediction.workers)
        phases = {name: round(time_s, 3) for name, time_s in START.seconds.items()}
        return {"forecast_s": prediction.chance.mean_s, "forecast_reserved_gb": reserved / GB, "phases": phases}

    return step, forecast


def torchao(model: Any, case: str) -> tuple[Step, Forecast]:
    """CPUOffloadOptimizer of torchao: bf16 moments on the host, no clipping."""
    import torch
    from torchao.optim import CPUOffloadOptimizer

    model.cuda().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True)
    return plain_step(model, case, optimizer), dict


def zero_2(model: Any, case: str) -> tuple[Step, Forecast]:
    """DeepSpeed ZeRO-2 with its optimizer on the host."""
    import deepspeed

    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(environment | {"LOCAL_RANK": "0"})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": BATCHES[case][0], "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": offload, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: Any) -> Any:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, dict


CONTENDERS: dict[str, Callable[..., tuple[Step, Forecast]]] = {
    "loop": loop,
    "hybrid": hybrid,
    "trainer": trainer,
    "torchao": torchao,
    "zero-2": zero_2,
}


def host_peak_gb() -> float:
    """Returns the peak of resident memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in status if "VmHWM" in row) * 1024 / GB


if __name__ == "__main__":
    main()
