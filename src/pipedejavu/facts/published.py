"""Profiles in other formats: PipeDream's `graph.txt`, and a table of units as CSV.

A graph names no device and no batch size: its times are used for every kind of device, and its figures, which are per
minibatch, count as one sample. A table's figures are per sample; its times are for the device that it names, or for
every kind if it names none.
"""

import csv
import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipedejavu.facts.error import InputError, brief, nearest, repeated
from pipedejavu.facts.file import read_file
from pipedejavu.facts.profile import Cost, Edge, Profile, Unit, UnitTime
from pipedejavu.facts.quantity import parse_quantity

_PARAMETER_BYTES = 4
"""Published profiles are in float32."""
_PLAIN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


PUBLISHED = (".txt", ".csv")
"""How the names of profiles in other formats end."""


def read_profile(path: str, kinds: Iterable[str], speeds: Mapping[str, float] | None = None) -> Profile:
    """Reads a profile: a graph if the name ends in .txt, a table if it ends in .csv, else the project's JSON.

    `kinds` are the kinds of devices that times apply to if the file names none. `speeds` are how many times as fast as
    the file says some kinds are; the update is as much faster as the passes.
    """
    suffix = Path(path).suffix.lower()
    kinds = tuple(dict.fromkeys(kinds))
    if suffix not in PUBLISHED:
        return at_speeds(Profile.load(path), speeds or {})
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text in UTF-8; a profile is JSON, CSV or a graph.txt") from None
    parse = parse_graph if suffix == ".txt" else parse_table
    return at_speeds(parse(text, kinds, path), speeds or {})


def at_speeds(profile: Profile, speeds: Mapping[str, float]) -> Profile:
    """Returns a profile whose times on some kinds of devices are divided by the speed of each."""
    kinds = {kind for unit in profile.units for kind in unit.times}
    for kind in (kind for kind in speeds if kind not in kinds):
        raise InputError(
            f"a speed is given for '{kind}', and profile '{profile.name}' has times on {', '.join(sorted(kinds))}"
            f"{nearest(kind, kinds)}"
        )
    if not speeds:
        return profile
    units = (
        unit.replace(times={kind: _faster(time, speeds.get(kind, 1.0)) for kind, time in unit.times.items()})
        for unit in profile.units
    )
    batch = {kind: cost.times(1 / speeds.get(kind, 1.0)) for kind, cost in profile.batch.items()}
    return profile.replace(units=tuple(units), batch=batch)


def _faster(time: UnitTime, speed: float) -> UnitTime:
    if speed == 1:
        return time
    return time.replace(
        forward=time.forward.times(1 / speed),
        backward=time.backward.times(1 / speed),
        weight_backward=time.weight_backward.times(1 / speed),
        input_backward=time.input_backward and time.input_backward.times(1 / speed),
        recompute=time.recompute.times(1 / speed),
        update_s=time.update_s / speed,
    )


# PipeDream's graph: a line per node, and an indented line per edge.

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(r"(?P<id>\S+) -- (?P<what>.+?) -- (?P<fields>[^=]+=.*?)(?: -- stage_id=\d+)?")
_EDGE = re.compile(r"\s+(\S+) -- (\S+)")


@dataclass(frozen=True)
class _Node:
    what: str
    figures: Mapping[str, float]

    @property
    def is_input(self) -> bool:
        """Whether the node loads data, and so is not part of the model."""
        return self.what.startswith("Input")


def parse_graph(text: str, kinds: Sequence[str], source: str = "graph") -> Profile:
    """Returns the profile of a graph: its nodes in topological order, without those that load data."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        edge, node = _EDGE.fullmatch(line), _NODE.fullmatch(line)
        if edge:
            edges.append((edge[1], edge[2]))
        elif node:
            if node["id"] in nodes:
                raise InputError(f"{where}: node '{node['id']}' is given twice")
            nodes[node["id"]] = _Node(node["what"], _figures(node["fields"], where))
        elif line.strip():
            raise InputError(
                f"{where}: {brief(line)} is neither 'node1 -- ReLU() -- forward_compute_time=1.5, …' nor an edge"
                " '<tab>node1 -- node2'"
            )
    for end in (end for edge in edges for end in edge if end not in nodes):
        raise InputError(f"{source}: an edge names node '{end}', which is missing{nearest(end, nodes)}")
    kept = [name for name, node in nodes.items() if not node.is_input]
    if not kept:
        raise InputError(f"{source} has no node of a model; a graph.txt has a line 'node1 -- ReLU() -- …' for each")
    inner = list(dict.fromkeys((s, t) for s, t in edges if not nodes[s].is_input and not nodes[t].is_input))
    ordered = _in_order(kept, inner, source)
    units = tuple(_node_unit(name, nodes[name], kinds) for name in ordered)
    is_chain = sorted(inner) == sorted(pairwise(ordered))
    skips = None if is_chain else tuple(Edge(source=s, target=t) for s, t in inner)
    return Profile(name=Path(source).stem, units=units, edges=skips)


def _figures(text: str, where: str) -> dict[str, float]:
    """Parses 'name=1.5, other=[1.0; 2.0]'; a list counts as its sum."""
    figures = {}
    for field in text.split(", "):
        name, _, value = field.partition("=")
        if name not in _FIELDS:
            raise InputError(f"{where}: {brief(name)} is no figure of a node{nearest(name, _FIELDS)}")
        if name in figures:
            raise InputError(f"{where}: {name} is given twice")
        items = value[1:-1].split(";") if value.startswith("[") and value.endswith("]") else [value]
        figures[name] = sum(_number(item.strip(), f"{where}, {name}") for item in items)
        if math.isinf(figures[name]):
            raise InputError(f"{where}, {name}: the sum of {brief(value)} is not finite")
    for name in _FIELDS:
        if name not in figures:
            raise InputError(f"{where}: {name} is missing")
    return figures


def _in_order(names: Sequence[str], edges: Sequence[tuple[str, str]], source: str) -> list[str]:
    """Returns names in topological order; ties go to the lowest number in the name."""
    waits = Counter(target for _, target in edges)
    after: dict[str, list[str]] = {}
    for start, target in edges:
        after.setdefault(start, []).append(target)
    ready = [(_natural(name), name) for name in names if not waits[name]]
    heapq.heapify(ready)
    ordered: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        ordered.append(name)
        for target in after.get(name, ()):
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, (_natural(target), target))
    if len(ordered) < len(names):
        stuck = min(set(names) - set(ordered), key=_natural)
        raise InputError(f"{source}: edges go around in a circle through node '{stuck}'; a model's graph has none")
    return ordered


def _natural(name: str) -> tuple[int, str]:
    digits = re.search(r"[0-9]{1,18}\Z", name)
    return (int(digits[0]) if digits else -1, name)


def _node_unit(name: str, node: _Node, kinds: Sequence[str]) -> Unit:
    forward_s, backward_s = (node.figures[f"{part}_compute_time"] / 1000 for part in ("forward", "backward"))
    size, parameters = node.figures["activation_size"], round(node.figures["parameter_size"])
    time = _unit_time(forward_s, backward_s, has_weights=parameters > 0)
    return _unit(name, dict.fromkeys(kinds, time), parameters, activation_bytes=size, boundary_bytes=size)


# A table: a header, and a line per unit, or per unit and device.

_TIMES = ("forward_s", "backward_s", "update_s")
_SIZES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "boundary_bytes")
_COLUMNS = ("unit", "device", *_TIMES, "flop", *_SIZES)
_NEEDED = ("unit", "forward_s", "backward_s")


def parse_table(text: str, kinds: Sequence[str], source: str = "table") -> Profile:
    """Returns the profile of a table: units in the order of their first lines, each reading the one before it."""
    header, lines = _read_table(text, source)
    rows: dict[str, tuple[dict[str, UnitTime], dict[str, float]]] = {}
    for number, line in lines:
        where = f"{source}, line {number}"
        name, device, figures = _read_line(line, header, where)
        taken = {key: figures.pop(key, 0.0) for key in _TIMES}
        times, sizes = rows.setdefault(name, ({}, figures))
        if sizes != figures:
            raise InputError(f"{where}: unit '{name}' has other sizes than on its first line; they are the model's")
        for kind in [device] if device else kinds:
            if kind in times:
                raise InputError(f"{where}: unit '{name}' is given twice for device '{kind}'")
            times[kind] = _unit_time(*taken.values(), has_weights=sizes.get("parameter_bytes", 0) > 0)
    if not rows:
        raise InputError(f"{source} has no unit; give a header {','.join(_NEEDED)} and a line for each unit")
    units = [_unit(name, times, **_whole(sizes)) for name, (times, sizes) in rows.items()]
    return Profile(name=Path(source).stem, units=tuple(units))


def _read_table(text: str, source: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Returns the header of a table and its other lines, each with its number; raises InputError on a wrong header."""
    try:
        lines = [(n, line) for n, line in enumerate(csv.reader(text.splitlines(), strict=True), 1) if any(line)]
    except csv.Error as error:
        raise InputError(f"{source} is no CSV: {error}") from None
    header = [name.strip() for name in lines[0][1]] if lines else []
    for name in (name for name in header if name not in _COLUMNS):
        raise InputError(f"{source}: column {brief(name)} is not known{nearest(name, _COLUMNS)}")
    for name in (*(name for name in _NEEDED if name not in header), *repeated(header)):
        raise InputError(f"{source}: column '{name}' is {'given twice' if name in header else 'missing'}")
    return header, lines[1:]


def _read_line(line: Sequence[str], header: Sequence[str], where: str) -> tuple[str, str, dict[str, float]]:
    """Returns the unit, the device and the figures of a line."""
    if len(line) != len(header):
        raise InputError(f"{where} has {len(line)} cells, but the header has {len(header)}")
    cells = {name: cell.strip() for name, cell in zip(header, line, strict=True)}
    unit, device = cells.pop("unit"), cells.pop("device", "")
    if not unit:
        raise InputError(f"{where}: unit is empty; give each a name")
    figures = {key: _number(cell, f"{where}, {key}", _base(key)) for key, cell in cells.items() if cell}
    for key in (key for key in _NEEDED[1:] if key not in figures):
        raise InputError(f"{where}: {key} is empty; give seconds for each sample, such as '0.5 ms'")
    return unit, device, figures


def _base(column: str) -> str | None:
    return "s" if column.endswith("_s") else "B" if column.endswith("_bytes") else None


def _whole(sizes: Mapping[str, float]) -> dict[str, float]:
    """Returns sizes as arguments of `_unit`; parameter, gradient and optimizer bytes are rounded to integers."""
    return {key: round(size) if key in _SIZES[:3] else size for key, size in sizes.items()}


# Shared by both formats.


def _number(text: str, where: str, base: str | None = None) -> float:
    """Parses a number of at least zero; with a base unit, also a quantity such as '3 ms'."""
    value = math.nan
    if _PLAIN.fullmatch(text):
        value = float(text)
    elif base:
        try:
            value = parse_quantity(text, base)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
    if not 0 <= value < math.inf:
        raise InputError(f"{where}: {brief(text)} is not a number that is zero or more, and finite")
    return value


def _unit_time(forward_s: float, backward_s: float, update_s: float = 0.0, *, has_weights: bool) -> UnitTime:
    """Returns times per sample; half of the backward is assumed to be for the weights, if there are any."""
    forward = Cost(per_sample_s=forward_s)
    weight = Cost(per_sample_s=backward_s / 2) if has_weights else Cost()
    backward = Cost(per_sample_s=backward_s)
    return UnitTime(forward=forward, backward=backward, weight_backward=weight, recompute=forward, update_s=update_s)


def _unit(
    name: str,
    times: Mapping[str, UnitTime],
    parameter_bytes: float = 0,
    gradient_bytes: float | None = None,
    optimizer_bytes: float | None = None,
    activation_bytes: float | None = None,
    boundary_bytes: float = 0.0,
    flop: float = 0.0,
) -> Unit:
    """Returns a unit; gradients and optimizer state default to the parameters' size, saved bytes to the output's."""
    size = int(parameter_bytes)
    return Unit(
        name=name,
        times=dict(times),
        flop=flop,
        num_parameters=size // _PARAMETER_BYTES,
        parameter_bytes=size,
        gradient_bytes=size if gradient_bytes is None else int(gradient_bytes),
        optimizer_bytes=size if optimizer_bytes is None else int(optimizer_bytes),
        activation_bytes=boundary_bytes if activation_bytes is None else activation_bytes,
        boundary_bytes=boundary_bytes,
    )
