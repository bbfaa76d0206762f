"""HybridAdamW within hard caps of GPU memory: python bench/caps.py --model qwen-3b --cap-gb 24 16.

Each cap is a process of its own, whose allocator may reserve no more than the cap
(`torch.cuda.set_per_process_memory_fraction`). Models of transformers, unmodified, from their configurations, with
random bf16 weights that are built in their place; AdamW with clipping to 1.0, float32 moments.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GB = 10**9
COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "use_cache": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                  "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen-3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
                "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen-3b")
    parser.add_argument("--cap-gb", type=float, nargs="+", default=[24.0, 16.0], help="0 for no cap")
    parser.add_argument("--batch", default="4x2048")
    parser.add_argument("--steps", type=int, default=6, help="steps that are timed, after 4 to warm up")
    parser.add_argument("--rests-on", choices=("cuda", "cpu"), default="cuda", help="where the model is built")
    parser.add_argument("--window", default="auto", help="blocks on the GPU at a time, or auto")
    parser.add_argument("--activations", choices=("model", "keep", "recompute", "offload"), default="model",
                        help="model: its own checkpointing")  # fmt: skip
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train(options)))
        return
    print(f"{options.model}, {options.batch} tokens a step")
    for cap in options.cap_gb:
        arguments = [*sys.argv[1:], "--one", "--cap-gb", str(cap)]
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode or not last.startswith("{"):
            print(f"cap {cap:g} GB: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
            continue
        result = json.loads(last)
        print(
            f"cap {cap:g} GB: {result['step_s']:.3f} s a step, GPU {result['allocated_gb']:.1f} GB allocated,"
            f" {result['reserved_gb']:.1f} reserved, host {result['host_gb']:.1f} GB; built in"
            f" {result['build_s']:.1f} s, first step {result['first_s']:.1f} s after the start;"
            f" loss {result['loss']:.3f}", flush=True,
        )  # fmt: skip
        print(*(f"  {line}" for line in (*result["reasons"], *result["shortages"])), sep="\n", flush=True)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains one model within one cap; returns its figures."""
    began = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from pipedejavu import HybridAdamW, build_model

    (cap,) = options.cap_gb
    if cap:
        torch.cuda.set_per_process_memory_fraction(cap * GB / torch.cuda.mem_get_info()[1])
    config = Qwen2Config(**COMMON, **MODELS[options.model])
    start = time.perf_counter()
    model = build_model(
        lambda: AutoModelForCausalLM.from_config(config), device=options.rests_on, dtype=torch.bfloat16, seed=0
    )
    model.train()
    torch.cuda.synchronize()
    build_s = time.perf_counter() - start
    activations = options.activations
    if activations == "model":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        activations = "keep"
    window = "auto" if options.window == "auto" else int(options.window)
    optimizer = HybridAdamW(
        model, lr=1e-5, clip_norm=1.0, device="cuda", window=window, activations=activations
    )  # within the cap, as by default
    batch, length = map(int, options.batch.split("x"))
    generator = torch.Generator("cuda").manual_seed(0)
    loss, first_s = torch.zeros(()), 0.0
    for step in range(4 + options.steps):
        if step == 4:
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(0, config.vocab_size, (batch, length), device="cuda", generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            torch.cuda.synchronize()
            first_s = time.perf_counter() - began
    optimizer.synchronize()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - start) / options.steps
    assert optimizer.plan is not None
    return {
        "step_s": step_s, "build_s": build_s, "first_s": first_s, "loss": loss.item(),
        "allocated_gb": torch.cuda.max_memory_allocated() / GB, "reserved_gb": torch.cuda.max_memory_reserved() / GB,
        "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB,
        "reasons": optimizer.plan.reasons, "shortages": optimizer.shortages,
    }  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    main()
