"""The ranks that torchrun started for one run, on one host or several; nothing is taken for a file that all can read.

What passes between ranks are bytes: JSON records and safetensors, nothing that is unpickled.
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
"""How long ranks wait for each other at the start."""
MEETING_STEP_S = 0.05
LAST_WORD_S = 1.0
"""How long a rank that has lost another waits for the first of its host to say so."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankGroup:
    """One rank's view of all; a process that torchrun did not start is a team of its own."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.store: Store | None = None
        self.heartbeat: RankHeartbeat | None = None
        self.watchdog: HangWatchdog | None = None
        self.checkpoint_dir: CheckpointDir | None = None
        """The run's checkpoints, once it has a folder."""
        self.is_on_one_host = True

    @classmethod
    def join(cls) -> "RankGroup":
        """Meets the other ranks of torchrun's environment; raises InputError where they cannot meet."""
        ranks, given = cls(), {name: os.environ.get(name, "") for name in _NEEDED}
        if not (given["RANK"] and given["WORLD_SIZE"]):
            return ranks
        missing = [name for name, text in given.items() if not text]
        if missing:
            raise InputError(f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} not; start ranks with torchrun")
        ranks.rank, ranks.size = int(given["RANK"]), int(given["WORLD_SIZE"])
        ranks.is_on_one_host = ranks.size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == given["WORLD_SIZE"]
        if ranks.is_on_one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif not os.environ.get("GLOO_SOCKET_IFNAME"):
            raise InputError(
                f"{ranks.size} ranks are not all on this host, and what passes between them is neither encrypted nor"
                " authenticated; set GLOO_SOCKET_IFNAME, on each host, to the interface of a network that you trust"
            )
        where = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
        try:
            meeting = rendezvous("env://", timeout=timedelta(seconds=MEETING_S))
            store = next(meeting)[0]
            ranks.store = PrefixStore(meet(store, ranks.rank, ranks.size), store)
        except (DistNetworkError, DistStoreError) as error:
            if "EADDRINUSE" in str(error):
                raise InputError(f"the port of {where} is in use; set MASTER_PORT to a free one") from None
            raise InputError(
                f"rank {ranks.rank} did not meet the others at {where} within {MEETING_S} s; check that all"
                f" {ranks.size} ranks were started and that MASTER_ADDR and MASTER_PORT can be reached ({error})"
            ) from None
        ranks._connect(ranks.store)
        return ranks

    def _connect(self, store: Store) -> None:
        """Opens the connections between all ranks; one that cannot ends this process with the reason."""
        try:
            dist.init_process_group("gloo", store=PrefixStore("group", store), rank=self.rank, world_size=self.size)
        except RuntimeError as error:
            name = os.environ.get("GLOO_SOCKET_IFNAME")
            found = f"GLOO_SOCKET_IFNAME is '{name}'" if name else "GLOO_SOCKET_IFNAME is not set"
            remedy = "set it, on each host, to the network interface that leads to the others"
            reason = str(error).rpartition("] ")[2].partition(", remote")[0]
            self.leave(InputError(f"ranks that have met cannot connect to each other: {reason} ({found}; {remedy})"))
        if self.size > 1:
            self.heartbeat = RankHeartbeat(PrefixStore("pulse", store), self.rank, self.size, self.miss, self._word)

    @property
    def is_first(self) -> bool:
        """Whether this rank plans and prints."""
        return self.rank == 0

    @property
    def is_launched(self) -> bool:
        """Whether torchrun started it."""
        return self.store is not None

    def worker_host(self) -> WorkerHost:
        """Returns where this rank runs."""
        return read_worker_host(self._host, self._local_rank)

    def worker_hosts(self) -> tuple[WorkerHost, ...]:
        """Returns where each rank runs, on all of them; nothing for a process that torchrun did not start."""
        if not self.is_launched:
            return ()
        return tuple(WorkerHost.from_json(found) for found in self.share_all(self.worker_host().to_json().encode()))

    @property
    def _host(self) -> str:
        """Hosts are told apart by torchrun's number of them."""
        name, number = platform.node() or "host", os.environ.get("GROUP_RANK", str(self.rank))
        return name if self.is_on_one_host else f"{name}-{number}"

    @property
    def _local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def share(self, data: bytes, source: int = 0) -> bytes:
        """Gives everyone the bytes of one rank."""
        if not self.is_launched:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, source)
        vector = _vector(data) if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        if len(vector):
            dist.broadcast(vector, source)
        return vector.numpy().tobytes()

    def share_all(self, data: bytes) -> list[bytes]:
        """Gives everyone the bytes of each rank."""
        return [self.share(data, source) for source in range(self.size)]

    def collect(self, data: bytes) -> list[bytes]:
        """Brings the bytes of every rank to the first; returns nothing elsewhere."""
        if not self.is_first:
            dist.send(torch.tensor([len(data)]), 0)
            dist.send(_vector(data), 0)
            return []
        found = [data]
        for rank in range(1, self.size):
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank)
            vector = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(vector, rank)
            found.append(vector.numpy().tobytes())
        return found

    def part(self) -> None:
        """Meets the others for the last time; from now on each may leave unmissed."""
        dist.barrier()
        if self.heartbeat:
            self.heartbeat.stop()

    def keep_vigil(self, options: TrainOptions) -> HangWatchdog:
        """Returns the vigil over this rank's lanes, which ends the process, and lets others miss it in time."""
        if self.heartbeat:
            self.heartbeat.allow(options.hang_after_s)
        self.watchdog = HangWatchdog(self.rank, self._end_hung)
        return self.watchdog

    def _end_hung(self, trace: str, sentence: str) -> None:
        print_error(f"{trace}pipedejavu: {self._with_rest(sentence)}")
        os._exit(1)

    def _word(self) -> HeartbeatMessage:
        return HeartbeatMessage(self._host, os.getpid(), self.watchdog.describe() if self.watchdog else "its start")

    def miss(self, other: int, silent_s: float, word: HeartbeatMessage | None = None) -> None:
        """Ends this process because another rank has fallen silent, and that one too if the same agent started it."""
        last = f"; it was at {word.doing}" if word else ""
        if word and word.host == self._host:
            # torchrun would ask a process that cannot hear to end, and wait for that half a minute.
            _end_sibling(word.pid)
            self._stop_host(f"rank {other} was not heard for {silent_s:.0f} s{STUCK}{last}")
        self._stop_host(f"rank {other} was not heard for {silent_s:.0f} s: its host or the network to it is gone{last}")

    def _stop_host(self, reason: str) -> None:
        """Ends this process with a sentence that the first rank of each host says for all of it."""
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
        """Ends a process that torchrun started, and tells of the error that ends it, unless another has told the same.

        The interpreter's own shutdown would wait for lanes that wait for others, and now and then aborts a process
        whose C++ threads are still about.
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
        """Prints what no other rank has printed."""
        is_first = True
        with suppress(RuntimeError):  # the store may have gone with its rank
            is_first = self.store is None or self.store.add(f"told/{text}", 1) == 1
        if is_first:
            print_error(text)


def meet(store: Store, rank: int, size: int) -> str:
    """Returns a name that the ranks of this start have in common, and nobody before them had.

    torchrun starts ranks again with the store of those that have failed, whose addresses nobody may read; its counts of
    restarts differ from host to host. So each rank writes a word of its own, and the first answers every word that it
    finds, also the old ones, until all ranks have heard it.
    """
    word = secrets.token_hex(8)
    if rank:
        store.set(f"hello/{rank}", word)
        name = store.get(f"answer/{word}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return name
    missing, last_s = {*range(1, size)}, time.monotonic() + MEETING_S
    while missing:
        for other in [other for other in missing if store.check([f"hello/{other}"])]:
            store.set(f"answer/{store.get(f'hello/{other}').decode()}", word)
        missing -= {other for other in missing if store.check([f"heard/{word}/{other}"])}
        if time.monotonic() > last_s:
            raise DistStoreError(f"rank {min(missing)} is missing")
        time.sleep(MEETING_STEP_S if missing else 0.0)
    return word


def _vector(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _end_sibling(pid: int) -> None:
    """Ends a process that has the same parent as this one, and no other."""
    with suppress(OSError, ValueError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getppid():
            os.kill(pid, signal.SIGKILL)
