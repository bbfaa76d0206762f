"""The forecast beside real steps on one GPU: the part of forecast.py that needs one, or a CPU that stands in for it.

A model is a chain of units, built on the device with random weights. Its units are measured one by one, the machine by
`probe` and by the hybrid optimizer's own passes; from these alone every case is forecast: where HybridAdamW will put
state under a budget, how long a step takes, how much the allocator holds. Then the case runs in a plain loop.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pipedejavu.analysis import verify
from pipedejavu.engine import AdamW
from pipedejavu.facts import Cost, Device, Host, InputError, Link, Machine, Profile, Timeline, Unit, UnitTime
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.hybrid.gradient_bucket import GradientBucket
from pipedejavu.hybrid.model_unit import find_units
from pipedejavu.hybrid.placement import Limits, MemoryInterval, Placement, UnitSize, choose_placement
from pipedejavu.optim.arithmetic import AdamState, scalars_of
from pipedejavu.optim.gpu_update import UnitUpdate, addresses_of
from pipedejavu.optim.native import HostUpdate, NativeTask
from pipedejavu.plan import Keep, Reduce, preset
from pipedejavu.planner.unit_update import updates_of
from pipedejavu.profile import UnitSample, measure_profile
from pipedejavu.profile.operator_count import count_step
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import work_out_needs
from pipedejavu.runtime.recompute import Recompute
from pipedejavu.simulate import Prediction, simulate
from pipedejavu.zoo import build
from pipedejavu.zoo.loss import cross_entropy

CLIP, WARM_UP, TIMED, REPEATS, COPIES, HOST_STEPS = 1.0, 4, 4, 3, 20, 4
ANY = 2**60
NORMED = 2**22
"""Parameters of one gradient of which a norm is taken."""
WARM_S, TIMED_S = 1.0, 0.5
"""Steps run for so long at least: a GPU that works for a while is slower."""
STEPS, ROUNDS = 3, 3
"""Updates of a program; forecasts, each with the copies of the one before."""
BUDGETS = (0.7, 0.35, 0.05)
"""Of the state that leaves the GPU last: how much of it the budget holds beside weights and activations."""


@dataclass(frozen=True)
class Model:
    family: str
    options: dict[str, Any]
    batch: int
    dtype: torch.dtype = torch.bfloat16
    budgets: tuple[float, ...] = BUDGETS


def _gpt(layers: int, width: int, context: int, vocabulary: int = 50304) -> dict[str, Any]:
    return {"layers": layers, "width": width, "context": context, "vocabulary": vocabulary}


def _llama(layers: int, width: int, inside: int, heads: int, context: int) -> dict[str, Any]:
    return {"layers": layers, "width": width, "inside": inside, "heads": heads, "context": context}


MODELS = {
    "gpt-125m": Model("gpt-small", _gpt(12, 768, 1024), 16),
    "llama-125m": Model("llama", _llama(12, 768, 2048, 12, 1024), 16),
    "vgg19": Model("vgg19", {}, 512, torch.float32),
    "bert-large": Model("bert-large", {"vocabulary": 30522, "context": 512}, 32),
    "vit-l": Model("vit", {"layers": 24, "width": 1024, "heads": 16, "side": 224, "patch": 16}, 64),
    "llama-1.3b": Model("llama", _llama(24, 2048, 5504, 16, 2048), 4),
    "gpt-1.3b": Model("gpt-small", _gpt(24, 2048, 2048), 4),
    "llama-6.7b": Model("llama", _llama(32, 4096, 11008, 32, 2048), 2, budgets=(0.7, 0.35)),
    "gpt-6.7b": Model("gpt-small", _gpt(32, 4096, 2048), 2, budgets=(0.7, 0.35)),
}
"""In the order in which they run: those that take seconds first."""
TINY = {
    "gpt-125m": Model("gpt-small", _gpt(3, 32, 16, 64), 2),
    "llama-125m": Model("llama", _llama(3, 32, 64, 2, 16), 2),
    "vgg19": Model("vgg-small", {}, 4, torch.float32),
    "bert-large": Model("bert-tiny", {"vocabulary": 64, "context": 16, "width": 32}, 2),
    "vit-l": Model("vit", {"layers": 2, "width": 32, "heads": 2, "side": 32, "patch": 16}, 2),
}


class LlamaStart(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class LlamaBlock(nn.Module):
    """A layer of transformers' Llama with its own positions, so that one tensor passes from block to block.

    All have one index, which only a cache would ask for: blocks are alike then, and measured once.
    """

    def __init__(self, config: Any):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        found = self.layer(hidden, position_embeddings=self.rotary(hidden, positions))
        return found[0] if isinstance(found, tuple) else found


class LlamaEnd(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.norm = LlamaRMSNorm(config.hidden_size)
        self.logit = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logit(self.norm(hidden))


class VitBlock(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        from transformers.models.vit.modeling_vit import ViTLayer

        self.layer = ViTLayer(config)

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.layer(hidden)
        return found[0] if isinstance(found, tuple) else found


class VitEnd(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.norm, self.logit = nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logit(self.norm(hidden)[:, 0])


def make(model: Model, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Builds a model on a device, and a batch for it."""
    torch.manual_seed(0)
    o = model.options
    if model.family == "llama":
        from transformers import LlamaConfig

        config = LlamaConfig(
            hidden_size=o["width"], num_hidden_layers=o["layers"], num_attention_heads=o["heads"], vocab_size=32000,
            num_key_value_heads=o["heads"], intermediate_size=o["inside"], max_position_embeddings=o["context"],
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        with device:
            torch.set_default_dtype(model.dtype)
            blocks = [LlamaBlock(config) for _ in range(o["layers"])]
            made: nn.Module = nn.Sequential(LlamaStart(config), *blocks, LlamaEnd(config))
    elif model.family == "vit":
        from transformers import ViTConfig
        from transformers.models.vit.modeling_vit import ViTEmbeddings

        config = ViTConfig(
            hidden_size=o["width"], num_hidden_layers=o["layers"], num_attention_heads=o["heads"],
            intermediate_size=4 * o["width"], image_size=o["side"], patch_size=o["patch"], num_labels=1000,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        with device:
            torch.set_default_dtype(model.dtype)
            made = nn.Sequential(ViTEmbeddings(config), *(VitBlock(config) for _ in range(o["layers"])), VitEnd(config))
    else:
        made = build(model.family, device="meta", data="random", **o).model.to(model.dtype).to_empty(device=device)
    torch.set_default_dtype(torch.float32)
    fill(made)
    inputs, targets = batch_of(model, device)
    return made.train(), inputs, targets


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Gives weights values of a usual size; none of the times depend on them."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()


def batch_of(model: Model, device: torch.device, samples: int | None = None) -> tuple[Tensor, Tensor]:
    o, n = model.options, samples or model.batch
    if model.family == "vit" or model.family.startswith("vgg"):
        side, classes = o.get("side", 32), 1000 if model.family == "vit" else 10
        images = torch.randn(n, 3, side, side, device=device).to(model.dtype)
        return images, torch.randint(0, classes, (n,), device=device)
    vocabulary = o.get("vocabulary", 32000)
    tokens = torch.randint(0, vocabulary, (n, o["context"]), device=device)
    return tokens, tokens.clone()


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output, targets)


def units_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_children())


def measure_units(
    name: str, made: nn.Module, inputs: Tensor, targets: Tensor, kind: str, recomputes: bool = False
) -> Profile:
    units = units_of(made)
    if recomputes:
        blocks = {unit.module for unit in find_units(made) if unit.is_block}
        units = [(n, Block(module, inputs.device) if module in blocks else module) for n, module in units]
    unit_sample = UnitSample(units, inputs, targets, loss_of)
    return measure_profile(name, [unit_sample], (), {kind: inputs.device}, updates_of(AdamW(lr=1e-5)))


class Block(nn.Module):
    """A unit; one that is recomputed as the hybrid optimizer does it, where a device is given."""

    def __init__(self, inside: nn.Module, device: torch.device | None = None):
        super().__init__()
        self.inside, self._run = inside, inside.forward if device is None else Recompute(inside, inside.forward, device)

    def forward(self, value: Tensor) -> Tensor:
        return self._run(value)


def with_recompute(profile: Profile, again: Profile) -> Profile:
    """Returns the profile with the forwards and recomputes of units that were measured with both in their backwards."""
    units = []
    for unit, other in zip(profile.units, again.units, strict=True):
        times = {}
        for kind, without in unit.times.items():
            with_it = other.times[kind]
            more_s = with_it.backward.per_sample_s - without.backward.per_sample_s
            issue_s = with_it.backward.issue_s - without.backward.issue_s
            recompute = Cost(per_sample_s=max(0.0, more_s), issue_s=max(0.0, issue_s))
            times[kind] = without.replace(forward=with_it.forward, recompute=recompute)
        units.append(unit.replace(times=times))
    return profile.replace(units=tuple(units))


def measure_facts(folder: Path, device: torch.device) -> dict[str, Any]:
    """Measures the machine once, and keeps it in a file."""
    path = folder / "facts.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    folder.mkdir(parents=True, exist_ok=True)
    started, library_bytes = time.perf_counter(), _library_bytes(device)
    if device.type == "cuda":
        from pipedejavu.probe.survey import measure_machine

        machine = measure_machine(folder, quick=True)
    else:
        machine = _stand_in()
    rates = _update_rates(device)
    found = {"machine": json.loads(machine.to_json()), **rates, "library_bytes": library_bytes}
    path.write_text(json.dumps(found, indent=1))
    print(f"machine measured in {time.perf_counter() - started:.0f} s: {rates}", flush=True)
    return found


def _stand_in() -> Machine:
    return Machine(
        name="stand-in", hosts=(Host(name="h"),),
        devices=(
            Device(name="cpu", kind="cpu", type="cpu", host="h", memory_bytes=2**34),
            Device(name="gpu0", kind="gpu", type="gpu", host="h", memory_bytes=2**34),
        ),
        links=(Link(bytes_per_s=5e9),),
    )  # fmt: skip


def _library_bytes(device: torch.device) -> int:
    """Returns what libraries keep of the allocator once matrices were multiplied."""
    if device.type != "cuda":
        return 0
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(256, 256, device=device, dtype=dtype)
        layer(torch.randn(64, 256, device=device, dtype=dtype, requires_grad=True)).sum().backward()
        del layer
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()  # nothing of ours is there by now


def _update_rates(device: torch.device) -> dict[str, float]:
    """Returns parameters a second of the GPU's kernel, of the host's pass alone and beside copies, and their rates."""
    count = 2**27 if device.type == "cuda" else 2**16
    scalars = scalars_of(1, 1e-4, (0.9, 0.999), 1e-8, 0.01, 1.0)

    def state(where: torch.device) -> tuple[Tensor, AdamState]:
        kinds = (torch.bfloat16, torch.bfloat16, torch.int16, torch.float32, torch.float32)
        pinned = where.type == "cpu" and device.type == "cuda"
        gradient, *others = (torch.zeros(count, dtype=k, device=where, pin_memory=pinned) for k in kinds)
        return gradient, AdamState(*others)

    def rate(act: Callable[[], None]) -> float:
        act()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(REPEATS):
            act()
        synchronize(device)
        return REPEATS * count / (time.perf_counter() - start)

    gradient, own = state(torch.device("cpu"))
    host = HostUpdate()
    alone = rate(lambda: host([NativeTask(scalars, gradient, own, own)]))
    names = ("gpu", "norm", "host_alone", "host")
    found = {f"{name}_parameters_per_s": alone for name in names}
    if device.type == "cuda":
        gradients, there = state(device)
        update = UnitUpdate([there.weight], [addresses_of(there)]).prepare([scalars], [gradients])
        found["gpu_parameters_per_s"] = rate(lambda: update(1.0))
        parts = gradients.split(NORMED)
        found["norm_parameters_per_s"] = rate(lambda: torch._foreach_norm(parts, 2, torch.float32))
        del gradients, there, update
        found |= _together(lambda: host([NativeTask(scalars, gradient, own, own)]), count, own.m, device)
    host.close()
    return {**found, "is_native": host.is_native, **_host_times(device)}


def _together(update: Callable[[], None], count: int, host: Tensor, device: torch.device) -> dict[str, float]:
    """Returns the rates of the host's pass and of copies in both directions, all at once."""
    there = torch.empty_like(host, device=device)
    back = torch.empty_like(host, pin_memory=True)
    marks, updates = {}, 0
    for way, target, source in (("in", there, host), ("out", back, there)):
        with torch.cuda.stream(torch.cuda.Stream()):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)
            end.record()
        marks[way] = begin, end
    start = time.perf_counter()
    while not all(end.query() for _, end in marks.values()):
        update()
        updates += 1
    found = {"host_parameters_per_s": updates * count / (time.perf_counter() - start)}
    for way, (begin, end) in marks.items():
        found[f"{way}_bytes_per_s"] = 1e3 * COPIES * host.nbytes / begin.elapsed_time(end)
    return found


def _host_times(device: torch.device) -> dict[str, float]:
    """Returns what each gradient, and each unit whose state is away, costs the host in a step, from a tiny model."""
    blocks = [Block(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))) for _ in range(16)]
    model = nn.Sequential(*blocks).to(device)
    passes_s, steps_s = [], []
    for gpu_units in ("none", None, 0):
        options = {"clip_norm": CLIP, "window": None, "speculate": False, "gpu_units": gpu_units}
        optimizer = None if gpu_units == "none" else HybridAdamW(model, **options)
        passes, steps = [], []
        for _ in range(20):
            start = time.perf_counter()
            model(torch.ones(4, 8, device=device)).sum().backward()
            synchronize(device)
            passes.append(time.perf_counter() - start)
            if optimizer:
                optimizer.step()
            model.zero_grad()
            synchronize(device)
            steps.append(time.perf_counter() - start)
        if optimizer:
            optimizer.close()
        passes_s.append(median(passes))
        steps_s.append(median(steps))
    return {
        "gradient_s": max(0.0, passes_s[1] - passes_s[0]) / sum(1 for _ in model.parameters()),
        "away_unit_s": max(0.0, steps_s[2] - steps_s[1]) / len(blocks),
    }


def measure_update(made: nn.Module, model: Model, device: torch.device) -> tuple[float, float]:
    """Returns what an update of the whole model costs the host before it waits for the norm, and then."""
    inputs, targets = batch_of(model, device, samples=1)
    optimizer = HybridAdamW(made, lr=1e-5, clip_norm=CLIP, gpu_budget=ANY, window=None, speculate=False)
    finish, waited, times = GradientBucket.finish, list[float](), list[tuple[float, float]]()

    def finish_and_note(bucket: GradientBucket) -> None:
        finish(bucket)
        waited.append(time.perf_counter())

    with patch.object(GradientBucket, "finish", finish_and_note):
        for _ in range(2 + HOST_STEPS):
            loss_of(made(inputs), targets).backward()
            synchronize(device)
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            times.append((waited[-1] - start, time.perf_counter() - waited[-1]))
    optimizer.close()
    del optimizer
    gc.collect()  # of a large model there is room for one state only
    before, behind = zip(*times[2:], strict=True)
    return median(before), median(behind)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sizes_of(profile: Profile, dtype: torch.dtype) -> list[UnitSize]:
    """Returns the units as the hybrid optimizer accounts for them."""
    is_split = dtype == torch.bfloat16
    found = []
    for unit in profile.units:
        n, weights = unit.num_parameters, unit.parameter_bytes
        state = n * (10 if is_split else 8)
        found.append(
            UnitSize(
                name=unit.name, num_parameters=n, weight_bytes=weights, gradient_bytes=weights, gpu_bytes=state,
                host_bytes=2 * weights + state, no_copy_bytes=weights + state, streamed_bytes=state,
                shadow_bytes=weights + state,
            )
        )  # fmt: skip
    return found


def stretches_of(profile: Profile, samples: int, recomputes: bool, more_bytes: int) -> list[MemoryInterval]:
    """Returns the most memory of each unit's backward beside weights, state and gradients of those behind it."""
    units, found = profile.units, []
    inputs = [0.0, *(u.boundary_bytes for u in units[:-1])]
    for n in reversed(range(len(units))):
        unit = units[n]
        kept = sum(inputs[:n]) if recomputes else sum(u.activation_bytes - u.shared_bytes for u in units[:n])
        own = max(inputs[n], unit.activation_bytes) if recomputes else unit.activation_bytes
        given = unit.boundary_bytes if n < len(units) - 1 else 0.0
        each = kept + own + given + unit.backward_work_bytes
        found.append(MemoryInterval(unit=n, peak_bytes=round(each * samples) + unit.gradient_bytes + more_bytes))
    return found


@dataclass(frozen=True)
class Setting:
    """What a forecast starts from."""

    profile: Profile
    again: Profile
    """With the times of units that are recomputed."""
    model: Model
    facts: dict[str, Any]
    update_s: tuple[float, float]
    """What an update costs the host before it waits for the norm, and then."""

    @property
    def machine(self) -> Machine:
        """As measured, but with room for everything."""
        found = Machine.from_json(json.dumps(self.facts["machine"]))
        return found.replace(devices=tuple(d.replace(memory_bytes=ANY, reserved_bytes=0) for d in found.devices))

    def predict(self, places: tuple[str, ...], visitors: int, recomputes: bool) -> tuple[Prediction, float]:
        """Returns the forecast of some steps, and for which part of the host's updates something is copied."""
        gpu = next(d for d in self.machine.devices if d.type == "gpu")
        plan = preset("cotrain").at(microbatches=1, samples=self.model.batch, steps=STEPS)
        plan = plan.replace(
            place=plan.place.replace(devices=(gpu.name,)),
            order=plan.order.replace(recompute=1.0 if recomputes else 0.0),
            reduce=Reduce(clip="global"),
            keep=Keep(kind="split", places=places, visitors=visitors),
        )
        share = 1.0
        for _ in range(ROUNDS):
            rates = rates_of(self.facts, share)
            profile = with_updates(self.again if recomputes else self.profile, rates, gpu)
            profile = with_issues(profile, places, gpu, self.facts, self.update_s)
            program = compile_plan(plan, profile, busy(self.machine, rates))
            prediction = simulate(program, verify(program))
            share = copying_share(prediction.timeline())
        return prediction, share


def forecast_case(setting: Setting, place: float | None, recomputes: bool) -> dict[str, Any]:
    """Forecasts a case: the budget, the placement, the time of a step and the memory that it takes."""
    profile, model, facts = setting.profile, setting.model, setting.facts
    prediction, share = setting.predict(("device",) * len(profile.units), 1, recomputes)
    (worker,) = prediction.workers
    assert worker.allocated_bytes is not None
    sizes = sizes_of(profile, model.dtype)
    intervals = stretches_of(profile, model.batch, recomputes, round(worker.allocated_bytes - worker.peak_bytes))
    begin = round(max(u.activation_bytes + u.boundary_bytes for u in profile.units[:2]) * model.batch)

    def placed(gpu_bytes: int, num_first: int | None = None) -> Placement:
        limits = Limits(gpu_bytes=gpu_bytes, host_bytes=ANY, keeps_gradients=True, num_first=num_first)
        return choose_placement(sizes, intervals, limits, begin)

    placement, budget = placed(ANY), None
    words = {"gpu": "device", "visit": "visit", "host": "host", "lean": "lean"}
    if place is not None:
        least = placed(ANY, 0).gpu_bytes
        budget = round(least + place * (placement.gpu_bytes - least))
        placement = placed(budget)
        visitors = max(1, sum(len(units) for units in placement.arrivals.values()))
        prediction, share = setting.predict(tuple(words[p] for p in placement.places), visitors, recomputes)
        (worker,) = prediction.workers
    assert worker.allocated_bytes is not None
    assert worker.reserved_bytes is not None
    begins = sorted(s.start_s for s in prediction.timeline().spans() if s.action.startswith("F0."))
    more = facts["library_bytes"]
    allocated = worker.allocated_bytes if place is None else placement.gpu_bytes
    return {
        "budget": budget,
        "places": {word: placement.places.count(word) for word in words},
        "step_s": begins[-1] - begins[-2],
        "copying_share": share,
        "live": worker.peak_bytes + more,
        "placed": placement.gpu_bytes + more,
        "allocated": allocated + more,
        "reserved": allocated * worker.reserved_bytes / worker.allocated_bytes + more,
    }


def rates_of(facts: dict[str, Any], share: float) -> dict[str, float]:
    """Returns the rates of updates and copies where copies run for a share of the host's updates."""
    alone, beside = facts["host_alone_parameters_per_s"], facts["host_parameters_per_s"]
    return {**facts, "host_parameters_per_s": 1 / (share / beside + (1 - share) / alone)}


def copying_share(timeline: Timeline) -> float:
    """Returns for which part of the host's updates something is copied; 1 where it has none."""
    spans = list(timeline.spans())
    copies = [(s.start_s, s.end_s) for s in spans if s.action.startswith(("FETCH", "OFFLOAD"))]
    updates = [(s.start_s, s.end_s) for s in spans if s.lane.startswith("host")]
    total_s = sum(end - start for start, end in updates)
    both_s = sum(overlap_s(update, copies) for update in updates)
    return both_s / total_s if total_s else 1.0


def overlap_s(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Returns for how long any of the others is under way within a span."""
    total_s, done = 0.0, span[0]
    for start, end in sorted(others):
        begin, end = max(start, done), min(end, span[1])
        if end > begin:
            total_s, done = total_s + end - begin, end
    return total_s


def busy(machine: Machine, rates: dict[str, Any]) -> Machine:
    """Returns the machine with the copies of its GPU as fast as they are beside each other and the host's pass."""
    found = {("cpu*", "gpu0"): rates.get("in_bytes_per_s"), ("gpu0", "cpu*"): rates.get("out_bytes_per_s")}
    links = [
        link.replace(bytes_per_s=found.get((link.source, link.target)) or link.bytes_per_s) for link in machine.links
    ]
    return machine.replace(links=tuple(links))


def with_updates(profile: Profile, facts: dict[str, Any], gpu: Device) -> Profile:
    """Returns the profile with updates, and norms behind backwards, at the rates that the hybrid optimizer reaches."""

    def changed(unit: Unit) -> Unit:
        norm = Cost(fixed_s=unit.num_parameters / facts["norm_parameters_per_s"])
        own = unit.times[gpu.kind]
        on_gpu = own.replace(
            backward=own.backward.plus(norm), update_s=unit.num_parameters / facts["gpu_parameters_per_s"]
        )
        on_host = UnitTime(update_s=unit.num_parameters / facts["host_parameters_per_s"])
        state = unit.num_parameters * (10 if unit.parameter_bytes < 4 * unit.num_parameters else 8)
        return unit.replace(times={gpu.kind: on_gpu, "cpu": on_host}, optimizer_bytes=state)

    return profile.replace(units=tuple(map(changed, profile.units)))


def with_issues(
    profile: Profile, places: tuple[str, ...], gpu: Device, facts: dict[str, Any], update_s: tuple[float, float]
) -> Profile:
    """Returns the profile with what the hybrid optimizer costs the host.

    In backwards it takes gradients, and in the last of them it prepares updates. They are launched before the first
    forward, and with them counts what units cost that are away: the lanes' threads hold the host up.
    """
    before_s, step_s = update_s
    step_s += facts["away_unit_s"] * sum(place != "device" for place in places)
    units = []
    for n, unit in enumerate(profile.units):
        own = unit.times[gpu.kind]
        forward = own.forward.replace(issue_s=own.forward.issue_s + (0.0 if n else step_s))
        taken_s = facts["gradient_s"] * len(unit.parameter_parts) + (0.0 if n else before_s)
        backward = own.backward.replace(issue_s=own.backward.issue_s + taken_s)
        units.append(unit.replace(times={**unit.times, gpu.kind: own.replace(forward=forward, backward=backward)}))
    return profile.replace(units=tuple(units))


def run_case(made: nn.Module, batch: tuple[Tensor, Tensor], budget: int | None, recomputes: bool) -> dict[str, Any]:
    """Trains a few steps; returns their time and memory."""
    device, (inputs, targets) = batch[0].device, batch
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    started = time.perf_counter()
    optimizer = HybridAdamW(
        made, lr=1e-5, clip_norm=CLIP, gpu_budget=budget or ANY, window=None,
        activations="recompute" if recomputes else "keep", speculate=False,
    )  # fmt: skip
    times = []
    try:
        n, num_warm, began = 0, 0, 0.0
        while not num_warm or n < num_warm + TIMED or time.perf_counter() - began < TIMED_S:
            if n == 2 and device.type == "cuda":
                torch.cuda.empty_cache()  # what only the first step took, before the state had its places
            if not num_warm and n >= WARM_UP and time.perf_counter() - started > WARM_S:
                num_warm = n
                gc.collect()
                synchronize(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
            before = time.perf_counter()
            (loss_of(made(inputs), targets) / len(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - before)
            if n == 0:
                ready_s = time.perf_counter() - started
            n += 1
        synchronize(device)
        found = {"step_s": (time.perf_counter() - began) / (n - num_warm), "times_s": times, "ready_s": ready_s}
        if device.type == "cuda":
            found["allocated"], found["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        plan = optimizer.plan
        assert plan is not None
        found["planned"] = plan.gpu_bytes
        found["places"] = {word: plan.places.count(word) for word in ("gpu", "visit", "host", "lean")}
        return found
    finally:
        optimizer.close()
        made.zero_grad()


def totals(profile: Profile, again: Profile) -> str:
    """Returns what passes of all units take the GPU, and in brackets the host."""
    shown = []
    for label, units, part in (
        ("forward", profile.units, "forward"),
        ("backward", profile.units, "backward"),
        ("forward of what is recomputed", again.units, "forward"),
        ("recompute", again.units, "recompute"),
    ):
        costs = [getattr(unit_time, part) for unit in units for unit_time in unit.times.values()]
        work, issue = sum(cost.per_sample_s for cost in costs), sum(cost.issue_s for cost in costs)
        shown.append(f"{label} {1e6 * work:.1f} us a sample ({1e3 * issue:.1f} ms)")
    return ", ".join(shown)


def run_model(name: str, folder: Path, is_tiny: bool, done: set[str]) -> None:
    """Forecasts and runs every case of a model that has not been run; each is written down as it ends."""
    device = torch.device("cpu" if is_tiny or not torch.cuda.is_available() else "cuda")
    if is_tiny:
        torch.set_num_threads(1)
    model = (TINY if is_tiny else MODELS)[name]
    facts = measure_facts(folder, device)
    gpu = next(d for d in facts["machine"]["devices"] if d["type"] == "gpu")
    started = time.perf_counter()
    made, inputs, targets = make(model, device)
    profile = measure_units(name, made, inputs, targets, gpu["kind"])
    again = with_recompute(profile, measure_units(name, made, inputs, targets, gpu["kind"], recomputes=True))
    profile.save(str(folder / f"{name}.profile.json"))
    again.save(str(folder / f"{name}.recompute.profile.json"))
    update_s = measure_update(made, model, device)
    count = sum(unit.num_parameters for unit in profile.units)
    took_s = time.perf_counter() - started
    print(
        f"{name}: {count / 1e6:.0f} M parameters, built and measured in {took_s:.0f} s; {totals(profile, again)}",
        flush=True,
    )
    setting = Setting(profile, again, model, facts, update_s)
    for recomputes in (True, False):
        for place in (None, *model.budgets):
            key = case_key(name, recomputes, place)
            if key in done:
                continue
            row: dict[str, Any] = {
                "case": key,
                "model": name,
                "recomputes": recomputes,
                "place": place,
                "update_s": update_s,
            }
            started = time.perf_counter()
            try:
                row["forecast"] = forecast_case(setting, place, recomputes)
                row["measured"] = run_case(made, (inputs, targets), row["forecast"]["budget"], recomputes)
            except (InputError, RuntimeError) as error:
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            row["wall_s"] = time.perf_counter() - started
            with (folder / "gpu.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(describe(row), flush=True)


def case_key(name: str, recomputes: bool, place: float | None) -> str:
    where = "all on the GPU" if place is None else f"{place:.0%} of the state"
    return f"{name}, {where}, {'recompute' if recomputes else 'keep'}"


def describe(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['case']:46} {row['failed']}  ({row['wall_s']:.0f} s)"
    ours, real = row["forecast"], row["measured"]
    text = f"{row['case']:46} {1e3 * ours['step_s']:9.2f} {1e3 * real['step_s']:9.2f} ms"
    for kind in ("allocated", "reserved"):
        if kind in real:
            text += f"  {kind} {ours[kind] / 1e9:7.2f} {real[kind] / 1e9:7.2f} GB"
    return f"{text}  ({row['wall_s']:.0f} s)"


EDGES = {"gpt-125m": 12e9, "vgg19": 4e9}
"""Bytes that the allocator may reserve, by model; in float32, with torch's own AdamW."""


def run_edge(name: str, folder: Path, is_tiny: bool) -> None:
    """Finds the largest batch that runs under a cap, by bisection, and the one that the forecast says."""
    device = torch.device("cpu" if is_tiny or not torch.cuda.is_available() else "cuda")
    model = replace((TINY if is_tiny else MODELS)[name], dtype=torch.float32)
    facts = measure_facts(folder, device)
    made, inputs, targets = make(model, device)
    profile = measure_units(name, made, inputs, targets, "it")
    need = work_out_needs(profile)[0]
    cap = EDGES[name] if device.type == "cuda" else 4 * need.live_bytes(model.batch, recomputes=False)
    kind: Any = "gpu" if device.type == "cuda" else "cpu"
    it = Device(
        name="it", kind="it", type=kind, host="h", memory_bytes=round(cap), reserved_bytes=facts["library_bytes"]
    )
    forecast = need.most_samples(it, recomputes=False)
    runs = _runs_on_gpu(made, model, cap) if device.type == "cuda" else _runs_on_paper(made, model, cap)
    tried: dict[int, bool] = {}

    def fits(samples: int) -> bool:
        if samples not in tried:
            tried[samples] = samples < 1 or runs(samples)
            print(f"  {samples} samples {'run' if tried[samples] else 'do not fit'}", flush=True)
        return tried[samples]

    low, high, step = 0, forecast, 1
    while fits(high):
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    row = {"case": name, "cap": cap, "forecast": forecast, "measured": low, "tried": tried}
    with (folder / "edge.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{name} under {cap / 1e9:.2f} GB: {low} samples run, {forecast} were forecast", flush=True)


def _runs_on_gpu(made: nn.Module, model: Model, cap: float) -> Callable[[int], bool]:
    device = next(made.parameters()).device
    total = torch.cuda.get_device_properties(device).total_memory
    gc.collect()
    torch.cuda.empty_cache()  # else state that stays comes into the large segments that measuring has left
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-5, fused=True)

    def step(samples: int) -> None:
        inputs, targets = batch_of(model, device, samples)
        (loss_of(made(inputs), targets) / samples).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)

    def runs(samples: int) -> bool:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(cap / total)
        try:
            for _ in range(2):
                step(samples)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            return False
        return True

    return runs


def _runs_on_paper(made: nn.Module, model: Model, cap: float) -> Callable[[int], bool]:
    """Counts the memory of a step of the whole model, all its gradients with it, where there is no GPU to run out."""
    parameters = sum(p.nbytes for p in made.parameters())

    def runs(samples: int) -> bool:
        inputs, targets = batch_of(model, torch.device("cpu"), samples)
        counted = count_step(made, inputs, lambda output: loss_of(output, targets), is_first=True)
        most = max(counted.forward_work_bytes, counted.backward_work_bytes)
        return 4 * parameters + counted.saved_bytes + most <= cap

    return runs
