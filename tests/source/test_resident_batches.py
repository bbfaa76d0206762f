"""Data on the devices from the start: the samples of `SampleOrder`, and what cannot be held."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.launch import RankGroup, plan_run
from pipedejavu.launch.resident_check import check_resident
from pipedejavu.plan import preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.run import TrainOptions
from pipedejavu.source.resident_batches import ResidentBatches, resident_bytes
from pipedejavu.source.task import Prepared, SampleOrder, prepare
from pipedejavu.zoo.dataset import Dataset
from tests.engine.case import machine_of, profile_of


def made(options: TrainOptions, name: str = "1f1b", workers: int = 2):
    """The order of samples of a run with microbatches of 3 and 2 samples, and its program."""
    job, order = prepare(options, (3, 2))
    order = SampleOrder(order.task, order.cut, (3, 2), options.seed)
    plan = preset(name).at(workers=workers, microbatches=2, samples=3)
    return Prepared(job, order), compile_plan(
        plan, profile_of(list(job.units), len(job.ties)), machine_of(plan, "cpu"), fold=False
    )


@pytest.mark.parametrize(
    ("model", "data"), [("mlp", "random:11"), ("gpt-tiny", "random:11"), ("bert-tiny", "random:11")], ids=str
)
def test_microbatches_are_those_of_the_host_through_all_epochs(model: str, data: str) -> None:
    prepared, program = made(TrainOptions(model=model, data=data, seed=4))
    order = prepared.batches
    first, last = (ResidentBatches(order, program, worker) for worker in (0, 1))
    for microbatch in range(9):  # two epochs of eleven samples and a bit, in microbatches of three and two
        assert torch.equal(first.inputs(microbatch), order.inputs(microbatch))
        assert torch.equal(last.targets(microbatch), order.targets(microbatch))
        assert first.count(microbatch) == order.count(microbatch)
        assert first.length(microbatch) == order.length(microbatch)
    inputs, targets = order.task.data.batch(range(11))
    assert [resident_bytes(order, program, worker) for worker in (0, 1)] == [inputs.nbytes, targets.nbytes]
    assert first._targets is last._inputs is None  # each worker holds what its pieces read


def test_data_that_does_not_fit_is_refused_with_numbers() -> None:
    options = TrainOptions(model="mlp", data="random:11", data_on="device")
    prepared, program = made(options)
    check_resident(options, program, RankGroup(), [prepared])
    need = sum(unit.parameter_bytes for unit in program.profile.units)
    devices = tuple(device.replace(memory_bytes=8 * need) for device in program.machine.devices)
    small = replace(program, machine=program.machine.replace(devices=devices))
    check_resident(options, small, RankGroup(), [prepared])
    many = prepare(TrainOptions(model="mlp", data="random:100000"), (3, 2))
    with pytest.raises(InputError, match=r"the 100,000 samples take 299\.1 MiB of 'c0', and training .* which is more"):
        check_resident(options, small, RankGroup(), [many])


class Ragged(Dataset):
    """Samples whose inputs have no row for each."""

    def __len__(self) -> int:
        return 4

    def batch(self, indices):
        return torch.zeros(2 * len(indices), 3), torch.zeros(len(indices))


def test_data_without_rows_and_batches_that_are_fetched_ahead_are_refused() -> None:
    prepared, program = made(TrainOptions(model="mlp", data="random:11"))
    prepared.batches.task = replace(prepared.batches.task, data=Ragged())
    with pytest.raises(InputError, match=r"needs tensors with a row per sample, and one sample has a shape \(2, 3\)"):
        resident_bytes(prepared.batches, program, 0)
    ahead = replace(program, plan=program.plan.replace(order=program.plan.order.replace(prefetch=1)))
    with pytest.raises(InputError, match="copies batches to the device ahead of their use"):
        resident_bytes(prepared.batches, ahead, 0)


def test_a_run_asks_before_it_starts() -> None:
    options = TrainOptions(model="sage", data="graph:power:1000", data_on="device")
    with pytest.raises(InputError, match="this data is drawn anew in each update; leave it out"):
        plan_run(options, preset("ddp").at(workers=1, samples=4))
