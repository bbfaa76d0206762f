"""What users of AdamW rely on works as in a plain loop, bit for bit; what cannot work says so."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from pipedejavu.facts import InputError
from pipedejavu.hybrid import state_placer
from pipedejavu.hybrid.unit_state import UnitState, size_of

OPTIONS = [
    {"clip_norm": None, "gpu_units": 2, "window": None},
    {"clip_norm": 0.5, "gpu_units": 2, "window": None},
    {"clip_norm": 1e9, "gpu_units": 0, "window": None},
    {"clip_norm": 1e9, "gpu_units": 0, "window": None, "speculate": False},
    {"clip_norm": 0.5, "gpu_units": 1, "window": 1},
    {"clip_norm": None, "gpu_units": 1, "window": 2},
]
NAMES = ["no clip", "clip", "speculative", "not speculative", "clip, window 1", "no clip, window 2"]
everywhere = pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
clipped = pytest.mark.parametrize(
    "options", [o for o in OPTIONS if o["clip_norm"]], ids=[n for n in NAMES if "no clip" not in n]
)
Options = dict[str, Any]


# --- groups and schedules


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Returns groups as users make them: no decay for vectors, another rate for the embedding."""
    named = dict(model.named_parameters())
    vectors = [p for p in named.values() if p.dim() < 2]
    embedding = named.pop("embed.weight")
    matrices = [p for p in named.values() if p.dim() >= 2]
    return [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
        {"params": [embedding], "lr": 0.003, "betas": (0.8, 0.9), "eps": 1e-6},
    ]


@everywhere
def test_groups_have_their_own_settings(
    options: Options, lab: Any, bits: Any, compare: Any, plain_optimizer: Any
) -> None:
    first, second = lab.net(), lab.net()
    reference = plain_optimizer(first, groups_of(first), clip_norm=options["clip_norm"])
    hybrid = lab.hybrid(second, groups_of(second), **options)
    lab.train(first, reference, range(6))
    lab.train(second, hybrid, range(6))
    compare(bits(reference, first), bits(hybrid, second))


@everywhere
@pytest.mark.parametrize("kind", ["lambda", "one cycle"])
def test_schedulers_change_the_rate_between_steps(options: Options, kind: str, lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        # The reference is no torch optimizer: a stand-in holds the rates that torch's schedulers give.
        held = (
            optimizer
            if isinstance(optimizer, torch.optim.Optimizer)
            else torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99))
        )
        if kind == "lambda":
            scheduler: Any = LambdaLR(held, lambda n: 1 / (n + 1))
        else:
            scheduler = OneCycleLR(held, max_lr=0.05, total_steps=8, cycle_momentum=True)
        for n in range(8):
            for mine, theirs in zip(optimizer.param_groups, held.param_groups, strict=True):
                mine.update(lr=theirs["lr"], betas=theirs["betas"])
            model.loss(lab.tokens(n)).backward()
            optimizer.step()
            if held is not optimizer:
                held._opt_called = True
            if n < 7:
                scheduler.step()

    lab.check_same(loop, options=options)


def test_a_rate_that_changes_after_its_update_began_is_refused(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, gpu_units=0)
    lab.train(model, optimizer, range(2))
    model.loss(lab.tokens(2)).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(
        InputError, match=r"^the settings of 'embed' changed between backward and step, and without clip"
    ):
        optimizer.step()


# --- gradients: accumulated, missing, dropped


@everywhere
def test_microbatches_accumulate(options: Options, lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(6):
            for part in range(3):
                (model.loss(lab.tokens(3 * n + part)) / 3).backward()
            optimizer.step()

    lab.check_same(loop, options={**options, "microbatches": 3})


@clipped
def test_gradients_accumulate_though_microbatches_is_not_given(options: Options, lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(6):
            for part in range(1 + n % 3):
                model.loss(lab.tokens(3 * n + part)).backward()
            optimizer.step()

    lab.check_same(loop, options=options)


def test_without_clip_norm_the_number_of_microbatches_must_be_known(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, gpu_units=0)
    lab.train(model, optimizer, range(2))
    model.loss(lab.tokens(2)).backward()
    text = (
        r"got a gradient in 2 backward passes of one step, and without clip_norm its update begins in pass 1; give mic"
    )
    with pytest.raises(InputError, match=text):
        model.loss(lab.tokens(3)).backward()


@everywhere
def test_fewer_backward_passes_than_microbatches_work(options: Options, lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(5):
            for part in range(1 if n == 3 else 2):
                model.loss(lab.tokens(2 * n + part)).backward()
            optimizer.step()

    lab.check_same(loop, options={**options, "microbatches": 2})


@everywhere
def test_blocks_without_a_gradient_rest_in_some_steps(options: Options, lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(8):
            model.skipped = [set(), {1}, {0, 2}, set()][n % 4]
            model.loss(lab.tokens(n)).backward()
            optimizer.step()

    lab.check_same(loop, options=options)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # torch's, for a block after frozen ones
@pytest.mark.parametrize("are_given", [False, True])
@everywhere
def test_frozen_parameters_stay(
    options: Options, are_given: bool, lab: Any, bits: Any, compare: Any, plain_optimizer: Any
) -> None:
    first, second = lab.net(), lab.net()
    for model in (first, second):
        model.embed.requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
    reference = plain_optimizer(first, clip_norm=options["clip_norm"])
    hybrid = lab.hybrid(second, second.parameters() if are_given else None, **{**options, "gpu_units": 1})
    lab.train(first, reference, range(5))
    lab.train(second, hybrid, range(5))
    compare(bits(reference, first), bits(hybrid, second))
    assert torch.equal(second.embed.weight, lab.net().embed.weight)


def test_a_parameter_that_thaws_is_noticed(lab: Any) -> None:
    model = lab.net()
    model.head.requires_grad_(False)
    optimizer = lab.hybrid(model, model.parameters(), clip_norm=1.0)
    lab.train(model, optimizer, range(2))
    model.head.requires_grad_(True)
    model.loss(lab.tokens(2)).backward()
    with pytest.raises(
        InputError, match=r"^a parameter that was frozen when HybridAdamW was made has a gradient; leave it"
    ):
        optimizer.step()
    with pytest.raises(
        InputError, match=r"^no parameter requires a gradient; call requires_grad_\(\) on what is to be tr"
    ):
        lab.hybrid(lab.net().requires_grad_(False), model.requires_grad_(False).parameters())


@everywhere
def test_tied_weights_are_updated_once(options: Options, lab: Any) -> None:
    lab.check_same(lambda lab, model, optimizer: lab.train(model, optimizer, range(6)), options=options, is_tied=True)


@pytest.mark.parametrize("set_to_none", [True, False])
@clipped
def test_zero_grad_drops_what_no_step_has_taken(options: Options, set_to_none: bool, lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(8):
            model.loss(lab.tokens(n)).backward()
            if n % 3 != 1:
                optimizer.step()
            if hasattr(optimizer, "flow"):
                optimizer.zero_grad(set_to_none=set_to_none)
            else:
                optimizer.zero_grad()

    lab.check_same(loop, options=options)


@clipped
def test_the_models_own_zero_grad_works_too(options: Options, lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(8):
            model.loss(lab.tokens(n)).backward()
            if n % 3 == 1:
                model.zero_grad()
            if n % 3 != 1 or n == 4:  # after a dropped backward pass, once another one, once a step
                optimizer.step()

    lab.check_same(loop, options=options)


def test_gradients_whose_update_has_begun_cannot_be_dropped(lab: Any) -> None:
    text = (
        r"^gradients were dropped between backward and step, and without clip_norm the update has begun; give clip_norm"
    )
    for is_by_model in (True, False):
        model = lab.net()
        optimizer = lab.hybrid(model, gpu_units=0)
        lab.train(model, optimizer, range(2))
        model.loss(lab.tokens(2)).backward()
        if is_by_model:
            model.zero_grad()
        with pytest.raises(InputError, match=text):
            optimizer.step() if is_by_model else optimizer.zero_grad()


def test_an_infinite_clip_norm_waits_and_never_clips(lab: Any, bits: Any, compare: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=math.inf, gpu_units=1)
    lab.train(model, optimizer, range(5))
    compare(bits(optimizer, model), lab.plain_bits(torch.bfloat16, None, 5))
    assert optimizer.norm > 0


def test_a_step_without_gradients_changes_nothing(lab: Any, bits: Any, compare: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0)
    optimizer.step()
    lab.train(model, optimizer, range(2))
    before = bits(optimizer, model)
    optimizer.step()
    compare(before, bits(optimizer, model))


# --- gradients that are not finite, or far too large


def spoil(model: Any, how: str) -> None:
    """Puts a fault into the next backward pass, in the middle of the model."""
    weight = model.blocks[1].down.weight

    def change(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        if how == "spike":
            return gradient * 1000
        changed = gradient.clone()
        changed[2, 3] = math.inf if how == "inf" else math.nan
        return changed

    handle = weight.register_hook(change)


@everywhere
@pytest.mark.parametrize("how", ["inf", "nan", "spike"])
@pytest.mark.parametrize("step", [0, 5])
def test_a_spoiled_gradient_leaves_the_state_of_a_plain_loop(
    step: int, how: str, options: Options, lab: Any, bits: Any
) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(8):
            if n == step:
                spoil(model, how)
            model.loss(lab.tokens(n)).backward()
            optimizer.step()
        assert optimizer.num_skipped == (how != "spike")
        assert all(tensor.isfinite().all() for tensor in bits(optimizer, model).values())

    lab.check_same(loop, options=options)


# --- state


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_training_continues_bit_for_bit_after_a_save_and_a_load(
    dtype: torch.dtype, options: Options, lab: Any, bits: Any, compare: Any
) -> None:
    """Into another placement, before and after its own first steps, and in both orders."""
    model = lab.net(dtype)
    optimizer = lab.hybrid(model, **options)
    lab.train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    lab.train(model, optimizer, range(5, 10))
    expected = bits(optimizer, model)
    clip_norm = options["clip_norm"]
    for num_before, units, window, is_model_first in [
        (0, 6, None, True),
        (3, 3, None, False),
        (0, 0, 1, True),
        (2, 1, 2, False),
    ]:
        other = lab.net(dtype)
        with torch.no_grad():
            other.embed.weight.mul_(2)
        second = lab.hybrid(other, clip_norm=clip_norm, gpu_units=units, window=window)
        lab.train(other, second, range(num_before))
        if is_model_first:
            other.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        if not is_model_first:
            other.load_state_dict(saved[0])
        again = second.state_dict()["state"]
        assert all(
            torch.equal(again[n][key], value) for n, entry in saved[1]["state"].items() for key, value in entry.items()
        )
        lab.train(other, second, range(5, 10))
        compare(expected, bits(second, other))


def test_the_low_half_does_not_outlive_weights_that_torch_trained(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=2)
    lab.train(model, optimizer, range(3))
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    optimizer.close()
    lab.train(model, plain, range(3, 5))
    second = lab.hybrid(model, clip_norm=1.0, gpu_units=2)
    second.load_state_dict(plain.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    model.loss(lab.tokens(5)).backward()
    second.scheduler.settle()
    second._fill()
    assert all(not m.state.low.any() and m.step == 5 for m in second.scheduler.model_state.params.values())
    assert all(map(torch.equal, before, model.parameters()))


def test_weights_that_are_loaded_alone_count(lab: Any) -> None:
    model, other = lab.net(), lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=2)
    lab.train(model, optimizer, range(3))
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(3.0)
    model.load_state_dict(other.state_dict())
    lab.train(model, optimizer, range(3, 4))
    optimizer.synchronize()
    assert all((p > 2.9).all() for p in model.parameters())


def test_an_empty_state_takes_the_old_one_away(lab: Any, bits: Any, compare: Any) -> None:
    model = lab.net()
    fresh = copy.deepcopy(model.state_dict())
    optimizer = lab.hybrid(model, clip_norm=0.5, gpu_units=2)
    empty = optimizer.state_dict()
    lab.train(model, optimizer, range(4))
    once = bits(optimizer, model)
    model.load_state_dict(fresh)
    optimizer.load_state_dict(empty)
    lab.train(model, optimizer, range(4))
    compare(once, bits(optimizer, model))


def test_state_that_does_not_fit_is_refused(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0)
    lab.train(model, optimizer, range(1))
    state = optimizer.state_dict()
    with pytest.raises(
        InputError, match=r"^the state is of groups of \[1\] parameters, and this optimizer's are of \[22\]$"
    ):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    strange = {"state": {0: {"step": 1, "exp_avg": torch.zeros(3)}}, "param_groups": state["param_groups"]}
    with pytest.raises(InputError, match=r"^'exp_avg' of 'embed\.weight' has 3 elements, not 88$"):
        optimizer.load_state_dict(strange)
    strange["state"][0] = {"step": 1, "momentum_buffer": torch.zeros(88)}
    with pytest.raises(
        InputError, match=r"^the state of 'embed\.weight' has no 'exp_avg'; it is not that of an AdamW$"
    ):
        optimizer.load_state_dict(strange)
    torch_state = torch.optim.AdamW(model.parameters(), amsgrad=True).state_dict()
    with pytest.raises(
        InputError, match=r"^the state is of an AdamW with amsgrad=True, which HybridAdamW does not have$"
    ):
        optimizer.load_state_dict(torch_state)


def test_a_copy_of_the_models_weights_is_the_newest(lab: Any) -> None:
    """The updates of the last step may still be under way when the state is asked for."""
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=0.5, gpu_units=0)
    lab.train(model, optimizer, range(5))
    expected = lab.plain_bits(torch.bfloat16, 0.5, 5)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


class Pooled(nn.Module):
    """Attention outside of a list: torch reads the weight of its `out_proj` without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.attention(x, x, x)
        return found.square().sum()


def test_weights_that_are_used_without_their_module_are_noticed(lab: Any) -> None:
    model = Pooled()
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=0)
    for _ in range(3):
        optimizer.synchronize()
        model(torch.randn(3, 4)).backward()
        optimizer.step()
    with pytest.raises(
        InputError, match=r"^'attention\.out_proj\..*' was used without a call of 'attention\.out_proj', whos"
    ):
        model(torch.randn(3, 4)).backward()


# --- compiled blocks


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_work(
    backend: str, window: int | None, lab: Any, bits: Any, compare: Any, plain_optimizer: Any
) -> None:
    first, second = lab.net(torch.float32), lab.net(torch.float32)
    for model in (first, second):
        for block in model.blocks:
            block.compile(backend=backend)
    reference = plain_optimizer(first, clip_norm=0.5)
    try:
        lab.train(first, reference, range(1))
    except RuntimeError as error:  # no C++ compiler
        pytest.skip(f"torch.compile does not run here: {error}"[:200])
    hybrid = lab.hybrid(second, clip_norm=0.5, gpu_units=2, window=window)
    lab.train(second, hybrid, range(1))
    for model, optimizer in ((first, reference), (second, hybrid)):
        lab.train(model, optimizer, range(1, 5))
    compare(bits(reference, first), bits(hybrid, second))


# --- refusals


def test_a_closure_runs_the_passes_and_step_returns_its_loss(
    lab: Any, bits: Any, compare: Any, plain_optimizer: Any
) -> None:
    first, second = lab.net(), lab.net()
    reference, hybrid = plain_optimizer(first, clip_norm=0.5), lab.hybrid(second, clip_norm=0.5, gpu_units=2)
    lab.train(first, reference, range(4))
    for n in range(4):

        def closure(n: int = n) -> Any:
            hybrid.zero_grad()
            loss = second.loss(lab.tokens(n))
            loss.backward()
            return loss.detach()

        assert hybrid.step(closure).isfinite()
    compare(bits(reference, first), bits(hybrid, second))


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[4]], ids=["clip", "window"])
def test_clipping_outside_is_noticed(options: Options, lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, **options)
    for n in range(2):
        model.loss(lab.tokens(n)).backward()
        if n == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with pytest.raises(InputError, match=r"^gradients were changed between backward and step, .*clip_norm=…"):
                optimizer.step()
        else:
            optimizer.step()


@clipped
def test_clipping_to_an_infinite_norm_changes_nothing(options: Options, lab: Any) -> None:
    """Hugging Face's Trainer does so to know the norm; a norm that is not finite turns what is left into NaN."""

    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(6):
            if n == 3:
                spoil(model, "inf")
            model.loss(lab.tokens(n)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            optimizer.step()

    lab.check_same(loop, options=options)


def test_sparse_gradients_are_refused(lab: Any) -> None:
    model = lab.net(torch.float32, is_sparse=True)
    lab.hybrid(model)
    with pytest.raises(
        InputError, match=r"^the gradient of 'embed\.weight' is sparse; HybridAdamW takes dense torch\.floa"
    ):
        model.loss(lab.tokens(0)).backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_precisions_are_refused(dtype: torch.dtype, lab: Any) -> None:
    with pytest.raises(InputError, match=rf"^a parameter is {dtype}; HybridAdamW trains bfloat16 and float32$"):
        lab.hybrid(lab.net(dtype))


def test_parameters_that_are_not_contiguous_are_refused(lab: Any) -> None:
    model = lab.net()
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    with pytest.raises(InputError, match=r"^a parameter of shape \(11, 8\) is not contiguous; call \.contiguous\(\)$"):
        lab.hybrid(model)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_parameters_that_are_trained_later_join(
    options: Options, lab: Any, bits: Any, compare: Any, plain_optimizer: Any
) -> None:
    found = []
    for make in (plain_optimizer, lab.hybrid):
        model = lab.net()
        late = [*model.blocks[0].parameters()]
        early = [p for p in model.parameters() if all(p is not other for other in late)]
        for p in late:
            p.requires_grad_(False)
        own = {"clip_norm": options["clip_norm"]} if make is plain_optimizer else options
        optimizer = make(model, [{"params": early}], **own)
        lab.train(model, optimizer, range(4))
        for p in late:
            p.requires_grad_(True)
        group = {"params": late, "lr": 0.003, "weight_decay": 0.0}
        if make is plain_optimizer:
            more = plain_optimizer(model, [group], clip_norm=None)
            optimizer.param_groups += more.param_groups
            optimizer.states.update(more.states)
            optimizer.steps.update(more.steps)
        else:
            optimizer.add_param_group(group)
        lab.train(model, optimizer, range(4, 9))
        found.append(bits(optimizer, model))
    compare(*found)


def test_a_group_that_cannot_join_changes_nothing(lab: Any, bits: Any, compare: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=0.5, gpu_units=2, window=1)
    lab.train(model, optimizer, range(3))
    with pytest.raises(InputError, match=r"^1 of 23 parameters are not in the model; give the model that has all"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InputError, match=r"^a parameter is torch.float64; HybridAdamW trains bfloat16 and float32"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model.head.weight]})
    lab.train(model, optimizer, range(3, 6))
    compare(bits(optimizer, model), lab.plain_bits(torch.bfloat16, 0.5, 6))
    model.loss(lab.tokens(0)).backward()
    with pytest.raises(InputError, match=r"^add_param_group came between backward and step; call it after step\(\)$"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0.0; give a number above 0, or None for no clipping"),
        ({"clip_norm": math.nan}, "clip_norm is nan; give a number above 0"),
        ({"microbatches": 0}, "microbatches is 0; give the number of backward passes of a step, 1 or more"),
        ({"window": 0}, "window is 0; give the number of blocks on the GPU, 'auto', or None for all"),
        ({"window": "all"}, "window is 'all'; give the number"),
        ({"gpu_units": 7}, "gpu_units is 7 and the model has 6 units; give 0 to 6"),
        ({"gpu_budget": 0}, "gpu_budget is 0; give a number of bytes above 0, or 'auto'"),
        ({"host_budget": "8 GB"}, "host_budget is '8 GB'; give a number of bytes above 0, or 'auto'"),
        ({"gpu_budget": 1000, "window": None}, "weights and state take 1.8 KiB of the GPU without any"),
        ({"gpu_budget": 5000, "host_budget": 9000}, "and both budgets together are 13.7 KiB"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_allocated(options: Options, text: str, lab: Any) -> None:
    model = lab.net()
    with pytest.raises(InputError) as refused:
        lab.hybrid(model, **options)
    assert str(refused.value).startswith(text) or text in str(refused.value)
    plain = torch.optim.AdamW(model.parameters())  # the model is as it was
    lab.train(model, plain, range(2))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_blocks_of_a_window_take_nothing_of_the_gpu_budget(lab: Any) -> None:
    model = lab.net()
    around = sum(p.numel() for name, p in model.named_parameters() if "blocks" not in name)
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=6, window=1, gpu_budget=around * (2 + 10 + 2) + 200)
    lab.train(model, optimizer, range(2))
    assert optimizer.plan is not None
    assert optimizer.plan.places == ("gpu", "host", "host", "host", "gpu", "gpu")


def test_parameters_of_another_model_are_refused(lab: Any) -> None:
    with pytest.raises(
        InputError, match=r"^22 of 22 parameters are not in the model; give the model that has all of them"
    ):
        lab.hybrid(lab.net(), lab.net().parameters())


@pytest.mark.parametrize("window", [1, 2, 3])
def test_blocks_that_share_weights_stay_out_of_the_window(window: int, lab: Any) -> None:
    found = []
    for size in (None, window):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        model[3].weight = model[0].weight
        optimizer = lab.hybrid(model, clip_norm=1.0, window=size)
        for n in range(4):
            torch.manual_seed(n)
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        found.append([p.detach().clone() for p in model.parameters()])
    assert [unit_state.is_windowed for unit_state in optimizer.scheduler.unit_states] == [False, True, True, True, True]
    assert all(map(torch.equal, *found))


def test_a_model_with_a_window_may_be_moved_and_not_recast(lab: Any, bits: Any, compare: Any) -> None:
    model = lab.net()
    model.blocks[0].register_buffer("mask", torch.ones(2))
    optimizer = lab.hybrid(model, clip_norm=0.5, window=1)
    lab.train(model, optimizer, range(3))
    resting = model.blocks[1].up.weight.data_ptr()
    model.to(torch.device("cpu"))
    assert model.blocks[1].up.weight.data_ptr() == resting
    with pytest.raises(
        InputError, match=r"^the model's dtype is torch.bfloat16, and its weights come through a window"
    ):
        model.blocks.double()
    model.blocks[0]._apply(lambda t: t.clone())
    lab.train(model, optimizer, range(3, 6))
    compare(bits(optimizer, model), lab.plain_bits(torch.bfloat16, 0.5, 6))
    optimizer.close()
    assert model.double().blocks[0].mask.dtype == torch.float64


def test_a_window_needs_blocks(lab: Any) -> None:
    with pytest.raises(
        InputError,
        match=r"^a window needs blocks of their own weights in a list, and the model has none; give window=None",
    ):
        lab.hybrid(nn.Linear(2, 2), window=1, device="meta")


def test_a_placement_that_the_first_step_shows_not_to_fit_is_refused(lab: Any) -> None:
    """What a step takes is known after the first backward pass; nothing of the state is allocated by then."""
    sizes = [size_of(unit_state) for unit_state in lab.hybrid(lab.net()).scheduler.unit_states]
    weights, no_copy = sum(size.weight_bytes for size in sizes), sum(size.no_copy_bytes for size in sizes)
    leaving = max(size.gradient_bytes for size in sizes)
    model = lab.net()  # units without a copy need staging memory for two units' weights too
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_budget=weights + leaving, host_budget=no_copy, window=None)
    model.loss(lab.tokens(0)).backward()
    with pytest.raises(
        InputError, match=r"^the state that the GPU cannot hold needs .* of host memory and the budget is"
    ):
        optimizer.step()
    assert all(param.state is None for param in optimizer.scheduler.model_state.params.values())


class Slow:
    """An event that is past only after a wait for it."""

    def __init__(self, event: Any):
        self.event, self.was_awaited = event, False

    def is_past(self) -> bool:
        return self.was_awaited

    def wait_on_host(self) -> None:
        self.event.wait_on_host()
        self.was_awaited = True


@pytest.mark.parametrize(("free_bytes", "most"), [(0, 1), (2**40, 5)], ids=["no room", "room for all"])
def test_where_the_link_is_slow_gradients_of_one_unit_and_of_more_that_have_room_are_on_their_way(
    free_bytes: int, most: int, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[UnitState, Slow]] = []
    unfinished: list[int] = []
    send = UnitState.send

    def slowly(unit_state: UnitState, *args: Any) -> Slow:
        unfinished.append(len({id(h) for h, event in sent if h is not unit_state and not event.was_awaited}))
        sent.append((unit_state, Slow(send(unit_state, *args))))
        return sent[-1][1]

    monkeypatch.setattr(UnitState, "send", slowly)
    monkeypatch.setattr(
        state_placer, "free_for_leaving", lambda units, *_: dict.fromkeys(range(len(units)), free_bytes)
    )
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=0, window=None)
    lab.train(model, optimizer, range(1))
    sent.clear()
    unfinished.clear()
    lab.train(model, optimizer, range(1, 3))
    assert len({id(unit_state) for unit_state, _ in sent}) > 2
    assert max(unfinished) == most


def test_a_closed_optimizer_leaves_a_model_that_trains_on(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=2, window=1)
    lab.train(model, optimizer, range(2))
    optimizer.close()
    lab.made.clear()
    before = {name: p.clone() for name, p in model.named_parameters()}
    lab.train(model, torch.optim.AdamW(model.parameters(), lr=0.1), range(2))
    assert not any(torch.equal(before[name], p) for name, p in model.named_parameters() if p.dim() > 1)
    assert not model._state_dict_pre_hooks


def test_the_plan_and_the_record_say_what_happens(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=2)
    assert optimizer.plan is None
    recorder = optimizer.record()
    lab.train(model, optimizer, range(3))
    optimizer.synchronize()
    assert optimizer.plan is not None
    assert optimizer.plan.places == ("gpu",) * 2 + ("host",) * 4
    assert "the state of 2 of 6 units" in optimizer.plan.reasons[0]
    spans = recorder.finish()
    assert {lane for lane, *_ in spans} >= {"compute", "copy-in", "copy-out", "host"}
    assert all(start <= end for *_, start, end in spans)
    assert optimizer.norm > 0
