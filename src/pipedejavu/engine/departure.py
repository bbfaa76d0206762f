"""Workers that die while the others go on: which programs allow it, and what the log of the server says of them.

A server that applies each push by itself waits for no worker on behalf of another, so it can go on without one. A push
is one message, which arrives whole or not at all. The server notes the last update of a replica that has left.
"""

from collections.abc import Sequence

from pipedejavu.engine.job import Applied, Log, Read
from pipedejavu.facts import InputError
from pipedejavu.program import Program


def outlives_workers(program: Program) -> bool:
    """Whether the server of a program, which is its last worker, continues if another worker dies.

    Every replica is one worker that pushes one piece to one server, in the host's memory.
    """
    plan = program.plan
    has_server = plan.reduce.wire == "server" and plan.reduce.gate == "lock" and plan.place.servers == 1
    is_alone = len(program.workers) == program.num_replicas + 1 and len(program.pieces) == 1
    return has_server and is_alone and program.machine.device(program.devices[-1]).type == "cpu"


def replica_of(program: Program, worker: int) -> int:
    """Returns the replica that a worker of such a program trains."""
    ((_, replica),) = program.held(worker)
    return replica


def log_of_dead(server: Log, replica: int) -> Log:
    """Returns the log of a worker that has died, which is lost with it, from that of its server.

    A worker makes a push with the weights that the server has sent it in reply to the push before.
    """
    pushes = [event for event in server.events if isinstance(event, Applied) and event.replica == replica]
    reads = [
        Read(push.piece, replica, microbatch, push.version - 1) for push in pushes for microbatch in push.microbatches
    ]
    return Log(events=[*reads])


def last_updates(program: Program, logs: Sequence[Log]) -> dict[int, int]:
    """Returns the last update of each replica that has left; raises InputError if the plan outlives no worker."""
    left = {replica: last for log in logs for replica, last in log.left.items()}
    if left and not outlives_workers(program):
        raise InputError(f"replica {min(left)} left the run, and plan '{program.plan.name}' goes on without none")
    return left
