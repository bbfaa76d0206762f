"""Sets estimated training throughput of language models beside published figures; nothing is run.

    python bench/published_runs.py [ROWS.csv]

The rows are of data-parallel runs in bf16 (weights sharded over the GPUs by FSDP, whose traffic is taken to overlap).
`mpt` are the tables of mosaicml/llm-foundry (scripts/train/benchmarking/README.md; eager kernels, flash attention),
`tinyllama` is the README of jzhang38/TinyLlama (fused norms, SwiGLU, rotary embedding and cross-entropy), `fms-fsdp` is
that of foundation-model-stack/fms-fsdp (eager kernels, flash attention). No constant of the estimate is fitted to these
rows: efficiencies come from operators of an H200. A ratio above 1 is an estimate that is too slow. "Before" is the mix
of bf16 rates with float32 bytes and unfused kernels.
"""

import csv
import math
import sys
from itertools import chain
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.facts import read_machine
from pipedejavu.plan import Precision
from pipedejavu.profile import UnitSample, estimate_units, known_efficiencies, make_meta_model, make_mode, read_rates
from pipedejavu.zoo.gpt import Gpt
from pipedejavu.zoo.gpt_profile import EFFICIENCY
from pipedejavu.zoo.transformer import TransformerSize

BF16 = Precision(compute="bf16", masters="fp32")
"""Autocast with float32 weights, as the published runs have it."""


class LlamaBlock(nn.Module):
    """Norms without a mean, rotary positions, heads that share keys and values, and a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, groups: int, inner: int):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        key, value = self.key_value(y).unflatten(-1, (2 * self.groups, self.size)).transpose(1, 2).chunk(2, 1)
        query = self.query(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        query, key = self.turned(query), self.turned(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.ones(x.shape[2], self.size, dtype=x.dtype)
        low, high = x.chunk(2, -1)
        return x * angle + torch.cat((-high, low), -1) * angle


class LlamaHead(nn.Module):
    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.norm, self.logit = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logit(self.norm(x))


def units_of(row: dict[str, str]) -> list[tuple[str, nn.Module]]:
    """Returns the units of a model without memory."""
    layers, width, vocabulary, context = (int(row[k]) for k in ("layers", "width", "vocabulary", "context"))
    if row["source"] == "mpt":
        size = TransformerSize(
            layers=layers, width=width, heads=int(row["heads"]), vocabulary=vocabulary, context=context, is_tied=True
        )
        return list(Gpt(size, device="meta").units())
    heads, groups = map(int, row["heads"].split("/"))
    with torch.device("meta"):
        blocks = [(f"block{n}", LlamaBlock(width, heads, groups, int(row["inner"]))) for n in range(layers)]
        return [("embedding", nn.Embedding(vocabulary, width)), *blocks, ("head", LlamaHead(width, vocabulary))]


def tokens_per_s(row: dict[str, str], precision: Precision, *, is_fused: bool) -> float:
    """Returns the estimated throughput of one GPU."""
    machine, samples = read_machine(row["device"]), int(row["microbatch"])
    units, mode = units_of(row), make_mode()
    for _, module in units:
        make_meta_model(module, mode)
    with mode:
        tokens = torch.zeros(samples, int(row["context"]), dtype=torch.int64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    compute = "bf16"  # the machine's rate, which is that of 16 bits, also for the mix that estimates had before
    rates = read_rates(machine, known_efficiencies(), EFFICIENCY, compute)
    sample = UnitSample(units, tokens, tokens, loss)
    profile = estimate_units(row["model"], [sample], (), rates, lambda _: None, precision, is_fused=is_fused)
    times = [next(time for kind, time in unit.times.items() if not kind.startswith("cpu")) for unit in profile.units]
    pass_s = sum(time.forward.at(samples) + time.backward.at(samples) for time in times)
    if row["recompute"] == "1":
        pass_s += sum(time.recompute.at(samples) for time in times[1:-1])
    update_s = sum(time.update_s for time in times) / int(row["gpus"])
    steps = int(row["accumulation"])
    return samples * int(row["context"]) * steps / (steps * pass_s + update_s)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_suffix(".csv"))
    print("| run | published tokens/s | ratio before | ratio |\n|---|---|---|---|")
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in csv.DictReader(Path(path).read_text().splitlines()):
        published = float(row["tokens_per_s_per_gpu"])
        before = published / tokens_per_s(row, Precision(), is_fused=False)
        now = published / tokens_per_s(row, BF16, is_fused=row["is_fused"] == "1")
        name = f"{row['source']} {row['model']}, {row['context']} tokens, {row['device']}"
        print(f"| {name} | {published:,.0f} | {before:.2f} | {now:.2f} |", flush=True)
        errors.setdefault(f"{row['source']}, {row['device']}", []).append((before, now))
    print()
    errors["all"] = list(chain.from_iterable(errors.values()))
    for name, pairs in errors.items():
        old, new = (mean(abs(1 - pair[n]) for pair in pairs) for n in (0, 1))
        bias = math.exp(mean(math.log(pair[1]) for pair in pairs))
        print(f"{name}: mean error {new:.1%} of {len(pairs)} rows, {old:.1%} before; ratio {bias:.2f} on average")


if __name__ == "__main__":
    main()
