"""Feeds every reader with changed files: whatever a file holds, reading it gives a value or one sentence, and soon.

    python bench/fuzz.py                                # 10,000 files of all kinds, and a table of what became of them
    python bench/fuzz.py --files 500 --kinds manifest IDX --seed 7
    python bench/fuzz.py --kinds manifest --file 123    # one of them again, with its traceback

A file of each kind that can be read is changed: bits, cuts, splices, types and sizes in its JSON, nesting, keys given
twice, bytes that are no text; or there is a FIFO, a device, a link, a folder, nothing at all in its place. What it is
sealed or compressed with is made anew around most changes, so that what comes after is reached. Each is read in a
process that has a limit of time and of memory. Exits with 1 for anything but values and sentences (InputError).
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
from fuzz_kinds import KINDS, Kind

from pipedejavu.facts import InputError
from pipedejavu.facts.printable import printable

LIMIT_S = 5.0
MOST_GROWN_BYTES, MOST_MAPPED_BYTES = 1 << 29, 4 << 30
"""What reading one file may add to the memory of this process, and to what it has mapped."""
BATCH = 50
MOST_CONTAINERS = 1000
OUTCOMES = ("refused", "accepted", "tracebacks", "hangs", "memory")

ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, -0.0, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "-1 B", "1e999 s",
    "5 GB", "\n", "{", "{source!r}", "[z-a]", "*" * 50, "a" * 5000, [], {}, [[]], [{}], {"": 0}, {"name": []},
    {"a\nb": {}}, -(2**63), 2**63, 2**62, 10**15, [0, 2**62], [0, 2**63], [2**62, 2**62, 4], [10**3000] * 50, "../x",
    "/dev/zero", "part-00001.safetensors", "\x1b[2J", "[/b]", "\0", "é\u202e", "someone/kernel", 1 << 31, 4097,
]  # fmt: skip
TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"9" * 400, b"9" * 5000, b"-", b"e9", b"1e400", b"\\u", b"\\ud800", b"\n",
    b"\t", b"\0", b"nan", b"NaN", b"null", b"0", b".", b"=", b"\xff", b"\xf0\x9f\x92\xa9", b"\xed\xa0\x80",
    b"[" * 100_000, b'{"a":' * 5000, b"99999999999", b"\xff" * 6, b"\x1b[2J", b"(" * 2000, b"\r\n", b"\xef\xbb\xbf",
]  # fmt: skip


class Hang(BaseException):
    """Reading took longer than its limit."""


class Outcome(NamedTuple):
    """What became of one file."""

    kind: str
    number: int
    result: str
    text: str = ""
    time_s: float = 0.0


# How files change.


def change_bytes(data: bytes, luck: random.Random) -> bytes:
    """Flips bits, or puts, doubles or takes away some bytes."""
    changed = bytearray(data)
    for _ in range(luck.choice([1, 1, 1, 2, 4])):
        at = luck.randrange(len(changed) + 1)
        to = min(len(changed), at + luck.randint(0, 12))
        match luck.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << luck.randrange(8)
            case 1:
                changed[at:to] = b""
            case 2:
                changed[at:at] = luck.randbytes(luck.randint(1, 8))
            case 3:
                changed[at:to] = luck.choice(TOKENS)
            case 4:
                changed[at:to] = luck.randbytes(to - at)
            case _:
                changed[at:at] = changed[at:to] * luck.randint(1, 40)
    return bytes(changed)


def splice(data: bytes, luck: random.Random) -> bytes:
    """Puts a part of a file of any kind in the place of another part."""
    other = luck.choice([data, luck.choice(list(KINDS.values())).good])
    start, at = luck.randrange(len(other) + 1), luck.randrange(len(data) + 1)
    return data[:at] + other[start : start + luck.randint(0, 400)] + data[at + luck.randint(0, 400) :]


def change_json(data: bytes, luck: random.Random) -> bytes:
    """Changes what the JSON in a file says, in one of its lines or all of it; other bytes than JSON's stay."""
    start, end = data.find(b"{"), data.rfind(b"}") + 1
    if start < 0 or end <= start:
        return change_bytes(data, luck)
    texts = [data[start:end]]
    try:
        json.loads(texts[0])
    except ValueError:
        texts = data[start:end].splitlines()
    at = luck.randrange(len(texts))
    try:
        plain = json.loads(texts[at])
    except ValueError:
        return change_bytes(data, luck)
    try:
        for _ in range(luck.choice([1, 1, 2, 3])):
            _change(plain, luck)
        text = json.dumps(plain, ensure_ascii=luck.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:
        text = b'{"a":' * 2000
    if luck.random() < 0.1:  # an object whose keys are there twice
        text = text[:-1] + b"," + text[1:] if len(text) > 2 else text
    return data[:start] + b"\n".join([*texts[:at], text, *texts[at + 1 :]]) + data[end:]


def _change(plain: Any, luck: random.Random) -> None:
    """Changes one entry of a random object or array inside."""
    spots = [spot for spot in _containers(plain) if spot]
    if not spots:
        return
    spot = luck.choice(spots)
    key: Any = luck.choice(list(spot)) if isinstance(spot, dict) else luck.randrange(len(spot))
    match luck.randrange(6):
        case 0:
            del spot[key]
        case 1 if isinstance(spot, dict):
            spot[luck.choice([key[:-1], f"{key}s", key.upper(), "", "a\nb", "\x1b[2J"])] = spot.pop(key)
        case 1 if isinstance(spot, list):
            spot.extend([spot[key]] * (1 if isinstance(spot[key], dict | list) else luck.choice([1, 1000])))
        case 2:
            nested: Any = 1
            for _ in range(luck.choice([10, 150, 500])):
                nested = [nested] if luck.random() < 0.5 else {"a": nested}
            spot[key] = nested
        case 3:
            spot[key] = deepcopy(luck.choice(spots))
        case _:
            spot[key] = deepcopy(luck.choice(ODD))


def _containers(plain: Any) -> list[Any]:
    """Returns the objects and arrays inside, as many as are looked at in a moment."""
    found, left = [], deque([plain])
    while left and len(found) < MOST_CONTAINERS:
        inner = left.popleft()
        if isinstance(inner, dict | list):
            found.append(inner)
            left.extend(islice(inner.values() if isinstance(inner, dict) else inner, MOST_CONTAINERS))
    return found


def put(kind: Kind, path: Path, luck: random.Random) -> None:
    """Puts a changed file of a kind at a path, or something that is no file."""
    if luck.random() < 0.04:
        luck.choice(NO_FILES)(path)
        return
    data = kind.good
    match luck.randrange(10):
        case 0:
            data = data[: luck.randrange(len(data) + 1)]
        case 1:
            data = splice(data, luck)
        case 2 | 3 | 4 | 5:
            data = change_json(data, luck)
        case 6:
            data = luck.randbytes(luck.randrange(300)) if luck.random() < 0.3 else change_bytes(data, luck)
        case _:
            data = change_bytes(data, luck)
    path.write_bytes(kind.wrap(data))


def _link_folder(path: Path) -> None:
    path.symlink_to(path.parent)


def _make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES: tuple[Callable[[Path], None], ...] = (
    Path.mkdir, Path.touch, os.mkfifo, _link_folder, _make_large, lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to("/dev/random"),
)  # fmt: skip


# How they are read.


def read_one(kind: Kind, number: int, seed: int, limit_s: float = LIMIT_S) -> tuple[str, str]:
    """Reads one changed file; returns what became of it, and the traceback of what should not have been raised."""
    luck = random.Random(f"{seed}/{kind.name}/{number}")
    printed = io.StringIO()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with TemporaryDirectory() as folder, contextlib.ExitStack() as around:
        path = Path(folder) / kind.file
        path.parent.mkdir(exist_ok=True)
        kind.prepare(path.parent)
        path.unlink(missing_ok=True)
        put(kind, path, luck)
        around.enter_context(contextlib.redirect_stdout(printed))
        around.enter_context(contextlib.redirect_stderr(printed))
        around.enter_context(_limited(limit_s))
        result, text = _outcome(kind, path)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 > MOST_GROWN_BYTES:
        return "memory", text
    if kind.is_shown and printable(printed.getvalue()) != printed.getvalue():
        return "tracebacks", "control characters reached the terminal"
    return result, text


def read_good(kind: Kind) -> None:
    """Reads a file of a kind as it is."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / kind.file
        path.parent.mkdir(exist_ok=True)
        kind.prepare(path.parent)
        path.write_bytes(kind.wrap(kind.good))
        kind.read(path)


def _outcome(kind: Kind, path: Path) -> tuple[str, str]:
    try:
        kind.read(path)
    except InputError as error:
        return ("refused", str(error)) if str(error).strip() else ("tracebacks", "an error without a sentence")
    except Hang:
        return "hangs", traceback.format_exc()
    except MemoryError:
        return "memory", traceback.format_exc()
    except Exception:
        return "tracebacks", traceback.format_exc()
    return "accepted", ""


@contextlib.contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Interrupts what takes too long; what does not even hear that ends the process."""

    def interrupt(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def read_batch(name: str, numbers: Sequence[int], seed: int) -> list[Outcome]:
    """Reads some changed files of a kind, in a process of limited memory."""
    warnings.simplefilter("ignore")  # what libraries say of odd files is not ours
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_MAPPED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found = []
    for number in numbers:
        faulthandler.dump_traceback_later(4 * LIMIT_S, exit=True)
        started_s = time.perf_counter()
        result = read_one(KINDS[name], number, seed)
        found.append(Outcome(name, number, *result, time.perf_counter() - started_s))
        faulthandler.cancel_dump_traceback_later()
    return found


def run_all(names: Sequence[str], files: int, seed: int, processes: int) -> list[Outcome]:
    """Reads as many files in all, of each kind its part; returns what became of each."""
    torch.set_num_threads(1)
    for name in names:
        read_good(KINDS[name])  # which also imports all that is needed
    shares = {name: files // len(names) + (n < files % len(names)) for n, name in enumerate(names)}
    batches = [
        (name, range(at, min(at + BATCH, shares[name]))) for name in names for at in range(0, shares[name], BATCH)
    ]
    outcomes: list[Outcome] = []
    alone: list[tuple[str, range]] = []
    for group, size in ((batches, processes), (alone, 1)):
        for name, numbers, answer in _submitted(group, size, seed):
            try:
                outcomes += answer.result()
            except BrokenProcessPool:  # a reader that did not hear its limit, or that took the process with it
                if group is batches:
                    alone += [(name, range(number, number + 1)) for number in numbers]
                else:
                    outcomes.append(Outcome(name, numbers[0], "hangs", "its process ended; see above", 4 * LIMIT_S))
    return sorted(outcomes, key=lambda outcome: names.index(outcome.kind))


def _submitted(batches: Sequence[tuple[str, range]], processes: int, seed: int) -> Iterator[tuple[str, range, Any]]:
    """Yields batches with what becomes of them; those that are alone have a process each."""
    if processes > 1:
        with ProcessPoolExecutor(processes, get_context("fork")) as pool:
            yield from [(*batch, pool.submit(read_batch, *batch, seed)) for batch in batches]
        return
    for batch in batches:
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            yield *batch, pool.submit(read_batch, *batch, seed)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns what became of the files of each kind, as Markdown."""
    lines = [f"| reader | files | {' | '.join(OUTCOMES)} | slowest |", f"|---|{'---|' * (len(OUTCOMES) + 2)}"]
    names = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    for name in [*names, "all"]:
        counts = Counter(outcome.result for outcome in outcomes if name in (outcome.kind, "all"))
        time_s = max(outcome.time_s for outcome in outcomes if name in (outcome.kind, "all"))
        cells = [f"{counts[result]:,}" for result in OUTCOMES]
        lines.append(f"| {name} | {counts.total():,} | {' | '.join(cells)} | {time_s:.2f} s |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--file", type=int, help="read this one file of the kind again")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    if asked.file is not None:
        result, text = read_one(KINDS[asked.kinds[0]], asked.file, asked.seed, limit_s=60)
        print(result, printable(text), sep="\n")
        return int(result not in ("refused", "accepted"))
    outcomes = run_all(asked.kinds, asked.files, asked.seed, asked.processes)
    failed = [outcome for outcome in outcomes if outcome.result not in ("refused", "accepted")]
    seen: Counter[tuple[str, str]] = Counter()
    for outcome in failed:
        last = printable(next(iter(reversed(outcome.text.strip().splitlines())), ""))[:300]
        seen[outcome.kind, last[:40]] += 1
        if seen[outcome.kind, last[:40]] == 1:
            again = f"--kinds '{outcome.kind}' --file {outcome.number} --seed {asked.seed}"
            print(f"{outcome.result}: {again}: {last}", file=sys.stderr)
    print(table(outcomes))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
