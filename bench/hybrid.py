"""The hybrid optimizer and its peers, side by side on one GPU: python bench/hybrid.py [--cases 1.3b,7b,…] [--steps N].

Llama-shaped models in bf16, full recompute, AdamW. Every contender trains in a process of its own, one after the
other; the table sets each beside the first of its case. Peers that are not installed or do not fit say so.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "125m": (768, 12, 12, 2048),
    "1.3b": (2048, 24, 16, 5504),
    "7b": (4096, 32, 32, 11008),
    "13b": (5120, 40, 40, 13824),
    "18b": (6144, 39, 48, 16512),
}
"""Hidden size, layers, heads, and width of the feed-forward part."""
GB = 10**9
PCIE, DRAM = 55 * GB, 170 * GB
"""Bytes a second of the reference machine: PCIe in each direction, and its DRAM as updates and copies share it."""
TRAFFIC = {"gpu": (0, 0, 0), "visit": (10, 10, 20), "host": (2, 2, 32), "lean": (2, 4, 32), "window": (4, 2, 34)}
"""By place: the bytes that a parameter moves in each step to the GPU, from the GPU, and in DRAM."""
HYBRID = {"clip_norm": 1.0}
CASES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "1.3b": [
        ("all on the GPU", "gpu", {}),
        ("hybrid, all state on the CPU", "hybrid", {**HYBRID, "gpu_units": 0}),
        ("  without guesses", "hybrid", {**HYBRID, "gpu_units": 0, "speculate": False}),
        ("  without clipping", "hybrid", {"gpu_units": 0}),
        ("  where no step needs clipping", "hybrid", {"clip_norm": 1e9, "gpu_units": 0}),
        ("hybrid, 16 GB", "hybrid", {**HYBRID, "gpu_budget": 16 * GB}),
        ("hybrid, 20 GB", "hybrid", {**HYBRID, "gpu_budget": 20 * GB}),
        ("hybrid, window of 2 blocks", "hybrid", {**HYBRID, "window": 2}),
        ("torchao, gradients offloaded", "torchao", {}),
        ("DeepSpeed ZeRO-2 offload", "zero-2", {}),
        ("DeepSpeed ZeRO-3 offload", "zero-3", {}),
        ("FSDP2 CPU offload", "fsdp", {}),
    ],
    "7b": [
        ("all on the GPU, bf16 state", "gpu-bf16", {}),
        ("hybrid, uncapped", "hybrid", HYBRID),
        ("hybrid, 80 GB", "hybrid", {**HYBRID, "gpu_budget": 80 * GB}),
        ("hybrid, 40 GB", "hybrid", {**HYBRID, "gpu_budget": 40 * GB}),
        ("hybrid, 13 GB, window of 2 blocks", "hybrid", {**HYBRID, "gpu_budget": 13 * GB, "window": 2}),
        ("torchao, gradients offloaded", "torchao", {}),
        ("DeepSpeed ZeRO-3 offload", "zero-3", {}),
        ("FSDP2 CPU offload", "fsdp", {}),
    ],
    "13b": [("hybrid, uncapped", "hybrid", HYBRID)],
    "18b": [("hybrid, uncapped", "hybrid", HYBRID)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="1.3b,7b,13b,18b")
    parser.add_argument("--only", default="", help="words that a contender's name must have one of, by comma")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed, after 5 to warm up")
    parser.add_argument("--batch", default="8x2048")
    parser.add_argument("--timeout", type=int, default=240)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--review", type=Path, help="results of --out to set beside the simulator's prediction")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train_one(**json.loads(options.one))
        return
    if options.review:
        review_results(json.loads(options.review.read_text()))
        return
    results, flop_per_s = [], None
    for case in options.cases.split(","):
        first: dict[str, Any] | None = None
        for title, method, settings in CASES[case]:
            if options.only and not any(word in title for word in options.only.split(",")):
                continue
            batch, sequence = map(int, options.batch.split("x"))
            order = {
                "method": method, "size": case, "batch": batch, "sequence": sequence, "steps": options.steps,
                "settings": settings,
            }  # fmt: skip
            found = run_one(order, options.timeout)
            first = first or found
            if method.startswith("gpu") and "tflops" in found:
                flop_per_s = found["tflops"] * 1e12
            if flop_per_s and "run" in found:
                found["limits"] = limits(found, batch * sequence, flop_per_s)
            results.append({"title": title, **order, **found})
            print(line(title, found, first), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))


def review_results(results: list[dict[str, Any]]) -> None:
    """Prints what the simulator says of each recorded run."""
    from pipedejavu.facts import InputError
    from pipedejavu.hybrid_report import HybridRun, occupancy_of, review

    for found in results:
        if "run" in found:
            print(f"\n{found['size']}, {found['title'].strip()}")
            try:
                run = HybridRun.from_json(json.dumps({**found["run"], "spans": found["spans"]}))
                print(review(run), occupancy_of(run), sep="\n")
            except InputError as error:
                print(error)


def run_one(order: dict[str, Any], timeout: int) -> dict[str, Any]:
    """Trains one contender in a process of its own; returns what it measured, or why it did not."""
    command = [sys.executable, __file__, "--one", json.dumps(order)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired as stopped:
        text = stopped.stderr or b""
        return {
            "failed": f"no result in {timeout} s",
            "tail": (text.decode() if isinstance(text, bytes) else text)[-800:],
        }
    for row in done.stdout.splitlines():
        if row.startswith("RESULT "):
            return {**json.loads(row.removeprefix("RESULT ")), "wall_s": round(time.perf_counter() - started)}
    reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return {"failed": reason[:300], "tail": done.stderr[-2500:]}


def line(title: str, found: dict[str, Any], first: dict[str, Any]) -> str:
    """Returns a row of the table."""
    if "failed" in found:
        return f"{title:34} {found['failed']}"
    ratio = first["step_s"] / found["step_s"] if "step_s" in first else float("nan")
    row = (
        f"{title:34} {found['step_s']:7.3f} s/step  {ratio:5.2f} of the first  {found['tflops']:5.0f} TFLOP/s"
        f"  GPU {found['gpu_gb']:6.1f} GB  host {found['host_gb']:6.1f} GB  ready in {found['ready_s']:4.0f} s"
    )
    if "limits" in found:
        name, least = max(found["limits"].items(), key=lambda item: item[1])
        row += f"  {least / found['step_s']:.2f} of the limit, {least:.3f} s by {name}"
    if "why" in found:
        row += f"\n{'':34} {found['why']}"
    return row


def limits(found: dict[str, Any], tokens: int, flop_per_s: float) -> dict[str, float]:
    """Returns the least seconds of a step by each resource, where the GPU computes as fast as with all state on it."""
    moved = [0.0, 0.0, 0.0]
    for unit in found["run"]["units"]:
        place = "window" if found["run"]["window"] is not None and unit["place"] == "host" else unit["place"]
        moved = [total + each * unit["num_parameters"] for total, each in zip(moved, TRAFFIC[place], strict=True)]
    to_gpu, from_gpu, dram = moved
    gpu_s = 8 * found["parameters"] * tokens / flop_per_s
    return {"GPU": gpu_s, "PCIe": max(to_gpu, from_gpu) / PCIE, "DRAM": dram / DRAM}


def lane_use(run: Any) -> dict[str, Any]:
    """Returns what a recording says of the lanes: how busy they are, what is hidden, and what bounds a step."""
    from pipedejavu.facts import InputError
    from pipedejavu.hybrid_report import occupancy_of

    try:
        found = occupancy_of(run)
    except InputError as error:
        return {"why": str(error)}
    return {"busy": found.busy, "bounds": found.bounds, "hidden": found.hidden, "why": str(found)}


def train_one(method: str, size: str, batch: int, sequence: int, steps: int, settings: dict[str, Any]) -> None:
    """Trains a model and prints what was measured."""
    import torch

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    started = time.perf_counter()
    model, step, extra = CONTENDERS[method](build(size, sequence, "cpu" if method == "fsdp" else "cuda"), settings)
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    generator = torch.Generator().manual_seed(1)
    times, losses, norms = [], [], []
    warm_up, recorded = 5, 4 if extra is not None else 0
    for n in range(warm_up + steps + recorded):
        tokens = torch.randint(0, 32000, (batch, sequence), generator=generator).cuda()
        if n == warm_up:
            gc.collect()
            gc.freeze()  # for everyone: a collection of all that was imported would take as long as half a step
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        if n == warm_up + steps:
            torch.cuda.synchronize()  # once, at the end: work may reach from one step into the next
            typical = (time.perf_counter() - began) / steps
            recorder = extra.record()
        losses.append(step(tokens))
        times.append(time.perf_counter())
        norms.append(getattr(extra, "norm", 0.0))
    torch.cuda.synchronize()
    if not recorded:
        typical = (time.perf_counter() - began) / steps
    peak = next(int(row.split()[1]) for row in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in row)
    result = {
        "parameters": num_parameters,
        "step_s": round(typical, 4),
        "tflops": 8 * num_parameters * batch * sequence / typical / 1e12,
        "gpu_gb": torch.cuda.max_memory_allocated() / GB,
        "host_gb": peak * 1024 / GB,
        "ready_s": times[0] - started,
        "losses": [round(float(loss), 4) for loss in losses],
        "times": [round(after - before, 3) for before, after in zip([started, *times], times, strict=False)],
    }
    if extra is not None:
        from pipedejavu.hybrid_report import read_run

        extra.synchronize()
        spans = recorder.finish()
        result |= lane_use(read_run(extra, spans))
        result["spans"] = [(a, b, round(c, 5), round(d, 5)) for a, b, c, d in spans]
        result["run"] = read_run(extra, spans).model_dump(exclude={"spans"})
        result["plan"] = list(extra.plan.reasons)
        result["forecast_gb"] = extra.plan.gpu_bytes / GB, extra.plan.host_bytes / GB
        result["norms"] = [round(norm, 3) for norm in norms]
    print("RESULT", json.dumps(result), flush=True)
    os._exit(0)


def build(size: str, sequence: int, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, width = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=width, vocab_size=32000, max_position_embeddings=sequence, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def on_gpu(model: Any, settings: dict[str, Any]) -> Any:  # noqa: ARG001
    """Everything on the GPU: float32 masters and moments."""
    import torch

    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step(tokens: Any) -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        parameters = list(model.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.data.copy_(master)
            master.grad = None
        return loss.detach()

    return model, step, None


def on_gpu_bf16(model: Any, settings: dict[str, Any]) -> Any:  # noqa: ARG001
    """Everything on the GPU with bf16 moments and no masters: less exact, and an upper bound of speed."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, plain_step(model, optimizer, 1.0), None


def hybrid(model: Any, settings: dict[str, Any]) -> Any:
    from pipedejavu.hybrid import HybridAdamW

    optimizer = HybridAdamW(model, lr=1e-4, **settings)
    return model, plain_step(model, optimizer, None), optimizer


def torchao(model: Any, settings: dict[str, Any]) -> Any:  # noqa: ARG001
    """CPUOffloadOptimizer: bf16 moments on the host, no clipping."""
    import torch
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True)
    return model, plain_step(model, optimizer, None), None


def zero(stage: int) -> Any:
    def contender(model: Any, settings: dict[str, Any]) -> Any:  # noqa: ARG001
        import deepspeed

        place = {"device": "cpu", "pin_memory": True}
        zero_config: dict[str, Any] = {"stage": stage, "offload_optimizer": place, "overlap_comm": True}
        if stage == 3:
            zero_config["offload_param"] = place
        config = {
            "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_optimization": zero_config,
            "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "steps_per_print": 10**9,
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

        def step(tokens: Any) -> Any:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return model, step, None

    return contender


def fsdp(model: Any, settings: dict[str, Any]) -> Any:  # noqa: ARG001
    """FSDP2 with CPUOffloadPolicy and float32 masters on the host."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(0)
    offload = CPUOffloadPolicy(pin_memory=True)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, offload_policy=offload, mp_policy=precision)
    fully_shard(model, offload_policy=offload, mp_policy=precision)
    for buffer in model.buffers():
        buffer.data = buffer.data.cuda()
    return model, plain_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), 1.0), None


def plain_step(model: Any, optimizer: Any, clip_norm: float | None) -> Any:
    import torch

    def step(tokens: Any) -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


CONTENDERS: dict[str, Any] = {
    "gpu": on_gpu, "gpu-bf16": on_gpu_bf16, "hybrid": hybrid, "torchao": torchao,
    "zero-2": zero(2), "zero-3": zero(3), "fsdp": fsdp,
}  # fmt: skip

if __name__ == "__main__":
    main()
