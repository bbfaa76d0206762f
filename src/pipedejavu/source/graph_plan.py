"""What graph networks ask of a plan."""

from pipedejavu.facts import InputError
from pipedejavu.program import ActionKind, Program, ValueKind
from pipedejavu.zoo import is_graph_model


def check_blocks(model: str, program: Program) -> None:
    """Raises InputError if a graph network's layers are on several workers.

    Workers exchange the shapes of a value once, and a sampled block has other shapes in each microbatch.
    """
    sends = (a for worker in program.workers for a in worker.actions if a.kind == ActionKind.SEND)
    if is_graph_model(model) and any(a.what == ValueKind.ACTIVATION for a in sends):
        raise InputError(
            f"plan '{program.plan.name}' cuts zoo:{model} into stages on several workers, which exchange values of one"
            " shape, and each batch of a graph has another one; use a plan that keeps the model whole, such as"
            " preset:hyscale, preset:ddp or preset:coarse"
        )
