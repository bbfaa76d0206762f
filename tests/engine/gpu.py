"""What must hold on a GPU, for presets that use every lane; also a script: python tests/engine/gpu.py.

Several workers share cuda:0. Without a GPU the same programs run on CPU tensors, in the same lanes.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in one order, whatever the stream
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

import torch

from pipedejavu.analysis import build_graph
from pipedejavu.engine import AdamW, Outcome, Sgd, run_threads
from pipedejavu.engine.handlers import Handlers
from pipedejavu.plan import Keep
from pipedejavu.plan.axis import Rest
from pipedejavu.program import Action
from tests.engine.case import Case, make_case

PRESETS: dict[str, dict[str, int]] = {
    "zero-offload": {"microbatches": 3},
    "cotrain": {"microbatches": 3},
    "l2l": {"microbatches": 3},
    "stronghold": {"microbatches": 3},
    "fine": {"workers": 2, "microbatches": 3},
    "1f1b": {"workers": 3, "microbatches": 5},
    "ddp": {"workers": 2, "microbatches": 2},
}
PLACES: dict[str, tuple[Rest, ...]] = {"visit": ("visit",), "lean": ("visit", "lean"), "window": ("device", "window")}
"""No presets: where the state of the pieces rests, in turn."""
NAMES = (*PRESETS, *PLACES, "activations")
MODELS = ("mlp", "convnet", "calm-gpt")
"""Those without dropout, whose masks a GPU draws otherwise."""
DEVICE_LANES = ("compute", "copy-in", "copy-out")
CYCLES = 2_000_000
"""About a millisecond: more than an action takes here."""


def case_of(name: str, model: str) -> Case:
    optimizer = Sgd(lr=0.1, momentum=0.9) if model == "convnet" else AdamW(lr=0.01, eps=0.01, weight_decay=0.1)
    if name == "activations":
        case = make_case("gpipe", model, workers=2, microbatches=3, steps=3, rounds=2, optimizer=optimizer, type_="gpu")
        return replace(case, plan=case.plan.replace(keep=Keep(activations="host")))
    sizes = PRESETS.get(name, {"microbatches": 3})
    known = name if name in PRESETS else "zero-offload"
    case = make_case(known, model, **sizes, steps=3, rounds=2, optimizer=optimizer, type_="gpu")
    if name in PRESETS:
        return case
    count = len(case.units)
    keep = Keep(kind="split", places=(PLACES[name] * count)[:count])
    return replace(case, plan=case.plan.replace(keep=keep))


def lanes_of(name: str) -> list[str]:
    """Returns the lanes that a preset uses; those to and from all others count as one."""
    workers = case_of(name, "mlp").program.workers
    found = {a.lane for worker in workers for a in worker.actions}
    return sorted({"net" if lane.startswith("net") else lane for lane in found})


def check_equality(name: str, model: str) -> None:
    """A preset on GPUs equals plain training on one, and its replay on the CPU.

    The replay's kernels are others: a unit's forward and its backward may be off by some ulps each, say eight.
    """
    case = case_of(name, model)
    on_device = {w.device.type for weights in case.outcome.weights.values() for w in weights.values()}
    rests_on_host = case.plan.keep.kind != "replicated"
    assert rests_on_host or on_device == {"cuda" if torch.cuda.is_available() else "cpu"}
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    foreign = 8 * 2 * len(case.units) if torch.cuda.is_available() else 1
    assert case.audit() <= foreign * case.tolerance
    assert case.moved() > 1e6 * case.tolerance


def check_delay(name: str, lane: str) -> None:
    """A lane that is late changes no bit: whoever depends on it waits, and no memory is reused too early."""
    case = case_of(name, "mlp")
    do = Handlers.do

    def late(self: Handlers, a: Action) -> None:
        if a.lane.startswith(lane):
            if torch.cuda.is_available():
                torch.cuda._sleep(CYCLES)
            if lane not in DEVICE_LANES or not torch.cuda.is_available():
                time.sleep(1e-3)
        do(self, a)

    Handlers.do = late  # type: ignore[method-assign]
    try:
        delayed = run_threads(case.program, case.job, case.batches, case.rounds)
    finally:
        Handlers.do = do  # type: ignore[method-assign]
    check_same(case.outcome, delayed)
    check_order(case, delayed)


def check_same(one: Outcome, other: Outcome) -> None:
    """Two runs have the same weights and losses, to the bit."""
    for home, weights in one.weights.items():
        for name, weight in weights.items():
            assert torch.equal(weight, other.weights[home][name]), f"{name} of {home} differs"
    assert [log.losses for log in one.logs] == [log.losses for log in other.logs]


def check_order(case: Case, outcome: Outcome) -> None:
    """On the device's own clock no action starts before those that it depends on have ended."""
    graph = build_graph(case.program)
    resolution_s = 1e-6 + 1e-6 * max(span.end_s for span in outcome.spans)  # of a 32-bit number of milliseconds
    for index, ops in enumerate(graph.of_action):
        spans = [span for span in outcome.spans if span.worker == index]
        position = {op: p for p, op in enumerate(ops)}
        assert [span.action for span in spans] == [str(a) for a in case.program.workers[index].actions]
        for op, before in position.items():
            for after in (position[follower] for follower in graph.successors[op] if follower in position):
                if spans[before].lane in DEVICE_LANES and spans[after].lane in DEVICE_LANES:
                    assert spans[before].end_s <= spans[after].start_s + resolution_s, (spans[before], spans[after])


def main() -> None:
    torch.set_default_dtype(torch.float64)
    calls: list[tuple[Callable[[str, str], None], str, str]] = []
    calls += [(check_equality, name, model) for name in NAMES for model in MODELS]
    calls += [(check_delay, name, lane) for name in NAMES for lane in lanes_of(name)]
    failed = 0
    for check, name, other in calls:
        torch.manual_seed(0)
        try:
            check(name, other)
            print(f"{check.__name__} {name} {other}: holds", flush=True)
        except Exception as error:
            failed += 1
            print(f"{check.__name__} {name} {other}: {type(error).__name__}: {error}", flush=True)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"{len(calls) - failed} of {len(calls)} hold on {where}, torch {torch.__version__}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
