"""The ranks that torchrun started for one run, on one host or several; they need not share a file system.

Ranks exchange bytes, JSON records and safetensors, and unpickle nothing.
"""

import os
import platform
import secrets
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from pipedejavu.facts import InputError
from pipedejavu.facts.printable import print_error, tell
from pipedejavu.health.failure import is_lost, with_rest
from pipedejavu.health.heartbeat import HeartbeatMessage, RankHeartbeat
from pipedejavu.health.watchdog import STUCK, HangWatchdog
from pipedejavu.planner.worker_host import WorkerHost, read_worker_host
from pipedejavu.run.options import TrainOptions
from pipedejavu.store import CheckpointDir

MEETING_S = 300
"""How long ranks wait for each other at the start of a run."""
MEETING_STEP_S = 0.05
LAST_WORD_S = 1.0
"""How long a rank that lost another waits for the first rank of its host to report that."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankGroup:
    """One rank's view of all ranks; a process that torchrun did not start is a group of one."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.store: Store | None = None
        self.heartbeat: RankHeartbeat | None = None
        self.watchdog: HangWatchdog | None = None
        self.checkpoint_dir: CheckpointDir | None = None
        """The run's checkpoints, once the run has a folder."""
        self.is_on_one_host = True

    @classmethod
    def join(cls) -> "RankGroup":
        """Joins the ranks that torchrun's environment names; raises InputError if they cannot meet.

        If torch.distributed is initialised already, its ranks are joined.
        """
        if dist.is_initialized():
            return cls._of_initialized()
        ranks, variables = cls(), {name: os.environ.get(name, "") for name in _NEEDED}
        if not (variables["RANK"] and variables["WORLD_SIZE"]):
            return ranks
        missing = [name for name, text in variables.items() if not text]
        if missing:
            raise InputError(f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} not; start ranks with torchrun")
        ranks.rank, ranks.size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        ranks.is_on_one_host = ranks.size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"]
        if ranks.is_on_one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif not os.environ.get("GLOO_SOCKET_IFNAME"):
            raise InputError(
                f"{ranks.size} ranks are not all on this host, and what passes between them is neither encrypted nor"
                " authenticated; set GLOO_SOCKET_IFNAME, on each host, to the interface of a network that you trust"
            )
        address = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        try:
            meeting = rendezvous("env://", timeout=timedelta(seconds=MEETING_S))
            store = next(meeting)[0]
            ranks.store = PrefixStore(meet(store, ranks.rank, ranks.size), store)
        except (DistNetworkError, DistStoreError) as error:
            if "EADDRINUSE" in str(error):
                raise InputError(f"the port of {address} is in use; set MASTER_PORT to a free one") from None
            raise InputError(
                f"rank {ranks.rank} did not meet the others at {address} within {MEETING_S} s; check that all"
                f" {ranks.size} ranks were started and that MASTER_ADDR and MASTER_PORT can be reached ({error})"
            ) from None
        ranks._connect(ranks.store)
        return ranks

    @classmethod
    def _of_initialized(cls) -> "RankGroup":
        """Returns the ranks of the default process group that the user's program made."""
        if "cpu:gloo" not in dist.get_backend_config():
            raise InputError(
                f"torch.distributed was initialised with {dist.get_backend_config()}, and ranks exchange tensors of the"
                " CPU; call init_process_group('cpu:gloo,cuda:nccl') or ('gloo'), or leave it to the Trainer"
            )
        ranks = cls()
        ranks.rank, ranks.size = dist.get_rank(), dist.get_world_size()
        ranks.is_on_one_host = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.size)) == str(ranks.size)
        ranks.store = PrefixStore("pipedejavu", dist.distributed_c10d._get_default_store())
        return ranks

    def _connect(self, store: Store) -> None:
        """Connects all ranks; ends this process, with the reason, if that fails."""
        try:
            dist.init_process_group("gloo", store=PrefixStore("group", store), rank=self.rank, world_size=self.size)
        except RuntimeError as error:
            name = os.environ.get("GLOO_SOCKET_IFNAME")
            setting = f"GLOO_SOCKET_IFNAME is '{name}'" if name else "GLOO_SOCKET_IFNAME is not set"
            remedy = "set it, on each host, to the network interface that leads to the others"
            reason = str(error).rpartition("] ")[2].partition(", remote")[0]
            self.leave(InputError(f"ranks that have met cannot connect to each other: {reason} ({setting}; {remedy})"))
        if self.size > 1:
            self.heartbeat = RankHeartbeat(PrefixStore("pulse", store), self.rank, self.size, self.miss, self._message)

    @property
    def is_first(self) -> bool:
        """Whether this rank plans, prints and writes the run folder."""
        return self.rank == 0

    @property
    def is_launched(self) -> bool:
        """Whether torchrun started this process."""
        return self.store is not None

    def worker_host(self) -> WorkerHost:
        """Returns the host of this rank."""
        return read_worker_host(self._host, self._local_rank)

    def worker_hosts(self) -> tuple[WorkerHost, ...]:
        """Returns the host of each rank; nothing if torchrun did not start this process. All ranks call it."""
        if not self.is_launched:
            return ()
        return tuple(WorkerHost.from_json(text) for text in self.all_gather(self.worker_host().to_json().encode()))

    @property
    def _host(self) -> str:
        """The name of this host, with torchrun's number of it if there are several."""
        name, number = platform.node() or "host", os.environ.get("GROUP_RANK", str(self.rank))
        return name if self.is_on_one_host else f"{name}-{number}"

    @property
    def _local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Returns the bytes of one rank, on all ranks; all of them call it."""
        if not self.is_launched:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, source)
        vector = _vector(data) if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        if len(vector):
            dist.broadcast(vector, source)
        return vector.numpy().tobytes()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank, on all ranks; all of them call it."""
        return [self.broadcast(data, source) for source in range(self.size)]

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank on the first rank, and nothing on the others; all of them call it."""
        if not self.is_first:
            dist.send(torch.tensor([len(data)]), 0)
            dist.send(_vector(data), 0)
            return []
        gathered = [data]
        for rank in range(1, self.size):
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank)
            vector = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(vector, rank)
            gathered.append(vector.numpy().tobytes())
        return gathered

    def finish(self) -> None:
        """Waits for all ranks a last time and stops the heartbeat; from then on a rank may exit."""
        dist.barrier()
        if self.heartbeat:
            self.heartbeat.stop()

    def start_watchdog(self, options: TrainOptions) -> HangWatchdog:
        """Returns a watchdog that ends this process if a lane hangs, and sets how long other ranks wait for it."""
        if self.heartbeat:
            self.heartbeat.allow(options.hang_after_s)
        self.watchdog = HangWatchdog(self.rank, self._end_hung)
        return self.watchdog

    def _end_hung(self, trace: str, sentence: str) -> None:
        print_error(f"{trace}pipedejavu: {self._with_rest(sentence)}")
        os._exit(1)

    def _message(self) -> HeartbeatMessage:
        return HeartbeatMessage(self._host, os.getpid(), self.watchdog.describe() if self.watchdog else "its start")

    def miss(self, other: int, silent_s: float, message: HeartbeatMessage | None = None) -> None:
        """Ends this process because another rank is silent, and that rank too if the same agent started it.

        `message` is the last heartbeat of the silent rank.
        """
        last = f"; it was at {message.doing}" if message else ""
        if message and message.host == self._host:
            # torchrun would send it SIGTERM, which a hung process ignores, and wait for half a minute.
            _end_sibling(message.pid)
            self._stop_host(f"rank {other} was not heard for {silent_s:.0f} s{STUCK}{last}")
        self._stop_host(f"rank {other} was not heard for {silent_s:.0f} s: its host or the network to it is gone{last}")

    def _stop_host(self, reason: str) -> None:
        """Ends this process; the first rank of each host prints the reason for all of its ranks."""
        if self._local_rank == 0:
            stop = f"the ranks of host '{self._host}' stop, and the run folder keeps the metrics so far"
            tell(self._with_rest(f"{reason}; {stop}"))
        else:
            time.sleep(LAST_WORD_S)  # torchrun ends all ranks of a host as soon as one has ended
        sys.stdout.flush()
        os._exit(1)

    def _with_rest(self, text: str) -> str:
        return with_rest(text, self.checkpoint_dir.steps() if self.checkpoint_dir else ())

    def leave(self, error: BaseException | None = None) -> None:
        """Ends a process that torchrun started, and prints its error unless another rank has printed the same.

        Skips the interpreter's shutdown, which would wait for lanes that are blocked, and sometimes aborts while C++
        threads are still running.
        """
        if not self.is_launched:
            return
        code = 0 if error is None else 2 if isinstance(error, InputError) else 1
        if isinstance(error, SystemExit):
            sys.stdout.flush()
            os._exit(int(error.code or 0))
        if error is not None and is_lost(error):
            self._stop_host("the connection to another rank is lost; see what that one or its host says")
        if isinstance(error, InputError):
            self.tell(f"pipedejavu: {error}")
        elif error is not None and not isinstance(error, KeyboardInterrupt):
            lines = "".join(traceback.format_exception(error))
            self.tell(f"{lines}pipedejavu: worker {self.rank} raised {type(error).__name__}")
        sys.stdout.flush()
        os._exit(code)

    def tell(self, text: str) -> None:
        """Prints a text unless another rank has printed it."""
        is_first = True
        with suppress(RuntimeError):  # the store may have gone with its rank
            is_first = self.store is None or self.store.add(f"told/{text}", 1) == 1
        if is_first:
            print_error(text)


def meet(store: Store, rank: int, size: int) -> str:
    """Returns a name that all ranks of this start share, and that no earlier start had.

    torchrun restarts ranks with the same store, which still holds the addresses of the failed ranks, and its restart
    counts differ between hosts. So each rank writes a token of its own, and rank 0 answers every token that it reads,
    old ones too, until all ranks have confirmed the answer.
    """
    token = secrets.token_hex(8)
    if rank:
        store.set(f"hello/{rank}", token)
        name = store.get(f"answer/{token}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return name
    missing, last_s = {*range(1, size)}, time.monotonic() + MEETING_S
    while missing:
        for other in [other for other in missing if store.check([f"hello/{other}"])]:
            store.set(f"answer/{store.get(f'hello/{other}').decode()}", token)
        missing -= {other for other in missing if store.check([f"heard/{token}/{other}"])}
        if time.monotonic() > last_s:
            raise DistStoreError(f"rank {min(missing)} is missing")
        time.sleep(MEETING_STEP_S if missing else 0.0)
    return token


def _vector(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _end_sibling(pid: int) -> None:
    """Kills a process if it has the same parent as this one."""
    with suppress(OSError, ValueError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getppid():
            os.kill(pid, signal.SIGKILL)
