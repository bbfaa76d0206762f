"""Two processes of this host, and the speed of messages between them: Gloo, shared memory and, with two GPUs, NCCL.

Messages and sums through shared memory use the channels and groups of runs.

The processes live as long as the survey and run the same commands; most are a message out and a message back.
"""

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.facts import end_with_parent, format_bytes
from pipedejavu.probe.series import TimedTrial
from pipedejavu.runtime.memory_channel import ReceiveEnd, SendEnd
from pipedejavu.runtime.memory_group import MemoryGroup
from pipedejavu.runtime.peer_socket import Address, PeerListener, PeerSocket, connect_all

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
LARGEST = SIZES[-1]
SUMS = (4 << 10, 1 << 20, 16 << 20)
"""Bytes of gradients in an all-reduce, packed from four tensors."""
SIDE = 512
"""Side of the square matrices multiplied beside messages."""
START_S, REPLY_S = 40.0, 20.0
"""How long to wait for the processes to start, and for a reply."""


class Pair:
    """Two processes that exchange messages; a context manager that ends them.

    A failure fails all trials of the pair, so NCCL, between the first two GPUs, uses a second pair.
    """

    def __init__(self, threads: int, *, uses_nccl: bool = False):
        self.threads, self.uses_nccl = threads, uses_nccl
        self.ends: list[Connection] = []
        self.processes: list[Any] = []
        self.fault = ""

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="pipedejavu-", dir=_shared_folder())
        for rank in range(2):
            here, there = context.Pipe()
            setup = (rank, self.folder.name, there, self.uses_nccl, self.threads)
            process = context.Process(target=_serve, args=setup, daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)
        return self

    def wait(self) -> None:
        """Waits until both processes have started; raises RuntimeError if one has not."""
        self._replies(START_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self.ends:
            with suppress(OSError):
                end.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
                process.join(5)
        self.folder.cleanup()

    def ask(self, name: str, size: int, count: int) -> float:
        """Runs a command in both processes; returns the seconds that it took in the first."""
        if self.fault:
            raise RuntimeError(self.fault)
        for end in self.ends:
            end.send((name, size, count))
        return self._replies(REPLY_S)

    def _replies(self, patience_s: float) -> float:
        """Returns the first process's reply; after one failure all further commands fail."""
        try:
            first_s, _ = (_reply(end, rank, patience_s) for rank, end in enumerate(self.ends))
        except RuntimeError as error:
            self.fault = str(error)
            raise
        return first_s

    def open_context(self, gpu: int) -> None:
        """Opens a CUDA context in the first process only."""
        self.ends[0].send(("open", gpu, 1))
        _reply(self.ends[0], 0, START_S)

    def trials(self) -> list[TimedTrial]:
        """Returns the trials of messages; 'both ways' counts both messages."""
        if self.uses_nccl:
            return self._messages("gpu0>gpu1", "nccl")
        memory = [self._message("cpu>cpu", "shared memory", size) for size in SIZES]
        return [
            *self._messages("cpu>cpu", "gloo"),
            *memory,
            *(
                TimedTrial("cpu>cpu", what, format_bytes(n), float(n), "B/s", self._run(what, n))
                for what in ("gloo sum", "memory sum")
                for n in SUMS
            ),
            TimedTrial(
                "cpu>cpu",
                "shared memory",
                "beside compute",
                float(LARGEST),
                "B/s",
                self._run("memory beside", LARGEST),
            ),
            TimedTrial("cpu>cpu", "compute", "alone", 1, "s", self._run("compute", SIDE)),
            TimedTrial("cpu>cpu", "compute", "beside messages", 1, "s", self._run("compute beside", SIDE)),
        ]

    def _messages(self, subject: str, transport: str) -> list[TimedTrial]:
        both = TimedTrial(
            subject, transport, "both ways", 2.0 * LARGEST, "B/s", self._run(f"{transport} both", LARGEST)
        )
        return [*(self._message(subject, transport, size) for size in SIZES), both]

    def _message(self, subject: str, transport: str, size: int) -> TimedTrial:
        return TimedTrial(subject, transport, format_bytes(size), float(size), "B/s", self._run(transport, size))

    def _run(self, name: str, size: int) -> Callable[[int], float]:
        return lambda count: self.ask(name, size, count)


def _reply(end: Connection, rank: int, patience_s: float) -> float:
    try:
        if not end.poll(patience_s):
            raise RuntimeError(f"process {rank} did not answer within {patience_s:g} s")
        reply = end.recv()
    except (EOFError, ConnectionError):
        raise RuntimeError(f"process {rank} ended") from None
    if isinstance(reply, str):
        raise RuntimeError(reply)
    return float(reply)


def _shared_folder() -> str | None:
    """Returns a folder in memory, or None if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _serve(rank: int, folder: str, end: Connection, uses_nccl: bool, threads: int) -> None:
    """Runs commands in one of the two processes until told to stop."""
    end_with_parent()
    try:
        peer = _Peer(rank, Path(folder), uses_nccl, threads)
        end.send(0.0)
        while (command := end.recv()) is not None:
            try:
                end.send(peer.do(*command))
            except (RuntimeError, OSError) as error:
                end.send(f"{type(error).__name__}: {error}")
    except (EOFError, KeyboardInterrupt, ConnectionError):
        pass  # the survey has ended
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(rank: int) -> list[PeerSocket]:
    """Returns this process's ends of three connections to the other one."""
    listener = PeerListener()
    raw = torch.frombuffer(bytearray("/".join(listener.address).encode()), dtype=torch.uint8)
    gathered = [torch.empty_like(raw) for _ in range(2)]
    dist.all_gather(gathered, raw)
    names = [part.numpy().tobytes().decode().split("/") for part in gathered]
    addresses = {number: Address(name, secret) for number, (name, secret) in enumerate(names)}
    sockets = connect_all(rank, listener, addresses, [(0, 1)] * 3)
    return [sockets[number] for number in range(3)]


class _Peer:
    """One of the two processes."""

    def __init__(self, rank: int, folder: Path, uses_nccl: bool, threads: int):
        if Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both are on this host
        torch.set_num_threads(threads)
        self.rank, self.other = rank, 1 - rank
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        self.nccl = dist.new_group(backend="nccl") if uses_nccl else None
        there, back, group = _connect(rank)
        self.sender = SendEnd(back if rank else there)
        self.receiver = ReceiveEnd(there if rank else back)
        self.group = MemoryGroup(rank, {self.other: group})
        self.out, self.back = torch.ones(LARGEST, dtype=torch.uint8), torch.ones(LARGEST, dtype=torch.uint8)
        self.left = torch.ones(SIDE, SIDE)

    def do(self, name: str, size: int, count: int) -> float:
        """Runs a command; returns the seconds per message or product, times `count`."""
        if name == "open":
            torch.ones(8, 8, device=f"cuda:{size}") @ torch.ones(8, 8, device=f"cuda:{size}")
            torch.cuda.synchronize(size)
            return 0.0
        if name == "compute":
            return self._timed(self._multiply, count)
        if name == "compute beside":
            return self._compute_beside(count)
        if name == "memory beside":
            return self._exchange_beside(size, count)
        if name == "shared memory":
            return self._timed(lambda: self._through_memory(size), count) / 2
        if name in ("gloo sum", "memory sum"):
            add_up = dist.all_reduce if name == "gloo sum" else self.group.add_up
            return sum(self._sum_after_compute(size, add_up) for _ in range(count))
        on_gpu = name.startswith("nccl")
        ends = (self.out[:size], self.back[:size]) if not on_gpu else self._on_gpu(size)
        if name.endswith("both"):
            return self._timed(lambda: self._swap(*ends), count)
        return self._timed(lambda: self._exchange(*ends), count) / 2

    def _on_gpu(self, size: int) -> tuple[Tensor, Tensor]:
        where = torch.device("cuda", self.rank)
        torch.cuda.set_device(where)
        return tuple(torch.ones(size, dtype=torch.uint8, device=where) for _ in range(2))  # type: ignore[return-value]

    def _timed(self, work: Callable[[], None], count: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            work()
        if self.nccl:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _multiply(self) -> None:
        self.left @ self.left

    def _exchange(self, out: Tensor, back: Tensor) -> None:
        """Sends a message and receives one back: two messages, one after the other."""
        group = self.nccl if out.is_cuda else None
        if self.rank == 0:
            dist.send(out, self.other, group=group)
            dist.recv(back, self.other, group=group)
        else:
            dist.recv(back, self.other, group=group)
            dist.send(out, self.other, group=group)

    def _swap(self, out: Tensor, back: Tensor) -> None:
        """Sends and receives at the same time."""
        group = self.nccl if out.is_cuda else None
        ops = [dist.P2POp(dist.isend, out, self.other, group), dist.P2POp(dist.irecv, back, self.other, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def _sum_after_compute(self, size: int, add_up: Callable[[Tensor], object]) -> float:
        """Packs tensors into one vector and all-reduces it, as workers do with gradients after they compute them.

        After compute the communication threads are asleep; an all-reduce right after another takes a fraction of this
        time.
        """
        parts = self.out[:size].view(torch.float32).chunk(4)
        dist.barrier()
        self._multiply()
        start = time.perf_counter()
        add_up(torch.cat(parts))
        return time.perf_counter() - start

    def _through_memory(self, size: int) -> None:
        """Sends a message through shared memory, and receives one back."""
        if self.rank == 1:
            self.receiver.receive()
        self.sender.send((self.out[:size],))
        if self.rank == 0:
            self.receiver.receive()

    def _exchange_beside(self, size: int, count: int) -> float:
        """Exchanges messages while both processes compute."""
        done = threading.Event()

        def compute() -> None:
            while not done.is_set():
                self._multiply()

        thread = threading.Thread(target=compute)
        thread.start()
        try:
            return self._timed(lambda: self._through_memory(size), count) / 2
        finally:
            done.set()
            thread.join()

    def _compute_beside(self, count: int) -> float:
        """Computes while messages are exchanged; the first process flags the last message."""
        done = threading.Event()
        is_last = torch.zeros(1, dtype=torch.uint8)

        def exchange() -> None:
            while True:
                is_last.fill_(done.is_set())
                if self.rank == 0:
                    dist.send(is_last, self.other)
                else:
                    dist.recv(is_last, self.other)
                self._through_memory(LARGEST)
                if is_last.item():
                    return

        dist.barrier()
        thread = threading.Thread(target=exchange)
        thread.start()
        start = time.perf_counter()
        if self.rank == 0:
            for _ in range(count):
                self._multiply()
            took_s = time.perf_counter() - start
            done.set()
        else:
            while thread.is_alive():
                self._multiply()
            took_s = 0.0
        thread.join()
        return took_s
