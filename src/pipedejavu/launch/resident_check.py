"""Whether data that lies on the devices from the start fits there, beside what training needs."""

from pipedejavu.analysis import verify
from pipedejavu.facts import InputError, format_bytes
from pipedejavu.launch.measure_plan import open_model
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.search.ranking import memory_needs
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.simulate import simulate
from pipedejavu.source.resident_batches import resident_bytes
from pipedejavu.source.task import Prepared


def check_resident(options: TrainOptions, program: Program, ranks: RankGroup, prepared: list[Prepared]) -> None:
    """Raises InputError on all ranks if data that is to lie on the devices does not fit.

    The first rank reads a sample of it, from the model in `prepared`, which it puts there if there is none.
    """
    refusal = b""
    if ranks.is_first and options.data_on == "device":
        try:
            if not prepared:
                prepared.append(open_model(options, program.plan))
            _check(program, prepared)
        except InputError as error:
            refusal = str(error).encode()
    if refusal := ranks.broadcast(refusal):
        raise InputError(refusal.decode())


def _check(program: Program, prepared: list[Prepared]) -> None:
    order, held = prepared[0].batches, dict[str, int]()
    for worker, device in enumerate(program.devices):
        held[device] = held.get(device, 0) + resident_bytes(order, program, worker)
    for need in memory_needs(simulate(program, verify(program)), {}):
        size = held.get(need.device, 0)
        if size and size + need.need_bytes > need.room_bytes:
            raise InputError(
                f"the {len(order.task.data):,} samples take {format_bytes(size)} of '{need.device}', and training"
                f" {format_bytes(need.need_bytes)}, which is more than the {format_bytes(need.room_bytes)} that it"
                " has; leave --data-on device out, or train on less data"
            )
