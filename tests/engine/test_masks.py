"""Replicas that leave filters out to fit their budgets (DISTREAL), against a plain loop over smaller networks."""

import copy
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from pipedejavu.engine import AdamW, Sgd, audit, check_runnable
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.filter_masks import Pace
from pipedejavu.engine.job import Masked
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import Feed, Reduce
from pipedejavu.simulate import simulate
from tests.engine.case import Case, convnet_samples, make_case

SGD = Sgd(lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = AdamW(lr=0.01, eps=0.01, weight_decay=0.1)
BUDGETS = (1.0, 0.5, 0.3)


def flat_net() -> list[tuple[str, nn.Module]]:
    """Two convolutions, and a linear layer that reads the flattened image."""
    return [
        ("u0", nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))),
        ("u1", nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten())),
        ("u2", nn.Linear(6 * 9, 3)),
    ]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


class Pooled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


class FixedView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(-1, 36))


def masked(units=None, *, budgets=BUDGETS, period=2, steps=4, optimizer=SGD, rounds=1, **feed) -> Case:
    case = make_case(
        "distreal", "convnet", workers=len(budgets), steps=steps, optimizer=optimizer, rounds=rounds,
        feed=Feed(kind="mask", budgets=budgets, **feed),
        reduce=Reduce(wire="all-reduce", combiner="average", period=period),
    )  # fmt: skip
    case.units, case.make_samples = flat_net() if units is None else units, convnet_samples
    return case


class PlainReplica:
    """Trains smaller networks of torch, made of the filters that remain, and writes their tensors back."""

    def __init__(self, units, optimizer):
        self.whole = copy.deepcopy(nn.ModuleDict(dict(units)))
        self.optimizer = optimizer
        self.slots: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self.times = {name: torch.zeros_like(p) for name, p in self.whole.named_parameters()}

    def parts(self, a, b):
        """What a tensor has of filters `a` of the first convolution, and `b` of the second."""
        pixels = torch.tensor([9 * f + n for f in b.tolist() for n in range(9)])
        every = torch.arange
        index = {"u0.0.weight": (a,), "u0.0.bias": (a,), "u1.0.weight": (b[:, None], a[None]), "u1.0.bias": (b,)}
        index |= {"u2.weight": (every(3)[:, None], pixels[None]), "u2.bias": (every(3),)}
        for unit, filters in (("u0", a), ("u1", b)):
            index |= {f"{unit}.1.{name}": (filters,) for name in ("weight", "bias", "running_mean", "running_var")}
        return index

    def train(self, kept, x, y):
        a, b = kept.filters
        small = nn.ModuleList(
            [
                nn.Conv2d(1, len(a), 3, padding=1), nn.BatchNorm2d(len(a)), nn.Conv2d(len(a), len(b), 3, padding=1),
                nn.BatchNorm2d(len(b)), nn.Linear(9 * len(b), 3),
            ]
        )  # fmt: skip
        names = ("u0.0", "u0.1", "u1.0", "u1.1", "u2")
        wholes, parts = self.whole.state_dict(keep_vars=True), self.parts(a, b)
        tensors = {
            f"{name}.{key}": t for name, m in zip(names, small, strict=True) for key, t in m.state_dict().items()
        }
        for name in parts:
            tensors[name].copy_(wholes[name].detach()[parts[name]])
        parameters = {
            f"{name}.{key}": p for name, m in zip(names, small, strict=True) for key, p in m.named_parameters()
        }
        stepper = self.stepper(parameters)
        for name, slots in self.slots.items():
            stepper.state[parameters[name]] = {
                slot: t[parts[name]].clone() if t.dim() else t for slot, t in slots.items()
            }
        conv, norm, conv2, norm2, linear = small
        hidden = torch.relu(norm(conv(x))) * (4 / len(a))
        hidden = torch.tanh(norm2(conv2(hidden))).flatten(1) * (6 / len(b))
        cross_entropy(linear(hidden), y).backward()
        stepper.step()
        for name, part in parts.items():
            wholes[name].data[part] = tensors[name]
        for name, parameter in parameters.items():
            self.times[name][parts[name]] += 1
            for slot, t in stepper.state[parameter].items():
                whole = self.slots[name].setdefault(slot, torch.zeros_like(wholes[name]) if t.dim() else t)
                if t.dim():
                    whole[parts[name]] = t
                else:
                    self.slots[name][slot] = t

    def stepper(self, parameters):
        settings = {"lr": self.optimizer.lr, "weight_decay": self.optimizer.weight_decay}
        if isinstance(self.optimizer, Sgd):
            return torch.optim.SGD(parameters.values(), momentum=0.9, **settings)
        return torch.optim.AdamW(parameters.values(), eps=self.optimizer.eps, **settings)


def average(replicas):
    for name, _ in replicas[0].whole.named_parameters():
        weights = [dict(r.whole.named_parameters())[name] for r in replicas]
        times = [r.times[name] for r in replicas]
        total = sum(times)
        mean = sum(w.detach() * t for w, t in zip(weights, times, strict=True)) / total.clamp(min=1)
        for w in weights:
            w.data = torch.where(total > 0, mean, w.detach()).clone()
        for r in replicas:
            r.times[name].zero_()


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["momentum", "adamw"])
def test_masked_training_equals_a_plain_loop_over_smaller_networks(optimizer):
    case = masked(optimizer=optimizer, later_budgets=((0.6, 1.0, 0.4),))
    replicas = [PlainReplica(case.units, optimizer) for _ in BUDGETS]
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    for update in range(4):
        for q, replica in enumerate(replicas):
            number = 3 * update + q
            kept = threads.handlers[q].applier.masks.kept(q, update)
            replica.train(kept, case.batches.inputs(number), case.batches.targets(number))
        if update % 2:
            average(replicas)
    outcome = threads.outcome()
    assert len({threads.handlers[1].applier.masks.kept(1, u).counts for u in range(4)}) > 1, "the budget changes"
    slots = {"m": "exp_avg", "v": "exp_avg_sq", "step": "step", "momentum": "momentum_buffer"}
    for q, replica in enumerate(replicas):
        for name, weight in replica.whole.named_parameters():
            torch.testing.assert_close(outcome.weights[0, q][name], weight, rtol=0, atol=1e-12)
            state = threads.handlers[q].applier.state[0, q][name]
            assert {slots[slot] for slot in state} == replica.slots[name].keys()
            for slot, tensor in state.items():
                expected = replica.slots[name][slots[slot]]
                torch.testing.assert_close(tensor.double(), expected.double(), rtol=0, atol=1e-12)
        for name, buffer in threads.handlers[q].buffers_of((0, q)):
            expected = replica.whole.state_dict()[name] if buffer.dim() else torch.tensor(4)
            torch.testing.assert_close(buffer, expected, rtol=0, atol=1e-12)
    assert int(case.units[0][1][1].num_batches_tracked) == 0, "to find the filters runs nothing"
    assert max(audit(case.program, case.job, case.batches, outcome).values()) <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


def test_filters_that_are_left_out_keep_their_weights_and_moments_bit_for_bit():
    case = masked(optimizer=ADAMW, budgets=(0.3,), steps=1, rounds=5)
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    num_out = 0
    for update in range(1, 5):
        before = copy.deepcopy((threads.outcome().weights[0, 0], threads.handlers[0].applier.state[0, 0]))
        threads.run()
        after = threads.outcome().weights[0, 0], threads.handlers[0].applier.state[0, 0]
        kept = threads.handlers[0].applier.masks.kept(0, update)
        for name, old in before[0].items():
            out = torch.ones_like(old, dtype=torch.bool)
            kept.put(name, out, torch.zeros_like(kept.narrow(name, out)))
            num_out += int(out.sum())
            assert torch.equal(after[0][name][out], old[out])
            assert not torch.equal(after[0][name][~out], old[~out])
            for slot in ("m", "v"):
                assert torch.equal(after[1][name][slot][out], before[1][name][slot][out])
    assert num_out > 100


def test_budgets_of_1_are_plain_averaging():
    case = masked(budgets=(1.0, 1.0, 1.0))
    plain = Case(case.plan.replace(feed=Feed(kind="own")), case.units, case.make_samples, SGD)
    for key, weights in case.outcome.weights.items():
        for name, weight in weights.items():
            torch.testing.assert_close(weight, plain.outcome.weights[key][name], rtol=0, atol=1e-14)


def test_the_multiplications_of_a_microbatch_are_within_its_budget():
    case = masked()
    case.outcome  # noqa: B018
    threads = Threads(case.program, case.job, case.batches)
    counts = []
    for q, handlers in enumerate(threads.handlers):
        handlers.begin(0)
        runner = handlers.runners[0, q]
        number = next(n for n in range(q, 12, 3) if case.batches.length(n) == case.batches.length(0))
        for filters in (runner.filters, None):
            runner.filters = filters
            with FlopCounterMode(display=False) as counter:
                output, saved = runner.forward(runner.initial | {}, case.batches.inputs(number), number, is_first=True)
                weights = [w.requires_grad_() for w in saved[0].weights.values()]
            counts.append(counter.get_total_flops())
            assert output.shape[1] == 3
            del weights
    for budget, (part, whole) in zip(BUDGETS, zip(counts[::2], counts[1::2], strict=True), strict=True):
        assert part <= budget * whole
        assert part > 0.4 * budget * whole, "most of the budget is used"


def test_channels_that_a_residual_connection_ties_are_left_out_together():
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    case = masked([("u0", stem), ("u1", Residual()), ("u2", Pooled(4))], optimizer=ADAMW)
    assert case.audit() <= case.tolerance
    threads = Threads(case.program, case.job, case.batches)
    threads.handlers[0].begin(0)
    layout = threads.handlers[0].applier.masks.layout
    assert [(group.name, group.size) for group in layout.groups] == [("u0.0.weight", 4), ("u1.first.weight", 5)]
    assert {dim.group for name in ("u1.second.bias", "u2.linear.weight") for dim in layout.dims[name]} == {0}


def test_frozen_parameters_are_narrowed_with_the_filters_that_they_follow():
    units = flat_net()
    for parameter in (units[0][1][1].weight, units[1][1][0].bias):
        parameter.requires_grad_(False)
    case = masked(units)
    before = {name: p.clone() for unit, module in units for name, p in module.named_parameters(prefix=unit)}
    differences = audit(case.program, case.job, case.batches, case.outcome)
    assert max(differences.values()) <= case.tolerance
    for name in ("u0.1.weight", "u1.0.bias"):
        assert torch.equal(case.outcome.weights[0, 1][name], before[name])


def test_a_group_that_nothing_can_be_taken_from_stays_whole():
    depthwise = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 5, 1))
    case = masked([("u0", nn.Conv2d(1, 4, 3, padding=1)), ("u1", depthwise), ("u2", Pooled(5))], budgets=(1.0, 0.9))
    assert case.audit() <= case.tolerance
    threads = Threads(case.program, case.job, case.batches)
    threads.handlers[0].begin(0)
    assert [group.name for group in threads.handlers[0].applier.masks.layout.groups] == ["u1.1.weight"]


def test_state_that_is_saved_between_rounds_goes_on_as_it_would_have():
    case = masked(optimizer=ADAMW, steps=2, rounds=2)
    first = Threads(case.program, case.job, case.batches)
    first.run()
    second = Threads(case.program, case.job, case.batches)
    put_all(second, first.updates, take_all(first).get)
    second.run()
    for key, weights in second.outcome().weights.items():
        assert all(torch.equal(weight, case.outcome.weights[key][name]) for name, weight in weights.items())


def test_a_plan_s_own_vectors_are_chosen_by_budget():
    case = masked(drops=((0.0, 0.0), (0.5, 0.0), (0.5, 0.5)), budgets=(1.0, 0.55, 0.31))
    assert case.audit() <= case.tolerance
    threads = Threads(case.program, case.job, case.batches)
    threads.handlers[0].begin(0)
    masks = threads.handlers[0].applier.masks
    assert [choice.counts for choice in masks.table] == [(2, 3), (2, 6), (4, 6)]
    assert [masks.kept(q, 0).counts for q in range(3)] == [(4, 6), (2, 6), (2, 3)]


def test_a_replica_whose_updates_take_longer_uses_less_of_its_budget():
    pace = Pace()
    for seconds in (9.0, 1.0, 1.0, 1.0, 1.0):  # the first one warms up
        pace.note(seconds, 1.0)
    pace.settle()
    assert pace.share == 1.0
    for times, share in ((2.0, 0.5), (1.0, 0.5), (0.8, 0.625), (0.25, 1.0)):
        for _ in range(3):
            pace.note(0.5 * times, 0.5)
        pace.settle()
        assert pace.share == pytest.approx(share)


def test_controlled_budgets_are_noted_and_replayed():
    case = masked(is_controlled=True, steps=8)
    assert case.audit() <= case.tolerance
    choices = [event for log in case.outcome.logs for event in log.events if isinstance(event, Masked)]
    assert len(choices) == 24


def test_a_log_with_another_choice_is_refused():
    case = masked()
    events = case.outcome.logs[1].events
    number = next(n for n, event in enumerate(events) if isinstance(event, Masked))
    events[number] = events[number]._replace(choice=events[number].choice + 1)
    with pytest.raises(InputError, match="the run chose another vector than"):
        case.audit()


def test_the_forecast_has_the_operations_that_budgets_save():
    def busy(**feed):
        return [worker.busy_s for worker in simulate(masked(period=2, **feed).program).workers]

    full, part, later = busy(budgets=(1.0,) * 3), busy(), busy(later_budgets=((0.5, 0.5, 0.3),))
    assert [p / f for p, f in zip(part, full, strict=True)] == pytest.approx(BUDGETS)
    assert [p / f for p, f in zip(later, full, strict=True)] == pytest.approx([0.75, 0.5, 0.3])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"units": lambda: [("u0", nn.Sequential(nn.Flatten(), nn.Linear(9, 9))), ("u1", nn.Linear(9, 3))]},
         "the model has no convolution whose filters can be left out"),
        ({"units": lambda: [("u0", nn.Conv2d(1, 4, 3, padding=1)), ("u1", FixedView())]},
         "unit 'u1' does not run with some filters left out"),
        ({"budgets": (1.0, 0.001)}, "replica 1 has a budget of 0.001, and the smallest vector of the plan takes"),
        ({"drops": ((0.5,), (0.0,))}, "have 1 shares, and the model has 2 groups of filters (u0.0.weight"),
    ],
)  # fmt: skip
def test_what_cannot_be_left_out_is_refused_in_a_sentence(changes, sentence):
    units = changes.get("units", flat_net)()
    with pytest.raises(InputError) as refused:
        masked(**{**changes, "units": units}).outcome  # noqa: B018
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budgets": (1.0, 0.0)}, "a budget of 0, with which it computes nothing"),
        ({"later_budgets": ((1.0,),)}, "needs a budget for each of the 3 replicas"),
        ({"drops": ((0.5,), (0.5, 0.5))}, "the vectors of feed.drops differ in length"),
    ],
)
def test_plans_whose_masks_make_no_sense_break_a_rule(changes, sentence):
    with pytest.raises(FaultsError, match=sentence):
        masked(**changes).program  # noqa: B018


def test_compiled_units_have_one_size():
    case = masked()
    case.plan = case.plan.replace(is_compiled=True)
    with pytest.raises(InputError, match="the engine does not run compiled units with feed 'mask' yet"):
        check_runnable(case.program)
