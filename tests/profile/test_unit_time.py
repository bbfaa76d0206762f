"""Measuring a chain: sizes are exact, times are there for every kind, and nothing that is measured changes."""

import gc
import re
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.analysis.liveness import Liveness
from pipedejavu.analysis.size import Sizes
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile
from pipedejavu.plan import Precision, preset
from pipedejavu.profile import UnitSample, kind_times, known_efficiencies, make_samples, measure_profile, merge_profiles
from pipedejavu.profile.kind_times import MeasuredKind
from pipedejavu.profile.operator_count import count_step
from pipedejavu.profile.rates import Rates
from pipedejavu.profile.time_budget import BudgetPart, TimeBudget
from pipedejavu.profile.unit_step import PARTS
from pipedejavu.program import compile as compile_plan

CPU = torch.device("cpu")


def units() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [
        ("first", nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))),
        ("second", nn.ReLU(inplace=True)),
        ("third", nn.Linear(6, 3)),
    ]


def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def make_update(parameters):
    return lambda: torch._foreach_mul_(list(parameters), 0.5)


def measure(kinds, chain=None):
    sample, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    return measure_profile("net", [UnitSample(chain or units(), sample, target, loss)], (), kinds, make_update)


def test_state_of_bfloat16_weights_has_float32_moments_and_the_low_half_of_the_master() -> None:
    sizes = []
    split = Precision(compute="bf16", masters="split")
    for dtype, precision in ((torch.float32, Precision()), (torch.bfloat16, split)):
        chain = [("one", nn.Linear(4, 6)), ("two", nn.Linear(6, 3))]
        sample = torch.randn(5, 4).to(dtype)
        chain = [(name, module.to(dtype)) for name, module in chain]
        unit_sample = UnitSample(chain, sample, torch.tensor([0, 1, 2, 0, 1]), loss)
        sizes.append(
            [
                unit.optimizer_bytes
                for unit in measure_profile(
                    "net", [unit_sample], (), {"cpu": CPU}, make_update, precision=precision
                ).units
            ]
        )
    assert sizes == [[8 * 30, 8 * 21], [10 * 30, 10 * 21]]


def test_sizes_follow_from_the_tensors() -> None:
    first, second, third = measure({"cpu": CPU}).units
    assert [u.parameter_bytes for u in (first, second, third)] == [4 * (4 * 6 + 6 + 6 + 6), 0, 4 * (6 * 3 + 3)]
    assert [u.boundary_bytes for u in (first, second, third)] == [24, 24, 12]
    assert [u.has_batch_statistics for u in (first, second, third)] == [True, False, False]
    assert second.times["cpu"].weight_backward.per_sample_s == 0
    assert second.times["cpu"].update_s == 0


def test_every_kind_has_times_of_its_own() -> None:
    profile = measure({"fast": CPU, "slow": CPU})
    for unit in profile.units:
        assert unit.times.keys() == {"fast", "slow"}
        assert all(times.forward.per_sample_s > 0 and times.backward.per_sample_s > 0 for times in unit.times.values())


def test_how_a_machine_drifts_is_measured_from_turn_to_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([1.0] * 3 + [1.1] * 3 + [1.2] * 3)

    def run(row, device, enough_s, fewest) -> float:
        for found in row.times.values():
            found.append(1.0)
        return next(taken)

    monkeypatch.setattr("pipedejavu.profile.measured_unit.MeasuredUnit.run", run)
    assert measure({"cpu": CPU}).drift == {"cpu": pytest.approx(0.1 / 1.1)}


def test_a_first_unit_whose_backward_only_frees_memory_needs_none() -> None:
    norm = measure({"cpu": CPU}, [("norm", nn.BatchNorm1d(4)), ("head", nn.Linear(4, 3))]).units[0]
    assert norm.backward_work_bytes == 0


def test_a_model_that_squeezes_one_sample_away_is_not_measured_at_one() -> None:
    class Squeeze(nn.Module):
        def forward(self, x):
            return x.squeeze().transpose(0, 1)

    def make(size: int) -> UnitSample:
        return UnitSample([("only", Squeeze())], torch.ones(size, 1, 3), torch.zeros(size), lambda x, _: x.sum())

    assert [unit_sample.samples for unit_sample in make_samples(make, (1, 2, 4))] == [2, 4]
    assert [unit_sample.samples for unit_sample in make_samples(make, (3, 2, 1))] == [
        3,
        2,
        1,
    ]  # it is asked for, and may fail


def test_trying_one_sample_changes_nothing() -> None:
    inputs, chain = torch.ones(1, 4, 2), [("norm", nn.BatchNorm1d(4)), ("relu", nn.ReLU(inplace=True))]
    unit_sample = UnitSample(chain, inputs, torch.zeros(1), lambda x, _: x.sum())
    assert len(make_samples(lambda _: unit_sample, (1, 2))) == 2
    assert torch.equal(chain[0][1].running_mean, torch.zeros(4))
    assert torch.equal(inputs, torch.ones(1, 4, 2))


def test_all_sizes_are_timed_in_turns() -> None:
    unit_samples = [
        UnitSample([("only", nn.Linear(4, 3))], torch.ones(n, 4), torch.zeros(n).long(), loss) for n in (1, 2)
    ]
    unit_samples[1] = replace(unit_samples[1], units=unit_samples[0].units)
    told: list[str] = []
    measure_profile("net", unit_samples, (), {"cpu": CPU}, make_update, told.append)
    assert told == ["only (cpu, 2 samples)", "only (cpu, 1 samples)"] * 3


def test_a_budget_bounds_the_passes_and_what_it_leaves_out_is_estimated_and_marked() -> None:
    sample = UnitSample(units(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), loss)
    told: list[str] = []
    arguments = ("net", [sample], (), {"cpu": CPU}, make_update, told.append)
    profile = measure_profile(*arguments, budget=TimeBudget(0.0))
    assert len(told) == 1  # a model without any measured time could not be scaled
    marks = [unit.times["cpu"].is_estimated for unit in profile.units]
    assert sorted(marks) == [False, True, True]
    assert all(unit.times["cpu"].forward.at(5) > 0 for unit in profile.units)
    assert all(unit.times["cpu"].backward.at(5) > 0 for unit in profile.units)
    left = [unit.name for unit, mark in zip(profile.units, marks, strict=True) if mark]
    assert profile.estimated["cpu"].startswith("2 of 3 distinct units (")
    assert profile.estimated["cpu"].endswith(" and 1 more) estimated, as the time for measuring was over")
    assert any(f"({name} and" in profile.estimated["cpu"] for name in left)
    whole = measure_profile(*arguments, budget=TimeBudget(60.0))
    assert not whole.estimated
    assert not any(unit.times["cpu"].is_estimated for unit in whole.units)
    assert [u.replace(times={}) for u in profile.units] == [u.replace(times={}) for u in whole.units]


def test_another_part_of_a_cpu_is_estimated_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time left, one unit is timed on the second kind, and the others keep their proportions to it."""
    sample = UnitSample(units(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), loss)
    budget = TimeBudget(60.0)

    def part(self, share: float):
        return BudgetPart(self, 0.0 if share < 1 else 60.0)

    monkeypatch.setattr(TimeBudget, "part", part)
    profile = measure_profile("net", [sample], (), {"cpu": CPU, "cpu/2": CPU}, make_update, budget=budget)
    assert profile.estimated.keys() == {"cpu/2"}
    ratios = {
        round(unit.times["cpu/2"].forward.at(5) / unit.times["cpu"].forward.at(5), 9)
        for unit in profile.units
        if unit.times["cpu/2"].is_estimated
    }
    assert len(ratios) == 1


def test_a_device_that_an_estimate_rules_out_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow kind stands for a CPU beside a GPU: the estimate says that it takes 200 times as long."""
    sample = UnitSample(units(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), loss)
    told: list[str] = []

    class Slow(Rates):
        def time_s(self, works):
            return 1e-3 * len(list(works)) if self.flop_per_s else 0.0

    monkeypatch.setattr(kind_times, "measure_rates", lambda *_: Slow(1.0, 1.0, known_efficiencies()["cpu"]))
    monkeypatch.setattr(kind_times, "_is_like", lambda *_: False)
    monkeypatch.setattr(MeasuredKind, "step_s", lambda *_: 1e-5)
    profile = measure_profile("net", [sample], (), {"gpu": CPU, "cpu": CPU, "cpu/2": CPU}, make_update, told.append)
    assert {text.partition("(")[2].partition(",")[0] for text in told} == {"gpu"}
    assert profile.estimated.keys() == {"cpu", "cpu/2"}
    match = "not measured: forward and backward of 5 samples are estimated at .* times as long as on gpu"
    assert re.fullmatch(match, profile.estimated["cpu"])
    for unit in profile.units:
        assert unit.times["cpu"].is_estimated
        assert not unit.times["gpu"].is_estimated
        assert unit.times["cpu"].forward.at(5) > 0
    assert profile.units[0].times["cpu"].update_s > 0  # updates of a GPU's state may run on the host


def test_profiles_of_different_devices_are_joined() -> None:
    made = Cost(fixed_s=1.0)
    fast, slow = (measure({kind: CPU}).replace(batch={kind: made}) for kind in ("fast", "slow"))
    joined = merge_profiles([fast, slow])
    assert joined.batch == {"fast": made, "slow": made}
    for unit, one, other in zip(joined.units, fast.units, slow.units, strict=True):
        assert unit.times == {**one.times, **other.times}
        assert unit.replace(times={}) == one.replace(times={})
    # An operation may need more memory on one kind of device; where it fits, it fits on all.
    fuller = slow.replace(units=tuple(unit.replace(backward_work_bytes=1e9) for unit in slow.units))
    for found in (merge_profiles([fast, fuller]), merge_profiles([fuller, fast])):
        assert all(unit.backward_work_bytes == 1e9 for unit in found.units)


def test_what_is_measured_stays_as_it_was() -> None:
    chain = units()
    before = [{name: t.clone() for name, t in module.state_dict().items()} for _, module in chain]
    measure({"cpu": CPU}, chain)
    for (_, module), kept in zip(chain, before, strict=True):
        assert all(torch.equal(t, kept[name]) for name, t in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())


def test_nothing_of_what_was_run_stays_in_memory() -> None:
    def sizes() -> list[int]:
        gc.collect()
        return sorted(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor)

    chain = [*units(), ("softmax", nn.Softmax(dim=1))]  # softmax and ReLU keep what they return
    before = sizes()
    measure({"cpu": CPU}, chain)
    assert sizes() == before


def test_a_device_that_runs_after_the_host_has_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedejavu.profile.kind_times._ISSUED", {"cpu"})
    monkeypatch.setattr("pipedejavu.profile.measured_unit._SUSTAINED_S", 0.01)
    first, second, third = (unit.times["cpu"] for unit in measure({"cpu": CPU}).units)
    for cost in (first.forward, first.backward, second.forward, third.recompute, third.backward):
        assert cost.issue_s > 0
        assert cost.work_s(5) > 0
    assert first.input_backward is not None
    assert first.input_backward.at(5) == 0
    assert second.weight_backward.at(5) == 0


@pytest.mark.parametrize(("warm_s", "factor"), [(1.3, 1.3), (0.8, 1.0)])
def test_a_device_that_runs_for_a_while_may_be_slower_and_is_never_faster(
    warm_s: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_cold(row, device, enough_s, fewest) -> float:
        for part in PARTS:
            row.times[part].append(1.0)
            row.issue[part].append(0.25)
        return 1.0

    def run_warm(module, value, head, is_first, watch) -> None:
        watch.host_s = dict.fromkeys(PARTS, warm_s)
        watch.events = dict.fromkeys(PARTS, (None, None))

    profile = measure({"cpu": CPU})
    monkeypatch.setattr("pipedejavu.profile.kind_times._ISSUED", {"cpu"})
    monkeypatch.setattr("pipedejavu.profile.measured_unit._SUSTAINED_S", 0.001)
    monkeypatch.setattr("pipedejavu.profile.measured_unit.MeasuredUnit.run", run_cold)
    monkeypatch.setattr("pipedejavu.profile.measured_unit.run_step", run_warm)
    for unit, other in zip(measure({"cpu": CPU}).units, profile.units, strict=True):
        assert unit.replace(times={}) == other.replace(times={})
        assert unit.times["cpu"].forward.work_s(5) == pytest.approx(factor)


@pytest.mark.gpu
def test_memory_that_an_operation_has_for_itself_counts_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    convolution, value = nn.Conv2d(64, 64, 3, padding=1).to(device), torch.randn(64, 64, 56, 56, device=device)
    counted = count_step(convolution, value, None, False)
    given = value.clone().requires_grad_()
    torch.cuda.reset_peak_memory_stats(device)
    output = convolution(given)
    forward_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    seed = torch.ones_like(output)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output.backward(seed)
    gradient_bytes = sum(p.nbytes for p in convolution.parameters())
    backward_bytes = torch.cuda.max_memory_allocated(device) - before - gradient_bytes
    block = 2**20  # the allocator divides no block for less than this, and each part has up to four tensors
    assert counted.forward_work_bytes == pytest.approx(forward_bytes, abs=4 * block)
    assert counted.backward_work_bytes == pytest.approx(backward_bytes, abs=4 * block)


@pytest.mark.gpu
def test_a_gpu_is_measured_beside_the_cpu() -> None:
    profile = measure({"cpu": CPU, "gpu": torch.device("cuda", 0)})
    for unit in profile.units:
        assert unit.times.keys() == {"cpu", "gpu"}
        assert all(times.forward.per_sample_s > 0 for times in unit.times.values())


def test_halves_of_a_backward_are_measured_apart() -> None:
    first, second, third = (unit.times["cpu"] for unit in measure({"cpu": CPU}).units)
    assert first.input_backward is not None
    assert first.input_backward.at(5) == 0  # nobody wants the gradient of a sample
    assert second.weight_backward.at(5) == 0
    for found in (second.input_backward, third.input_backward, first.weight_backward, third.weight_backward):
        assert found is not None
        assert found.at(5) > 0


def test_saved_bytes_are_those_that_autograd_keeps() -> None:
    linear = measure({"cpu": CPU}, [("only", nn.Linear(4, 3))]).units[0]
    # Of each sample: the input, the log-probabilities of the loss, the target; and one number for the batch.
    assert linear.activation_bytes == 4 * 4 + 4 * 3 + 8 + 4 / 5
    assert linear.flop == 2 * 4 * 3
    assert linear.num_parameters == 4 * 3 + 3


def test_what_two_units_save_is_there_once_where_both_are_in_one_place() -> None:
    torch.manual_seed(0)
    chain = [(f"unit{n}", nn.Sequential(nn.Linear(4, 4), nn.ReLU())) for n in range(3)]
    profile = measure({"cpu": CPU}, chain)
    whole = nn.Sequential(*(module for _, module in chain))
    target = torch.tensor([0, 1, 2, 0, 1])
    saved = count_step(whole, torch.randn(5, 4), lambda output: loss(output, target), is_first=True).saved_bytes
    assert [unit.shared_bytes for unit in profile.units] == [16, 16, 0]
    assert 5 * sum(unit.activation_bytes - unit.shared_bytes for unit in profile.units) == saved

    def saved_by(name: str, workers: int) -> float:
        plan = preset(name).at(workers=workers, microbatches=1, samples=5)
        device = Device(name="d", kind="cpu", type="cpu", host="h", memory_bytes=2**30, most_workers=3)
        machine = Machine(name="m", hosts=(Host(name="h"),), devices=(device,), links=(Link(bytes_per_s=1e9),))
        return 5 * sum(Sizes(compile_plan(plan, profile, machine.divided(workers))).saved)

    assert saved_by("ddp", 1) == saved
    assert saved_by("1f1b", 3) == saved + 5 * (16 + 16)  # each on a worker of its own
    assert saved_by("l2l", 1) == saved + 5 * (16 + 16)  # each is computed again when the one before has nothing saved
    assert saved_by("cotrain", 1) == saved


@pytest.mark.parametrize("name", ["ddp", "cotrain"])
def test_a_backward_takes_what_the_whole_model_takes(name: str) -> None:
    torch.manual_seed(0)
    chain = [(f"unit{n}", nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 4), nn.Tanh())) for n in range(3)]
    target = torch.tensor([0, 1, 2, 0, 1])
    model = nn.Sequential(*(module for _, module in chain))
    whole = count_step(model, torch.randn(5, 4), lambda output: loss(output, target), is_first=True)
    units = tuple(unit.replace(gradient_bytes=0) for unit in measure({"cpu": CPU}, chain).units)
    device = Device(name="d", kind="cpu", type="cpu", host="h", memory_bytes=2**30)
    machine = Machine(name="m", hosts=(Host(name="h"),), devices=(device,), links=(Link(bytes_per_s=1e9),))
    plan = preset(name).at(workers=1, microbatches=1, samples=5, steps=1)
    program = compile_plan(plan, Profile(name="net", units=units), machine)
    actions = program.workers[0].actions
    starts = range(len(actions))
    stays = Liveness(program).stays(0, starts, [start + 0.9 for start in starts], len(actions))
    backward = [start for start, action in enumerate(actions) if action.kind == "B"]
    beside = [stay for stay in stays if stay.value[0] not in "wdo"]
    taken = [sum(stay.size_bytes for stay in beside if stay.birth <= at < stay.death) for at in backward]
    assert max(taken) == pytest.approx(whole.saved_bytes + whole.backward_work_bytes)


class TooLarge(nn.Linear):
    """A linear layer whose pass with gradients has no memory for more than two samples."""

    def forward(self, x):
        if torch.is_grad_enabled() and len(x) > 2 and type(x) is torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_a_size_without_memory_is_left_out_and_the_others_do() -> None:
    torch.manual_seed(0)
    chain = [("first", nn.Linear(4, 6)), ("last", TooLarge(6, 3))]

    def sample(count):
        return UnitSample(chain, torch.randn(count, 4), torch.zeros(count, dtype=torch.long), loss)

    profile = measure_profile("net", [sample(1), sample(5)], (), {"cpu": CPU}, make_update)
    first, last = (unit.times["cpu"] for unit in profile.units)
    assert not first.is_estimated
    assert not last.is_estimated
    assert last.forward.at(1) > 0
    assert last.forward.at(5) == pytest.approx(5 * last.forward.at(1))  # one size gives no fixed part


def test_a_unit_without_memory_for_any_size_is_estimated() -> None:
    chain = [("first", nn.Linear(4, 6)), ("last", TooLarge(6, 3))]
    unit_sample = UnitSample(chain, torch.randn(5, 4), torch.zeros(5, dtype=torch.long), loss)
    profile = measure_profile("net", [unit_sample], (), {"cpu": CPU}, make_update)
    assert profile.units[1].times["cpu"].is_estimated
    assert "last" in profile.estimated["cpu"]
