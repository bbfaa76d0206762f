"""The model check of `train`: once, on the first rank, before any worker starts."""

from collections.abc import Sequence

from pipedejavu.facts import InputError
from pipedejavu.program import Program
from pipedejavu.train.model_check import Checked, Sample, check_model
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.site import torch_device
from pipedejavu.train.task import Prepared, draw, prepare
from pipedejavu.train.team import Team

_OPTION = "--no-check-model"


def check_run(options: TrainOptions, program: Program, team: Team, prepared: Sequence[Prepared]) -> str:
    """Compares the model with its units; all ranks raise the InputError if they differ.

    Returns what `check_model` says. `prepared` is what the model was measured with, if it was.
    """
    refusal, remark = b"", b""
    if team.is_first:
        begins = program.plan.cut.begins
        job, batches = prepared[0] if prepared else prepare(options.but(weights=None), program.sizes, begins)
        task, size = batches.task, max(program.sizes)
        samples = [Sample(*draw(task.data, options.seed, range(n * size, (n + 1) * size))) for n in range(2)]
        asked = Checked(task.model, batches.cut, job, task.loss, program, samples)
        try:
            remark = check_model(asked, torch_device(program.machine, program.devices[0]), _OPTION).encode()
        except InputError as error:
            refusal = str(error).encode()
    if refusal := team.share(refusal):
        raise InputError(refusal.decode())
    return team.share(remark).decode()
