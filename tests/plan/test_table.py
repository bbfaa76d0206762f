"""The table of published algorithms, written down by hand from their papers, against the presets.

A word that is left out has the plainest value: the first of its kind in PLAIN. Sizes (how many workers,
replicas, servers) are no part of an algorithm; whether there are any is.
"""

from typing import Any

import pytest

from pipedejavu.plan import Plan, presets

PLAIN: dict[str, Any] = {
    "cut": "whole", "layouts": (), "place": "linear", "is_line": False, "is_replicated": False, "is_mesh": False,
    "has_cpu": False, "has_server": False, "feed": "microbatch", "is_controlled": False, "order": "step",
    "recompute": "none", "prefetch": 0, "is_eager": False, "version": "sync", "wire": "none", "gate": "barrier",
    "combiner": "sum", "period": "each", "keep": "replicated", "window": 1, "versions": None, "activations": "device",
}  # fmt: skip

_PIPELINE = {"cut": "chain", "is_line": True, "wire": "all-reduce"}
_ASYNC = {**_PIPELINE, "order": "1f1b-async"}
_GEMS = {**_PIPELINE, "place": "bidirectional", "feed": "alternate", "order": "gems"}
_V = {**_PIPELINE, "place": "v"}
_REPLICAS = {"is_replicated": True}
_ZERO = {**_REPLICAS, "is_eager": True, "wire": "reduce-scatter"}
_MESH = {"cut": "layout", "is_mesh": True, "feed": "same"}
_SERVER = {**_REPLICAS, "has_server": True, "wire": "server"}
_OWN = {"feed": "own", "version": "local"}

ROWS: dict[str, dict[str, Any]] = {
    "gpipe": {**_PIPELINE, "order": "gpipe"},
    "gpipe-recompute": {**_PIPELINE, "order": "gpipe", "recompute": "all"},
    "1f1b": {**_PIPELINE, "order": "1f1b"},
    "pipedream": {**_ASYNC, "feed": "round-robin", "version": "stash"},
    "pipedream-vertical": {**_ASYNC, "feed": "round-robin", "version": "vertical"},
    "pipedream-2bw": {**_ASYNC, "version": "double-buffer", "versions": 2},
    "hippie": {**_PIPELINE, **_REPLICAS, "order": "1f1b", "recompute": "some", "is_eager": True},
    "gems-mast": _GEMS,
    "gems-master": _GEMS,
    "gems-hy": {**_GEMS, **_REPLICAS},
    "chimera": {**_GEMS, "order": "chimera", "is_eager": True},
    "interleaved": {**_PIPELINE, "place": "loop", "order": "interleaved"},
    "zb-h1": {**_PIPELINE, "order": "zb-h1"},
    "zb-v": {**_V, "order": "zb-v"},
    "dualpipe-v": {**_V, "order": "dualpipe-v"},
    "l2l": {
        "cut": "chain", "order": "layer-major", "recompute": "all", "prefetch": 1, "is_eager": True,
        "keep": "host", "window": 1, "activations": "host",
    },
    "zero-1": {**_ZERO, "keep": "zero-1"},
    "zero-2": {**_ZERO, "keep": "zero-2"},
    "zero-3": {**_ZERO, "keep": "zero-3"},
    "zero-r": {**_ZERO, "keep": "zero-2", "recompute": "all", "activations": "host"},
    "megatron": {**_MESH, "layouts": ("head", "row", "col", "row")},
    "sequence": {**_MESH, "layouts": ("head", "row", "col", "row", "sequence")},
    "vocabulary": {**_MESH, "layouts": ("head", "row", "col", "row", "sequence", "vocabulary")},
    "context": {**_MESH, "layouts": ("context",)},
    "stationary-x": {**_MESH, "layouts": ("stationary-x",)},
    "stationary-y": {**_MESH, "layouts": ("stationary-y",)},
    "stationary-w": {**_MESH, "layouts": ("stationary-w",)},
    "parameter-server": {**_SERVER, **_OWN, "gate": "lock", "keep": "server"},
    "hogwild": {
        **_REPLICAS, "feed": "own", "version": "torn", "wire": "shared-memory", "gate": "none", "keep": "shared",
    },
    "easgd": {**_SERVER, **_OWN, "gate": "round-robin", "combiner": "elastic"},
    "easgd-sync": {**_SERVER, **_OWN, "combiner": "elastic"},
    "ddp": {**_REPLICAS, "is_eager": True, "wire": "all-reduce"},
    "hetpipe": {**_ASYNC, **_SERVER, "feed": "own", "version": "stash", "gate": "bound"},
    "hyscale": {
        **_REPLICAS, "has_cpu": True, "feed": "share", "is_controlled": True, "prefetch": 2, "wire": "all-reduce",
    },
    "cotrain": {"cut": "chain", "is_eager": True, "keep": "split"},
    "zeno": {**_SERVER, "combiner": "score-trim", "keep": "server"},
    "distreal": {
        **_REPLICAS, "feed": "mask", "is_controlled": True, "version": "local", "wire": "all-reduce",
        "combiner": "average", "period": "several",
    },
    "byteps": {**_REPLICAS, "has_server": True, "is_eager": True, "wire": "summation-service"},
    "moe": {"cut": "layout", "layouts": ("expert",), "is_mesh": True, "wire": "all-reduce"},
    "axonn": {**_PIPELINE, "order": "ready-first", "keep": "split"},
    "stronghold": {"cut": "chain", "prefetch": 2, "is_eager": True, "keep": "host", "window": 2},
    "coarse": {**_PIPELINE, "has_cpu": True, "feed": "share", "is_controlled": True, "order": "1f1b"},
    "fine": {"cut": "chain", "is_line": True, "order": "1f1b", "is_eager": True, "keep": "split"},
}  # fmt: skip

NOT_IN_THE_TABLE = {"model-parallel", "zero-offload", "spectrain", "pipemare", "dc-asgd", "late-share"}

_BY_UNIT = "eager divides a stage into units, and an operator's collective stands beside its unit"
_ONE_DEVICE = "on one device an order that is not layer-major has one stage; `keep` speaks of its pieces"

DEPARTURES: dict[str, dict[str, tuple[Any, str]]] = {
    **{name: {"is_eager": (True, _BY_UNIT)} for name in ("megatron", "sequence", "vocabulary", "context")},
    "stationary-x": {"is_eager": (True, _BY_UNIT)},
    "stationary-y": {"is_eager": (True, _BY_UNIT)},
    "stationary-w": {"is_eager": (True, _BY_UNIT)},
    "moe": {"is_eager": (True, _BY_UNIT)},
    "zero-3": {"prefetch": (1, "weights are gathered one piece ahead")},
    "zero-r": {"prefetch": (1, "checkpoints come back from the host one action ahead")},
    "cotrain": {"cut": ("whole", _ONE_DEVICE)},
    "stronghold": {
        "cut": ("whole", _ONE_DEVICE),
        "prefetch": (1, "beside the window: the layer that comes in while one of the window's two runs is two ahead"),
        "window": ("auto", "the paper's is chosen by its own analytical model, and the table's figure is an example"),
    },
}
"""Where a preset differs from the table on purpose, with its value and the reason."""


def words(plan: Plan) -> dict[str, Any]:
    place, feed, order, reduce, keep = plan.place, plan.feed, plan.order, plan.reduce, plan.keep
    return {
        "cut": plan.cut.kind,
        "layouts": plan.cut.layouts,
        "place": place.kind,
        "is_line": place.workers > 1,
        "is_replicated": place.replicas > 1,
        "is_mesh": place.shards > 1,
        "has_cpu": place.cpu_replicas > 0,
        "has_server": place.servers > 0,
        "feed": feed.kind,
        "is_controlled": feed.is_controlled,
        "order": order.kind,
        "recompute": {0.0: "none", 1.0: "all"}.get(order.recompute, "some"),
        "prefetch": order.prefetch,
        "is_eager": order.is_eager,
        "version": plan.version.kind,
        "wire": reduce.wire,
        "gate": reduce.gate,
        "combiner": reduce.combiner,
        "period": "each" if reduce.period == 1 else "several",
        "keep": keep.kind,
        "window": keep.window,
        "versions": keep.versions,
        "activations": keep.activations,
    }


def test_the_table_and_the_presets_name_the_same_algorithms() -> None:
    assert set(ROWS) | NOT_IN_THE_TABLE == set(presets())
    assert set(PLAIN) == set(words(Plan()))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_is_its_preset(name: str) -> None:
    wanted, actual = PLAIN | ROWS[name], words(presets()[name].plan)
    differences = {word: actual[word] for word in PLAIN if actual[word] != wanted[word]}
    assert differences == {word: value for word, (value, _) in DEPARTURES.get(name, {}).items()}


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("stationary-x", "stationary-y", {"layouts"}),
        ("gpipe", "1f1b", {"order"}),
        ("pipedream", "pipedream-vertical", {"version"}),
        ("zero-1", "zero-2", {"keep"}),
        ("gpipe", "gpipe-recompute", {"recompute"}),
        ("easgd", "easgd-sync", {"gate"}),
        ("zb-v", "dualpipe-v", {"order"}),
    ],
)
def test_each_axis_tells_two_algorithms_apart(one: str, other: str, differ: set[str]) -> None:
    a, b = words(presets()[one].plan), words(presets()[other].plan)
    assert {word for word in a if a[word] != b[word]} == differ
