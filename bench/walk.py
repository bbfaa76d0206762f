"""The way of a command through the files: which function of one file calls which of another, while it runs.

    python bench/walk.py [train] [plan] [hybrid] [--calls]

Prints how many files and calls between files there are, and the pairs of files that call both ways: a reader of one
must know the other. Files of room `facts` are left out, as every file uses them, and so are imports. docs/walk.md tells
the same as a story.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
TRACER = """
import atexit, json, os, sys, threading

PACKAGE, calls, end = "/pipedejavu/", set(), os._exit
OF_TORCH = ("__torch_dispatch__", "__torch_function__")  # torch calls them; the file that runs the operation does not

def name(frame):
    return frame.f_code.co_filename.rpartition(PACKAGE)[2], frame.f_code.co_name

def trace(frame, event, _):
    if event != "call" or PACKAGE not in frame.f_code.co_filename or frame.f_code.co_name in OF_TORCH:
        return
    caller = frame.f_back
    while caller is not None and PACKAGE not in caller.f_code.co_filename:
        caller = caller.f_back
    if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
        calls.add((*name(caller), *name(frame)))

def write():
    sys.setprofile(None)
    with open(os.path.join(os.environ["WALK"], f"{os.getpid()}.json"), "w") as file:
        json.dump(sorted(calls), file)

def write_and_end(code):
    write()
    end(code)

if "WALK" in os.environ:
    os._exit = write_and_end
    atexit.register(write)
    threading.setprofile(trace)
    sys.setprofile(trace)
"""
COMMAND = (sys.executable, "-m", "pipedejavu")
STEP = """
from pipedejavu import HybridAdamW
from pipedejavu.zoo import build
task = build("gpt-tiny")
optimizer = HybridAdamW(task.model, lr=1e-3)
inputs, targets = task.data.batch(range(2))
for _ in range(2):
    task.loss(task.model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WALKS = {
    "train": (*COMMAND, "train", "zoo:gpt-tiny", "--plan", "preset:1f1b", "--workers", "2", "--steps", "3", "--json"),
    "plan": (*COMMAND, "plan", "zoo:gpt-tiny", "--renew", "--json"),
    "hybrid": (sys.executable, "-c", STEP),
}
Call = tuple[str, str, str, str]
"""File and function of the caller, file and function that it calls."""


def walk(command: tuple[str, ...]) -> set[Call]:
    """Runs a command; returns the calls between files of all its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "sitecustomize.py").write_text(TRACER)
        paths = os.pathsep.join((folder, str(SOURCE), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": paths, "WALK": folder, "XDG_CACHE_HOME": folder}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        calls = {tuple(call) for path in Path(folder).glob("*.json") for call in json.loads(path.read_text())}
    return {call for call in calls if is_shown(*call)}


def is_shown(caller: str, function: str, callee: str, called: str) -> bool:
    """Whether a call is neither an import nor of room `facts`."""
    files = caller, callee
    is_import = "<module>" in (function, called) or any(file.endswith("__init__.py") for file in files)
    return not is_import and not called.startswith("<") and not any(file.startswith("facts/") for file in files)


def main() -> None:
    """Prints the walks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("walks", nargs="*", help=f"some of {', '.join(WALKS)}; all by default")
    parser.add_argument("--calls", action="store_true", help="print every call between two files")
    arguments = parser.parse_args()
    for name in arguments.walks or WALKS:
        between: dict[tuple[str, str], list[str]] = defaultdict(list)
        for caller, function, callee, called in sorted(walk(WALKS[name])):
            between[caller, callee].append(f"{function} → {called}")
        both = [pair for pair in between if pair[::-1] in between and pair[0] < pair[1]]
        files = {file for pair in between for file in pair}
        print(f"{name}: {len(files)} files, {len(between)} pairs with calls, {len(both)} of them both ways")
        for first, second in between if arguments.calls else both:
            print(f"  {first} → {second}: {', '.join(between[first, second][:3])}")
            if not arguments.calls:
                print(f"  {second} → {first}: {', '.join(between[second, first][:3])}")


if __name__ == "__main__":
    main()
