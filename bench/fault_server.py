"""A parameter server whose workers die: the others go on in the same run, and its log replays."""

import random
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fault_run import STEPS, Attempt, Fault
from fault_worker import PHASES

PLAN, WORKERS = "parameter-server", 3
SERVER_PHASES = {f"SIGKILL of a worker: {phase}": phase for phase in ("forward", "backward", "send", "saving a part")}
"""By fault, the phase in which it happens."""


class Outlived(NamedTuple):
    """What became of a run whose worker died."""

    went_on: bool
    """Whether it ended well, without another start, and its audit passed."""
    has_all_steps: bool
    is_named: bool
    longest_s: float
    """The longest time between the losses of two steps."""


def lose_worker(name: str, folder: Path, luck: random.Random) -> Outlived:
    """Kills one of the workers at a random call of a phase."""
    phase, rank = SERVER_PHASES[name], luck.randrange(WORKERS)
    run = Attempt(folder, Fault(name, 0, PLAN), (phase, "SIGKILL", rank, luck.randint(1, PHASES[phase][2])))
    err = run.finish(process := run.start("--workers", str(WORKERS), "--audit", is_faulty=True))
    rows = run.rows()
    times = [row["elapsed_s"] for row in rows if "step" in row]
    left = [row["worker"] for row in rows if "left" in row]
    return Outlived(
        went_on=process.returncode == 0,
        has_all_steps=[row["step"] for row in rows if "step" in row] == [*range(1, STEPS + 1)],
        is_named=left == [rank] and f"worker {rank} was ended by SIGKILL" in err,
        longest_s=max((after - before for before, after in pairwise(times)), default=0.0),
    )
