"""Simulates the headline figures of papers on the machines that the papers used, as one page of Markdown.

    python bench/headline_ratios.py > docs/headline-ratios.md

Machines come from the catalogue, models from their shapes, and times from the simulator. Each figure stands beside the
published one, with the reason if the two disagree.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from textwrap import fill
from typing import NamedTuple

from published import Constants, Row

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost, FaultsError, InputError, Machine, Profile, Unit, UnitTime, read_machine
from pipedejavu.plan import Feed, Keep, Place, Plan, Reduce, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.ranking import time_plan
from pipedejavu.simulate import simulate, unit_costs
from pipedejavu.zoo.gpt_profile import profile_of
from pipedejavu.zoo.gpt_shape import Shape

FIRST, LAST = 8, 480
"""Bounds on the number of layers of the largest model that fits."""


@cache
def machine_of(text: str) -> Machine:
    return read_machine(text)


@cache
def profile_on(shape: Shape, machine: str) -> Profile:
    return profile_of("shape", shape, machine_of(machine))


def flop_of(shape: Shape, batch: int) -> float:
    """Returns the operations of an iteration as Megatron's authors count them, with a recomputed forward."""
    layers, width, _, context, vocabulary = shape
    return 96 * batch * context * layers * width**2 * (1 + context / (6 * width) + vocabulary / (16 * layers * width))


class Run(NamedTuple):
    """A GPT on a machine: tensor-parallel groups of neighbouring GPUs, replicas, stages, and the microbatch."""

    machine: str
    shape: Shape
    batch: int
    tensor: int
    data: int
    pipeline: int
    micro: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.data * self.pipeline

    def row(self) -> Row:
        machine = machine_of(self.machine)
        machine = machine.replace(devices=machine.devices[: self.gpus])
        divided = (self.tensor, self.data, self.pipeline, True, machine)
        return Row(self.gpus, self.batch, self.micro, self.shape, *divided, 1.0)

    def tflops(self) -> float:
        """Returns 10¹² operations per second and GPU."""
        return flop_of(self.shape, self.batch) / self.row().forecast_s(Constants()) / self.gpus / 1e12


def time_s(plan: Plan, profile: Profile, machine: Machine) -> float:
    """Returns the simulated time of an update; raises InputError if the plan cannot run."""
    timed = time_plan(plan, PlanningProblem(profile, machine, ()), 0.0)
    if isinstance(timed, str):
        raise InputError(timed)
    return timed.time_s


def fits(plan: Plan, profile: Profile, machine: Machine) -> bool:
    try:
        verify(compile_plan(plan, profile, machine))
    except FaultsError:
        return False
    return True


def by_units(plan: Plan) -> Plan:
    """Returns a plan in which each unit is a piece: recomputed, reduced and updated on its own."""
    return plan.replace(order=plan.order.replace(is_eager=True), bucket_bytes=1)


def section(title: str, setting: str, head: str, rows: Sequence[Sequence[str]], reason: str) -> Iterator[str]:
    """Yields the lines of a section: how it was simulated, the figures, and why they differ."""
    yield f"## {title}\n\n{fill(setting, 118, break_on_hyphens=False)}\n"
    yield f"| {head} |"
    yield "|" + "---|" * len(head.split(" | "))
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield f"\n{fill(reason, 118, break_on_hyphens=False)}\n"


MEGATRON_2021 = [
    # parameters (10⁹), width, layers, heads, tensor, pipeline, GPUs, batch, published TFLOP/s per GPU
    (1.7, 2304, 24, 24, 1, 1, 32, 512, 137),
    (3.6, 3072, 30, 32, 2, 1, 64, 512, 138),
    (7.5, 4096, 36, 32, 4, 1, 128, 512, 142),
    (18.4, 6144, 40, 48, 8, 1, 256, 1024, 135),
    (39.1, 8192, 48, 64, 8, 2, 512, 1536, 138),
    (76.1, 10240, 60, 80, 8, 4, 1024, 1792, 140),
    (145.6, 12288, 80, 96, 8, 8, 1536, 2304, 148),
    (310.1, 16384, 96, 128, 8, 16, 1920, 2160, 155),
    (529.6, 20480, 105, 128, 8, 35, 2520, 2520, 163),
    (1008.0, 25600, 128, 160, 8, 64, 3072, 3072, 163),
]


def megatron_2021() -> Iterator[str]:
    rows = []
    for billions, width, layers, heads, tensor, pipeline, gpus, batch, published in MEGATRON_2021:
        data, shape = gpus // tensor // pipeline, Shape(layers, width, heads, 2048)
        runs = [
            Run("384x(8xa100-80gb), 1600Gb/s", shape, batch, tensor, data, pipeline, micro)
            for micro in (1, 2, 4, 8)
            if batch % (micro * data) == 0
        ]
        rate, run = max((run.tflops(), run) for run in runs)
        grid = f"{tensor} × {data} × {pipeline}"
        ratio = f"{rate / published:.2f}"
        rows.append((f"{billions:g} B", grid, str(run.micro), str(published), f"{rate:.0f}", ratio))
    yield from section(
        "Megatron, 2021: 1.7 B to 1 T parameters on 32 to 3,072 A100",
        (
            "`384x(8xa100-80gb), 1600Gb/s`; 2,048 tokens, all layers recomputed, 1F1B, the fastest microbatch of "
            "1, 2, 4 and 8 samples. Rates in TFLOP/s per GPU."
        ),
        "model | tensor × data × pipeline | microbatch | published | simulated | ratio",
        rows,
        (
            "Constants were fitted to runs on one node alone. The published table does not state the "
            "microbatches, and its pipelines interleave chunks of layers, which the simulated ones do not."
        ),
    )


MEGATRON_2019 = [
    # parameters (10⁹), width, layers, heads, tensor, published weak scaling alone and with 64-fold data parallelism
    (1.2, 1536, 40, 16, 1, 100, 96),
    (2.5, 1920, 54, 20, 2, 95, 83),
    (4.2, 2304, 64, 24, 4, 82, 79),
    (8.3, 3072, 72, 32, 8, 77, 74),
]


def megatron_2019() -> Iterator[str]:
    rows, one = [], 0.0
    for billions, width, layers, heads, tensor, alone, together in MEGATRON_2019:
        shape = Shape(layers, width, heads, 1024)
        rates = [Run("32x(16xv100-32gb), 800Gb/s", shape, 8 * data, tensor, data, 1, 8).tflops() for data in (1, 64)]
        one = one or rates[0]
        scaling = [f"{100 * rate / one:.0f} %" for rate in rates]
        figures = (f"{alone} %", scaling[0], f"{together} %", scaling[1])
        rows.append((f"{billions:g} B", str(tensor), *figures, f"{rates[1]:.0f}"))
    yield from section(
        "Megatron, 2019: 8.3 B parameters on 512 V100, 76 % of linear scaling",
        (
            "`32x(16xv100-32gb), 800Gb/s`; 1,024 tokens, 8 samples per tensor-parallel group, all layers "
            "recomputed. Rates per GPU relative to the first row alone; the last column is in TFLOP/s per GPU."
        ),
        ("model | tensor | published, tensor alone | simulated | published, × 64 replicas | simulated | TFLOP/s"),
        rows,
        (
            "With 64 replicas of a group of 8 the simulation is 11 points too low: it reduces gradients after the "
            "last backward, over a network at 80 % of its rate, and its GPUs compute faster (45 TFLOP/s alone, "
            "published 39), so the same communication weighs more. In absolute terms 8.3 B parameters train at 30 "
            "TFLOP/s per GPU, published 29.5."
        ),
    )


ZERO = "25x(16xv100-32gb), 800Gb/s"


def largest(tensor: int, keep: Keep) -> tuple[int, float]:
    """Returns the layers and 10⁹ parameters of the largest model, 8,192 wide, that 400 GPUs hold."""

    def holds(layers: int) -> bool:
        shape = Shape(layers, 8192, 64, 1024)
        run = Run(ZERO, shape, 400 // tensor, tensor, 400 // tensor, 1, 1)
        wire = "reduce-scatter" if keep.kind.startswith("zero") else "all-reduce"
        plan = by_units(run.row().plan()).replace(keep=keep, reduce=Reduce(wire=wire))
        return fits(plan, profile_on(shape, ZERO), machine_of(ZERO))

    low, high = FIRST, LAST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, low * 12 * 8192**2 / 1e9


def zero() -> Iterator[str]:
    base, divided = largest(16, Keep()), largest(16, Keep(kind="zero-2"))
    shape = Shape(125, 8192, 64, 1024)
    zero_run = Run(ZERO, shape, 800, 16, 25, 1, 32)
    plan = by_units(zero_run.row().plan()).replace(keep=Keep(kind="zero-2"), reduce=Reduce(wire="reduce-scatter"))
    fast = flop_of(shape, 800) / time_s(plan, profile_on(shape, ZERO), machine_of(ZERO)) / 400 / 1e12
    wide = shape._replace(heads=128)
    megatron = preset("megatron").at(workers=128, microbatches=1, samples=4)
    megatron = megatron.replace(order=megatron.order.replace(recompute=1.0))
    slow = flop_of(wide, 4) / time_s(megatron, profile_on(wide, ZERO), machine_of(ZERO)) / 128 / 1e12
    rows = [
        ("largest model, tensor groups of 16", "about 20 B", f"{base[1]:.0f} B"),
        ("the same with ZeRO-2 over 25 replicas", "170 B", f"{divided[1]:.0f} B"),
        ("ratio of sizes", "8", f"{divided[1] / base[1]:.1f}"),
        ("100 B, tensor groups of 128 GPUs, 4 samples", "under 5 TFLOP/s per GPU", f"{slow:.1f}"),
        ("100 B, ZeRO-2 × tensor groups of 16, 32 samples", "38 TFLOP/s per GPU", f"{fast:.1f}"),
        ("ratio of speeds", "10", f"{fast / slow:.1f}"),
    ]
    yield from section(
        "ZeRO: 8 times the size and 10 times the speed on 400 V100",
        (
            "`25x(16xv100-32gb), 800Gb/s`; models 8,192 wide with 1,024 tokens, all layers recomputed; for sizes "
            "one sample per group."
        ),
        "what | published | simulated",
        rows,
        (
            "The simulated baselines are better than the published ones: memory counts tensors without "
            "fragmentation and buffers of libraries, so 31 B parameters fit in place of about 20 B, and all-"
            "reduces over 8 hosts run at 80 % of the network's rate with nothing beside them. The figures of ZeRO "
            "itself are within 15 %."
        ),
    )


TWO_BW = "8x(8xv100-16gb), 25Gb/s"


def best_pipeline(shape: Shape, batch: int, kind: str) -> float:
    """Returns the least time per update of a pipeline of any depth, microbatch and recompute that fits 64 GPUs."""
    profile, machine, best = profile_on(shape, TWO_BW), machine_of(TWO_BW), float("inf")
    for depth, micro, recompute in product((2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (0.0, 1.0)):
        width = 64 // depth
        count = batch // (micro * width)
        if batch % (micro * width) or count < depth:
            continue
        source = preset(kind).plan
        plan = source.replace(
            place=Place(workers=depth, replicas=width),
            feed=Feed(microbatches=count, samples=micro),
            order=source.order.replace(recompute=recompute),
            reduce=Reduce(wire="all-reduce"),
            steps=4 if source.is_flush_free else 1,
        )
        try:
            if fits(plan, profile, machine):
                best = min(best, time_s(plan, profile, machine))
        except InputError:
            continue
    return best


def best_hybrid(shape: Shape, batch: int) -> float:
    """Returns the least time of tensor-parallel groups within hosts and replicas, without a pipeline."""
    profile, machine, best = profile_on(shape, TWO_BW), machine_of(TWO_BW), float("inf")
    for tensor, micro in product((2, 4, 8), (1, 2, 4, 8, 16)):
        data = 64 // tensor
        if batch % (micro * data) or shape.heads % tensor:
            continue
        plan = by_units(Run(TWO_BW, shape, batch, tensor, data, 1, micro).row().plan())
        if fits(plan, profile, machine):
            best = min(best, time_s(plan.replace(bucket_bytes=Plan().bucket_bytes), profile, machine))
    return best


def pipedream_2bw() -> Iterator[str]:
    models = (
        ("BERT-192, 2.4 B", Shape(192, 1024, 16, 512, 30528), "6.9"),
        ("GPT-2, 2.4 B", Shape(54, 1920, 20, 512), "5.4"),
    )
    rows = []
    for (name, shape, hybrid), batch in product(models, (64, 128, 512)):
        fast = best_pipeline(shape, batch, "pipedream-2bw")
        flush, tensor = best_pipeline(shape, batch, "gpipe"), best_hybrid(shape, batch)
        rows.append((name, str(batch), "up to 1.9", f"{flush / fast:.2f}", hybrid, f"{tensor / fast:.2f}"))
    yield from section(
        "PipeDream-2BW: 1.9 to 6.9 times as fast on 64 V100",
        "`8x(8xv100-16gb), 25Gb/s`; the fastest depth, microbatch and recompute of each system that fits in memory.",
        "model | batch | published, to GPipe | simulated | published, to tensor × data parallelism | simulated",
        rows,
        "The gain over tensor and data parallelism falls with the batch, over which the reduction of gradients at"
        " 25 Gb/s is spread; the published batches were not at hand. The simulated groups also take their best size and"
        " reduce gradients while the last backward goes on. GPipe takes its own best depth and microbatch, while the"
        " paper compares equal configurations.",
    )


def gems() -> Iterator[str]:
    rows = []
    for workers in (2, 4, 8):
        times = {}
        for name, count, per_update in (("model-parallel", 8, 8), ("gems-mast", 2, 2), ("gems-master", 8, 8)):
            plan = preset(name).at(workers=workers, microbatches=count)
            times[name] = simulate(compile_plan(*unit_costs(plan, {}))).makespan_s / per_update / plan.steps
        slow = times["model-parallel"]
        rows.append((f"{workers}", f"{slow / times['gems-mast']:.2f}", f"{slow / times['gems-master']:.2f}"))
    yield from section(
        "GEMS: 1.36 and 1.83 times as fast as model parallelism",
        (
            "Equal stages at unit costs: a backward takes two forwards, and communication is free. Updates of 8 "
            "microbatches."
        ),
        "workers | MAST (published: up to 1.36) | MASTER (published: up to 1.83)",
        rows,
        (
            "A forward in one direction hides behind a backward in the other, which saves at most a third of the "
            "time: 1.5 is the limit of the schedule at these costs. Published gains beyond it have other causes "
            "than the schedule."
        ),
    )


FP32, CONV_SHARE, LAUNCH_S, MEMORY = 15.7e12, 0.6, 3e-5, 900e9
"""Rate of a V100 in 32 bits, the share of it that convolutions are assumed to reach, the time to launch the kernels of
a convolution with its norm and activation, and the rate of its memory."""


def resnet(width: int, size: int) -> Profile:
    """Returns ResNet-50, `width` times as wide, in 32 bits; launches are not divided over `size` devices."""
    units = []
    channels = 64
    for stage, (blocks, pixels) in enumerate(zip((3, 4, 6, 3), (56, 28, 14, 7), strict=True)):
        inner = 64 * 2**stage * width
        for _ in range(blocks):
            for kernel, inputs, outputs in ((1, channels, inner), (9, inner, inner), (1, inner, 4 * inner)):
                flop = 2 * kernel * inputs * outputs * pixels**2
                moved = 4 * (inputs + 5 * outputs) * pixels**2
                forward = Cost(fixed_s=size * LAUNCH_S, per_sample_s=flop / (CONV_SHARE * FP32) + moved / MEMORY)
                number = 4 * kernel * inputs * outputs
                time = UnitTime(
                    forward=forward, backward=forward.times(2.0), weight_backward=forward, update_s=5 * number / MEMORY
                )
                units.append(
                    Unit(
                        name=f"conv{len(units)}",
                        times={"v100-16gb": time},
                        parameter_bytes=number,
                        gradient_bytes=number,
                        optimizer_bytes=number,
                        activation_bytes=8.0 * outputs * pixels**2,
                        boundary_bytes=4.0 * outputs * pixels**2,
                    )
                )
            channels = 4 * inner
    return Profile(name=f"ResNet-50 × {width}", units=tuple(units))


def channel_filter() -> Iterator[str]:
    machine, rows = machine_of("4x(4xv100-16gb), 200Gb/s"), []
    for width in (1, 2, 4):
        alone_s, cells = 0.0, []
        for size in (1, 2, 4, 8, 16):
            profile = resnet(width, size)
            names = ("stationary-x", "stationary-y", "stationary-w") if size > 1 else ("model-parallel",)
            plans = [preset(name).at(workers=size, microbatches=1, samples=1) for name in names]
            best = min(time_s(plan, profile, machine) for plan in plans)
            alone_s = alone_s or best
            cells.append(f"{alone_s / best:.2f}")
        rows.append((profile.name, *cells))
    yield from section(
        "Channel and filter parallelism: up to 4.1 times as fast",
        (
            "One sample on 1 to 16 GPUs of `4x(4xv100-16gb), 200Gb/s` in 32 bits, with the fastest of "
            "stationary-x, -y and -w. Ratios are to one GPU per sample, at which data parallelism ends."
        ),
        "model | 1 GPU | 2 | 4 | 8 | 16",
        rows,
        (
            "A plan divides every convolution by one layout, and each then moves its whole activation, which "
            "costs more across hosts than it saves. The paper chooses layouts layer by layer, so that wide images "
            "at the front are not divided."
        ),
    )


HEADER = """# Headline figures of papers, simulated

`python bench/headline_ratios.py > docs/headline-ratios.md` makes this page. Machines come from the
[catalogue](machines.md), models from their shapes, and times from the [simulator](simulator.md). Nothing is fitted to
these papers but one number: the share of its rate that a V100 reaches, relative to an A100, follows from the rate of
one V100 in Megatron's paper of 2019. No figure was measured here.
"""
PARTS = (megatron_2021, megatron_2019, zero, pipedream_2bw, gems, channel_filter)


def main() -> None:
    print(HEADER)
    for number, part in enumerate(PARTS, 1):
        print(f"{number} of {len(PARTS)}: {part.__name__}", file=sys.stderr)
        for line in part():
            print(line, flush=True)


if __name__ == "__main__":
    main()
