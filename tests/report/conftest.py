"""Synthetic timelines: one-forward-one-backward pipelines with transfers, an update and memory."""

from collections.abc import Callable
from itertools import accumulate

import pytest

from pipedejavu.facts import MEMORY_CLASSES, MemoryCurve, Span, Timeline, WorkerSummary

MIB = 2**20
SEND_S = 4e-4
FORWARD_S, BACKWARD_S, UPDATE_S = 1e-3, 2e-3, 5e-4


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    warmup = min(num_stages - stage - 1, num_microbatches)
    order = [("F", m) for m in range(warmup)]
    for m in range(warmup, num_microbatches):
        order += [("F", m), ("B", m - warmup)]
    return order + [("B", m) for m in range(num_microbatches - warmup, num_microbatches)]


def _spans(num_stages: int, num_microbatches: int) -> list[Span]:
    """Places every action as early as its worker and its input allow."""
    todo = [_one_forward_one_backward(s, num_stages, num_microbatches) for s in range(num_stages)]
    free = [0.0] * num_stages
    arrived = {("F", 0, m): 0.0 for m in range(num_microbatches)}
    arrived |= {("B", num_stages - 1, m): 0.0 for m in range(num_microbatches)}
    spans: list[Span] = []
    while any(todo):
        for s, queue in enumerate(todo):
            if not queue or (queue[0][0], s, queue[0][1]) not in arrived:
                continue
            kind, m = queue.pop(0)
            start = max(free[s], arrived[kind, s, m])
            free[s] = end = start + (FORWARD_S if kind == "F" else BACKWARD_S)
            spans.append(Span(s, "compute", f"{kind}{s}.{m}@0", start, end))
            peer, what = (s + 1, "x") if kind == "F" else (s - 1, "g")
            if 0 <= peer < num_stages:
                arrived[kind, peer, m] = end + SEND_S
                spans.append(Span(s, f"net>{peer}", f"SEND:{what}{s}.{m}>{peer}", end, end + SEND_S))
                spans.append(Span(peer, f"net<{s}", f"RECV:{what}{s}.{m}<{s}", end, end + SEND_S))
    for s in range(num_stages):
        spans.append(Span(s, "compute", f"UPDATE{s}@1", free[s], free[s] + UPDATE_S))
        spans.append(Span(s, "compute", f"DROP:w{s}@0", free[s] + UPDATE_S, free[s] + UPDATE_S))
    return spans


def _memory(spans: list[Span], stage: int) -> MemoryCurve:
    own = [s for s in spans if s.worker == stage and s.lane == "compute"]
    changes = [(s.start_s, 1) for s in own if s.action[0] == "F"]
    changes += [(s.end_s, -1) for s in own if s.action[0] == "B"]
    changes = sorted([(0.0, 0), *changes])
    live = list(accumulate(change for _, change in changes))
    fixed = {"weights": 512.0, "gradients": 512.0, "optimizer": 1024.0, "buffers": 64.0}
    classes = {name: tuple(fixed.get(name, 0.0) * MIB for _ in live) for name in MEMORY_CLASSES}
    classes["activations"] = tuple(300.0 * MIB * count for count in live)
    peak = max(range(len(live)), key=live.__getitem__)
    return MemoryCurve(
        memory="device",
        capacity_bytes=4096 * MIB,
        times_s=tuple(time for time, _ in changes),
        classes=classes,
        peak_bytes=sum(sizes[peak] for sizes in classes.values()),
        peak_classes={name: sizes[peak] for name, sizes in classes.items() if sizes[peak]},
    )


def build_timeline(num_stages: int, num_microbatches: int, copies: int = 1) -> Timeline:
    spans = _spans(num_stages, num_microbatches)
    makespan_s = max(s.end_s for s in spans)
    workers = []
    for stage in range(num_stages):
        busy_s = sum(s.end_s - s.start_s for s in spans if s.worker == stage and s.lane == "compute")
        curve = _memory(spans, stage)
        workers.append(
            WorkerSummary(
                worker=stage,
                device=f"gpu{stage}",
                copies=copies,
                busy_s=busy_s,
                peak_bytes=curve.peak_bytes,
                peak_live_microbatches=min(num_stages - stage, num_microbatches),
                weight_versions=1,
                memory=(curve,),
            )
        )
    busy = sum(w.busy_s for w in workers)
    return timeline_of(spans, tuple(workers), bubble_fraction=1 - busy / (makespan_s * num_stages))


def timeline_of(spans: list[Span], workers: tuple[WorkerSummary, ...] = (), bubble_fraction: float = 0.0) -> Timeline:
    columns = list(zip(*spans, strict=True)) or [()] * 5
    return Timeline(
        origin="predicted",
        makespan_s=max((s.end_s for s in spans), default=0.0),
        bubble_fraction=bubble_fraction,
        workers=workers,
        **dict(zip(("worker", "lane", "action", "start_s", "end_s"), columns, strict=True)),
    )


@pytest.fixture
def pipeline() -> Callable[..., Timeline]:
    """Returns `build_timeline(num_stages, num_microbatches, copies=1)`."""
    return build_timeline


@pytest.fixture
def as_timeline() -> Callable[..., Timeline]:
    """Returns `timeline_of(spans, workers=(), bubble_fraction=0.0)`."""
    return timeline_of
