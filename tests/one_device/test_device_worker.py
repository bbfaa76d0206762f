"""Plans of one GPU and its host have the bits of HybridAdamW in a plain loop, and pass the audit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, audit
from pipedejavu.engine.verdict import judge
from pipedejavu.optim.arithmetic import AdamState, scalars_of, split, update_
from pipedejavu.plan import Keep
from tests.engine.bf16 import is_matrix
from tests.one_device.lab import SETTINGS, SPLIT, Run, check_equal, furthest, plan_of

PLACES: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "device, visit, host, lean": {"places": ("device", "visit", "host", "lean")},
    "all streamed": {"places": ("visit",) * 4, "visitors": 2},
    "all on the host": {"places": ("host",) * 4},
    "no copies": {"places": ("lean",) * 4},
    "window of one": {"places": ("device", "window", "window", "host")},
    "all through a window": {"keep": Keep(kind="host", window=1), "prefetch": 1},
}


@pytest.mark.parametrize("clip_norm", [None, 0.05, 1e9], ids=["unclipped", "clipped", "hardly clipped"])
@pytest.mark.parametrize("name", PLACES)
def test_every_place_has_the_bits_of_hybrid_adamw_in_a_plain_loop(name: str, clip_norm: float | None) -> None:
    run = Run(plan_of(**PLACES[name], clip=clip_norm is not None), clip_norm=clip_norm)
    check_equal(run.weights, run.trained_by("hybrid"))
    assert furthest(run.weights, run.trained_by("torch")) <= run.tolerance()
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()


MIXTURES: dict[str, dict[str, Any]] = {
    "four microbatches": {"microbatches": 4, "places": ("device", "visit", "host", "lean")},
    "four microbatches, on the device": {"microbatches": 4},
    "four microbatches, windowed": {"microbatches": 4, "places": ("host", "window", "window", "device"), "window": 2},
    "recompute": {"recompute": (0, 2, 3), "places": ("device", "host", "visit", "host")},
    "recompute in a window": {"recompute": (1, 2), "places": ("host", "window", "window", "host"), "microbatches": 2},
    "activations on the host": {"activations": "host", "places": ("device", "host", "lean", "host")},
}


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("model", ["mlp", "calm-gpt"])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_the_bits_of_hybrid_adamw_in_a_plain_loop(name: str, model: str, clip_norm: float | None) -> None:
    run = Run(plan_of(**MIXTURES[name], clip=clip_norm is not None), model, clip_norm=clip_norm, rounds=3)
    if model == "mlp":  # counts are powers of two, so that dividing by them changes no bit
        check_equal(run.weights, run.trained_by("hybrid"))
    assert furthest(run.weights, run.trained_by("torch")) <= run.tolerance()
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()


@pytest.mark.parametrize("recompute", [None, (0, 1, 2)], ids=["kept", "recomputed"])
def test_dropout_draws_what_the_replay_draws(recompute: tuple[int, ...] | None) -> None:
    plan = plan_of(("device", "host", "visit", "host"), clip=True, recompute=recompute, microbatches=2)
    run = Run(plan, "gpt", clip_norm=0.05)
    assert furthest(run.weights, run.trained_by("torch")) <= run.tolerance()
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()


@pytest.mark.parametrize("recompute", [None, (0, 1, 2)], ids=["kept", "recomputed"])
def test_running_statistics_advance_once_per_microbatch(recompute: tuple[int, ...] | None) -> None:
    run = Run(plan_of(("device", "host", "host", "host"), recompute=recompute, microbatches=2), "convnet", count=4)
    threads = run.start()
    for _ in range(run.rounds):
        threads.run()
    buffers = {n: b.clone() for _, m in threads.handlers[0].job.units for n, b in m.named_buffers() if "num" in n}
    assert {int(b) for b in buffers.values()} == {2 * run.rounds}
    threads.close()
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()


def test_frozen_parameters_stay_as_they_are() -> None:
    run = Run(plan_of(("device", "host", "visit", "host"), clip=True), clip_norm=0.05)
    for parameter in run.units[1][1].parameters():
        parameter.requires_grad_(False)
    run.units[2][1][0].bias.requires_grad_(False)
    before = {f"{unit}.{n}": p.detach().clone() for unit, m in run.units for n, p in m.named_parameters()}
    assert torch.equal(run.weights["u1.0.weight"], before["u1.0.weight"])
    assert torch.equal(run.weights["u2.0.bias"], before["u2.0.bias"])
    assert not torch.equal(run.weights["u2.0.weight"], before["u2.0.weight"])
    check_equal(run.weights, run.trained_by("hybrid"))
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()


@pytest.mark.parametrize("places", [("device",) * 4, ("device", "visit", "host", "lean"), ("window",) * 4])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_bfloat16_weights_have_split_masters(places: Any, clip_norm: float | None) -> None:
    plan = plan_of(places, clip=clip_norm is not None, precision=SPLIT)
    run = Run(plan, clip_norm=clip_norm, dtype=torch.bfloat16)
    check_equal(run.weights, run.trained_by("hybrid"))
    assert {w.dtype for w in run.weights.values()} == {torch.float32}
    check_sound(run)


BF16_CASES = [
    *((name, "mlp", clip_norm) for name in PLACES for clip_norm in (None, 0.05)),
    ("device, visit, host, lean", "convnet", 0.05),
    ("recompute", "calm-gpt", 0.05),
    ("activations on the host", "convnet", None),
]


@pytest.mark.parametrize(("name", "model", "clip_norm"), BF16_CASES)
def test_float32_models_train_as_in_a_plain_loop_under_autocast(name: str, model: str, clip_norm: Any) -> None:
    options = (PLACES | MIXTURES)[name]
    run = Run(plan_of(**options, clip=clip_norm is not None, precision=SPLIT), model, clip_norm=clip_norm)
    before = {f"{unit}.{n}": p.detach().clone() for unit, m in run.units for n, p in m.named_parameters()}
    expected, weights = run.trained_by("hybrid"), run.weights
    if model == "calm-gpt":  # counts that are no powers of two round the gradient of the mean in another way
        assert furthest(weights, expected) <= run.tolerance() * 2**16
    else:
        check_equal(weights, expected)
    assert {w.dtype for w in weights.values() if w.is_floating_point()} == {torch.float32}
    if clip_norm is None:
        check_equal(weights, run.by_actions())
    else:  # the engine adds up the norm in float64
        assert furthest(weights, run.by_actions()) <= run.tolerance() * 2**16
    check_sound(run)
    after = {f"{unit}.{n}": p for unit, m in run.units for n, p in m.named_parameters()}
    check_equal(before, {name: p.detach() for name, p in after.items()})


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("places", [None, ("device", "visit", "host", "lean"), ("device", "window", "window", "host")])
def test_gradients_of_several_microbatches_are_summed_in_bf16_if_the_plan_says_so(
    places: Any, clip_norm: float | None
) -> None:
    precision = SPLIT.replace(accumulate="bf16")
    run = Run(plan_of(places, clip=clip_norm is not None, precision=precision, microbatches=4), clip_norm=clip_norm)
    check_equal(run.weights, run.trained_by("hybrid"))
    if clip_norm is None:  # the actions take norms in float64
        check_equal(run.weights, run.by_actions())


def with_float32_sums(run: Run) -> dict[str, Tensor]:
    """Trains in a plain loop: matrices in bf16, their gradients added up in float32, float32 masters; unclipped."""
    model = torch.nn.Sequential(*copy.deepcopy([module for _, module in run.units]))
    lowered = {p for part in model.modules() for p in part.parameters(recurse=False) if is_matrix(part, p)}
    masters = {p: p.detach().float().view(-1).clone() for p in model.parameters()}
    states = {p: AdamState(master, None, *torch.zeros(2, p.numel())) for p, master in masters.items()}
    size = run.program.update_size
    for update in range(run.rounds):
        members = range(update * size, (update + 1) * size)
        sums = {p: torch.zeros(p.numel()) for p in states}
        for p in lowered:
            p.data = split(states[p].weight.view(p.shape))[0]
        for i in members:
            with torch.autocast("cpu", torch.bfloat16, enabled=run.dtype == torch.float32):
                run.loss(run.forward(model, i, torch.device("cpu")), run.batches.targets(i)).backward()
            for p in states:
                sums[p] += p.grad.float().view(-1)
                p.grad = None
        scale = 1 / sum(run.batches.count(i) for i in members)
        for p, state in states.items():
            update_(scalars_of(update + 1, **SETTINGS, scale=scale), sums[p], state, state)
            if p not in lowered:
                p.data = state.weight.view(p.shape).to(run.dtype)
    names = [name for name, _ in run.units]
    named = {f"{unit}.{n}": p for unit, m in zip(names, model, strict=True) for n, p in m.named_parameters()}
    return {name: states[p].weight.view(p.shape) for name, p in named.items()}


WIDE_PLACES = [
    None,
    ("device", "visit", "host", "lean"),
    ("device", "window", "window", "host"),
    ("lean", "lean", "lean", "lean"),
]


@pytest.mark.parametrize("places", WIDE_PLACES)
@pytest.mark.parametrize("microbatches", [2, 4])
def test_gradients_of_several_microbatches_are_summed_in_float32(places: Any, microbatches: int) -> None:
    run = Run(plan_of(places, precision=SPLIT, microbatches=microbatches))
    check_equal(run.weights, with_float32_sums(run))
    check_equal(run.weights, run.by_actions())
    narrow = Run(plan_of(places, precision=SPLIT.replace(accumulate="bf16"), microbatches=microbatches))
    assert furthest(run.weights, narrow.weights) > 0
    check_sound(run)


@pytest.mark.parametrize("places", WIDE_PLACES)
def test_float32_sums_are_clipped_by_their_norm(places: Any) -> None:
    run = Run(plan_of(places, clip=True, precision=SPLIT, microbatches=4), clip_norm=0.05)
    # The engine adds up the norm in float64: the clipping factor is off by the rounding of a float32 norm.
    assert furthest(run.weights, run.by_actions()) <= run.tolerance() * 2**16
    assert furthest(run.weights, Run(plan_of(places, precision=SPLIT, microbatches=4)).weights) > 0
    check_sound(run)


def test_bf16_models_sum_in_float32_too() -> None:
    run = Run(plan_of(("device", "visit", "host", "lean"), precision=SPLIT, microbatches=4), dtype=torch.bfloat16)
    check_equal(run.weights, run.by_actions())


def test_frozen_weights_are_rounded_for_use_and_keep_their_values() -> None:
    run = Run(plan_of(("device", "host", "visit", "host"), precision=SPLIT))
    run.units[1][1].requires_grad_(False)
    check_equal(run.weights, run.trained_by("hybrid") | {"u1.0.weight": run.units[1][1][0].weight.detach()})
    check_equal(run.weights, run.by_actions())


def test_masters_before_the_first_update_are_the_weights_of_the_model() -> None:
    run = Run(plan_of(("device", "visit", "window", "lean"), precision=SPLIT), "mlp")
    threads = run.start()
    before = {n: w.clone() for some in threads.outcome().weights.values() for n, w in some.items()}
    check_equal(before, {f"{unit}.{n}": p.detach() for unit, m in run.units for n, p in m.named_parameters()})
    held = {p.dtype for _, m in threads.handlers[0].job.units for p in m.parameters() if p.dim() > 1}
    assert held == {torch.bfloat16}
    threads.close()


def test_a_skipped_first_update_leaves_the_masters() -> None:
    run = Run(plan_of(PLACES["device, visit, host, lean"]["places"], clip=True, precision=SPLIT), clip_norm=1.0,
              rounds=1, extra={"on_nan": "skip"})  # fmt: skip
    run.batches.x[0] = torch.full_like(run.batches.x[0], float("inf"))
    check_equal(run.weights, {f"{unit}.{n}": p.detach() for unit, m in run.units for n, p in m.named_parameters()})


def check_sound(run: Run) -> None:
    """Checks a run in a low precision by its audit, which knows how far rounding moves weights."""
    verdict = judge(run.program, run.job, run.batches, run.outcome)
    assert verdict.is_passed, str(verdict)


def test_rates_and_decays_follow_the_optimizer_of_the_job() -> None:
    optimizer = AdamW(**SETTINGS, schedule=lambda n: 1 / (n + 1), decays=lambda name: "bias" not in name)
    run = Run(plan_of(("device", "visit", "host", "lean"), clip=True), clip_norm=0.05, optimizer=optimizer)
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()
    plain = Run(run.plan, clip_norm=0.05)
    assert furthest(run.weights, plain.weights) > 10 * run.tolerance()


class Unused(nn.Linear):
    """A layer with a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.spare = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_parameter_without_a_gradient_decays_as_in_the_engine(place: Any) -> None:
    run = Run(plan_of((place,) * 4))
    run.units[1] = ("u1", Unused())
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()
    assert (run.weights["u1.spare"] < 1).all()


def test_several_updates_per_round_and_logged_events() -> None:
    run = Run(plan_of(("device", "host", "host", "host"), clip=True).replace(steps=2), clip_norm=0.05, rounds=2)
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()
    check_equal(run.weights, run.trained_by("hybrid"))
    assert sorted(run.outcome.logs[0].losses) == [0, 1, 2, 3]
    names = {str(a) for a in run.program.workers[0].actions}
    spans = run.outcome.spans
    assert {span.action for span in spans} <= names
    passes = {str(a) for a in run.program.workers[0].actions if a.kind in "FB" or a.kind == "UPDATE"}
    assert passes <= {span.action for span in spans}
    assert all(0 <= span.start_s <= span.end_s for span in spans)
