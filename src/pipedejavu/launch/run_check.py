"""The model check of `train`: once, on the first rank, before any worker starts."""

from collections.abc import Sequence

from pipedejavu.facts import InputError
from pipedejavu.launch.rank_group import RankGroup
from pipedejavu.model_check.check import Checked, Sample, check_model
from pipedejavu.planner.worker_host import torch_device
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.task import Prepared, draw, prepare

_OPTION = "--no-check-model"


def check_run(options: TrainOptions, program: Program, ranks: RankGroup, prepared: Sequence[Prepared]) -> str:
    """Compares the model with its units; all ranks raise the InputError if they differ.

    Returns what `check_model` says. `prepared` is what the model was measured with, if it was.
    """
    refusal, remark = b"", b""
    if ranks.is_first:
        begins = program.plan.cut.begins
        job, batches = prepared[0] if prepared else prepare(options.replace(weights=None), program.sizes, begins)
        task, size = batches.task, max(program.sizes)
        samples = [Sample(*draw(task.data, options.seed, range(n * size, (n + 1) * size))) for n in range(2)]
        asked = Checked(task.model, batches.cut, job, task.loss, program, samples)
        try:
            remark = check_model(asked, torch_device(program.machine, program.devices[0]), _OPTION).encode()
        except InputError as error:
            refusal = str(error).encode()
    if refusal := ranks.share(refusal):
        raise InputError(refusal.decode())
    return ranks.share(remark).decode()
