"""The model check of `train`, which rank 0 runs once before any worker starts."""

from pipedejavu.facts import InputError
from pipedejavu.model_check.check import Checked, Sample, check_model
from pipedejavu.planner.worker_host import torch_device
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.source.task import Prepared, draw, prepare

_OPTION = "--no-check-model"


def check_run(options: TrainOptions, program: Program, ranks: RankGroup, prepared: list[Prepared]) -> str:
    """Compares the model with the units it is cut into; raises InputError on all ranks if they differ.

    Returns what could not be compared, or nothing. `prepared` holds the model that was measured, if it was; else the
    model is built, and put there.
    """
    refusal, remark = b"", b""
    if ranks.is_first:
        begins = program.plan.cut.begins
        if not prepared:
            prepared.append(prepare(options.replace(weights=None), program.sizes, begins))
        job, batches = prepared[0]
        task, size = batches.task, max(program.sizes)
        samples = [Sample(*draw(task.data, options.seed, range(n * size, (n + 1) * size))) for n in range(2)]
        checked = Checked(task.model, batches.cut, job, task.loss, program, samples)
        try:
            remark = check_model(checked, torch_device(program.machine, program.devices[0]), _OPTION).encode()
        except InputError as error:
            refusal = str(error).encode()
    if refusal := ranks.broadcast(refusal):
        raise InputError(refusal.decode())
    return ranks.broadcast(remark).decode()
