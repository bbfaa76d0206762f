"""A GPT's step in closed form: its parts, its laws, and published times as facts."""

import math
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import InputError, parse_cluster, read_machine
from pipedejavu.facts.cluster import compose
from pipedejavu.simulate.gpt_estimate import GptBatch, GptConstants, GptShape, estimate_gpt
from pipedejavu.simulate.wiring import Grid, WiredLine, wire

ONE = read_machine("8xa100-80gb")
TWO = read_machine("2x(8xa100-80gb), 800Gb/s")
SLOW, FAST = (read_machine(f"16x(8xa100-80gb), {rate}Gb/s") for rate in (10, 800))
SMALL = GptShape(layers=24, width=1024, heads=16, context=1024)
NO_HOST = GptConstants(layer_host_s=1e-12, microbatch_host_s=1e-12)


def total(shape: GptShape, grid: Grid, batch: GptBatch, constants: GptConstants | None = None, machine=TWO) -> float:
    return estimate_gpt(shape, grid, batch, wire(grid, machine), constants).total_s


def test_published_times_are_met() -> None:
    # Measured by vTrain's authors on A100s of one node: GPUs, batch, micro, width, heads, layers, t, d, p, and ms.
    rows = [
        (8, 32, 2, 1024, 16, 24, 1, 8, 1, 186.469067),
        (8, 64, 4, 2048, 16, 20, 1, 8, 1, 454.973072),
        (4, 64, 1, 1024, 16, 20, 1, 4, 1, 1079.721423),
        (8, 64, 8, 2048, 16, 12, 1, 4, 2, 452.570593),
        (4, 16, 2, 2048, 16, 24, 4, 1, 1, 572.073594),
        (8, 16, 2, 2048, 16, 20, 2, 1, 4, 303.600582),
        (2, 16, 4, 2048, 16, 24, 2, 1, 1, 645.633308),
        (8, 32, 4, 1024, 16, 16, 1, 2, 4, 220.544873),
    ]
    errors = []
    for _, whole, micro, width, heads, layers, t, d, p, time_ms in rows:
        shape, batch = GptShape(layers, width, heads, 1024), GptBatch(micro, whole // d // micro)
        errors.append(abs(total(shape, Grid(t, d, p), batch, machine=ONE) / time_ms * 1000 - 1))
    assert mean(errors) < 0.08  # what the model aims at; it is deterministic
    assert max(errors) < 1 / 3  # the fifth row: of all that were published its error is the largest


def test_a_layer_is_its_products_and_its_passes() -> None:
    # Without hosts, head and update: what two layers more take is twice a layer.
    grid, batch = Grid(1, 1, 1), GptBatch(samples=1, microbatches=1)
    constants = NO_HOST.replace(matrix=1.0, memory=1.0)
    shape = GptShape(layers=2, width=256, heads=4, context=128, vocabulary=1)
    more = total(shape._replace(layers=4), grid, batch, constants) - total(shape, grid, batch, constants)
    tokens, width, heads = 128, 256, 4
    flop = 3 * (24 * tokens * width**2 + 4 * tokens**2 * width)
    operands = (tokens * width + width * 3 * width + 3 * tokens * width) + (2 * tokens * width + width**2)
    operands += 2 * (tokens * width + 4 * width**2 + 4 * tokens * width)
    operands += 2 * (2 * tokens * width + heads * tokens**2)
    passes = 30 * tokens * width + 42 * tokens * width + 10 * heads * tokens**2
    size_bytes = 3 * 2 * operands + 2 * passes + (10 + 42) * 12 * width**2
    device = ONE.devices[0]
    expected = 2 * (flop / device.flop_per_s + size_bytes / device.memory_bytes_per_s)
    assert more == pytest.approx(expected, rel=1e-9)


def test_a_balanced_pipeline_takes_a_slot_for_each_pass() -> None:
    constants = GptConstants(layer_host_s=1.0, microbatch_host_s=1e-12)  # the host decides, and stages are alike
    shape = SMALL._replace(layers=4, vocabulary=1)
    step = estimate_gpt(shape, Grid(1, 1, 4), GptBatch(1, 8), wire(Grid(1, 1, 4), ONE), constants)
    assert step.pipeline_s == pytest.approx(8 + 4 - 1, rel=1e-3)
    assert step.host_share > 100


def test_a_stage_with_more_layers_is_the_slowest() -> None:
    constants = GptConstants(layer_host_s=1.0, microbatch_host_s=1e-12)
    step = estimate_gpt(
        SMALL._replace(layers=5, vocabulary=1), Grid(1, 1, 4), GptBatch(1, 8), wire(Grid(1, 1, 4), ONE), constants
    )
    assert step.pipeline_s == pytest.approx(2 + 1 + 1 + 1 + 7 * 2, rel=1e-3)


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    samples=st.sampled_from([1, 4]),
)
@settings(max_examples=40, deadline=None)
def test_laws(tensor: int, data: int, pipeline: int, samples: int) -> None:
    grid, batch = Grid(tensor, data, pipeline), GptBatch(samples, 4)
    times = [total(SMALL, grid, batch, machine=machine) for machine in (SLOW, FAST)]
    assert times[0] >= times[1]
    assert (times[0] > times[1]) == (grid.size > 8 and data * pipeline > 1)
    assert total(SMALL, grid, batch._replace(microbatches=8), machine=FAST) > times[1]
    assert total(SMALL, grid, batch._replace(recomputes=True), machine=FAST) > times[1]
    assert total(SMALL._replace(layers=48), grid, batch, machine=FAST) > times[1]


def test_replicas_on_two_hosts_share_the_network() -> None:
    # Eight rings, one for each member of a tensor group, leave each host at once.
    wiring = wire(Grid(8, 2, 1), TWO)
    rate = 0.8 * 800e9 / 8
    assert wiring.data == WiredLine(TWO.links[-1].latency_s, rate / 8)
    assert wiring.tensor.bytes_per_s == 0.8 * 300e9
    # One ring of sixteen leaves each host once.
    assert wire(Grid(1, 16, 1), TWO).data.bytes_per_s == rate
    assert wire(Grid(1, 8, 1), TWO).data.bytes_per_s == 0.8 * 300e9


def test_a_ring_moves_twice_all_but_a_part() -> None:
    assert WiredLine(1.0, 10.0).reduce_s(80.0, 4) == 6 * (1.0 + 2.0)
    assert WiredLine().reduce_s(80.0, 1) == 0
    assert math.isinf(WiredLine().bytes_per_s)


def test_grids_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"4 × 4 × 2 workers need 32 GPUs, but machine '.*' has 16; give it more hosts"
    ):
        wire(Grid(4, 4, 2), TWO)
    mixed = compose(parse_cluster("a100-80gb + h100"))
    with pytest.raises(InputError, match="GPUs of one kind, not a100-80gb, h100-80gb; name one"):
        wire(Grid(2, 1, 1), mixed)
    blank = ONE.replace(devices=(ONE.devices[0].replace(flop_per_s=0.0),), links=())
    with pytest.raises(InputError, match="states no flop_per_s or no memory_bytes_per_s; add them"):
        wire(Grid(1, 1, 1), blank)
    with pytest.raises(InputError, match="16 heads cannot be divided over 3 workers; use a divisor"):
        total(SMALL, Grid(3, 1, 1), GptBatch(1, 1))
    with pytest.raises(InputError, match="24 layers do not make 32 stages; use at most one stage a layer"):
        total(SMALL, Grid(1, 1, 32), GptBatch(1, 1), machine=read_machine("4x(8xa100-80gb), 800Gb/s"))
