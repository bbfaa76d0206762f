"""Finds over how many devices the units of a model can be divided, by which layouts, and what the devices then send."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import get_args

from torch import Tensor, fx, nn

from pipedejavu.facts import DividedSums, InputError, Profile
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.profile.unit_sample import UnitSample
from pipedejavu.runtime.axis_region import UnitGraph
from pipedejavu.runtime.axis_rule import name_of, shape_of
from pipedejavu.runtime.compiled_unit import LossCall
from pipedejavu.runtime.division import Division, LayoutKind, divide, drawn_in
from pipedejavu.runtime.loss_rule import LOSS
from pipedejavu.runtime.param_layout import ParamLayout
from pipedejavu.runtime.sequence_region import ATTENTION

_TRIED = (2, 4, 8)
_PAIRS = "pairs"
_LAYOUTS = ("vocabulary", "sequence", "sequence+vocabulary", "context")
"""Divisions that a search may propose beside 'pairs'."""


def with_divisions(
    profile: Profile, sample: UnitSample, *, num_devices: int = _TRIED[-1], draws_alike: bool = True
) -> Profile:
    """Returns the profile with the divisions that its units have over up to `num_devices`; as it is if they cannot be
    traced.

    Unless all devices `draws_alike`, units that draw random numbers otherwise than by dropout are not divided.
    """
    try:
        graphs = _graphs(sample)
    except InputError:
        return profile
    if not draws_alike and any(map(drawn_in, graphs)):
        return profile.replace(tp_sizes=())
    sizes: dict[str, tuple[int, ...]] = {}
    for kind in (_PAIRS, *_LAYOUTS):
        for size in (n for n in _TRIED if n <= num_devices):
            division = _divided(graphs, sample, kind, size)
            if _has(division, kind) and (kind != "vocabulary" or size in sizes.get(_PAIRS, ())):
                sizes[kind] = (*sizes.get(kind, ()), size)
                profile = _with_sums(profile, division, sample, f"{kind}/{size}")
    pairs = sizes.pop(_PAIRS, ())
    return profile.replace(tp_sizes=pairs, layout_sizes=sizes)


def with_divided_sums(profile: Profile, sample: UnitSample, division: str) -> Profile:
    """Returns the profile with what devices send under one division, such as 'pairs/4'."""
    kind, _, size = division.partition("/")
    return _with_sums(profile, _divided(_graphs(sample), sample, kind, int(size)), sample, division)


def _graphs(sample: UnitSample) -> list[UnitGraph]:
    """Returns the graphs of the units and, if it can be recorded, of the loss; raises InputError for other units."""
    try:
        return unit_graphs(sample.units, sample.inputs, LossCall(sample.loss, sample.targets))
    except InputError:
        return unit_graphs(sample.units, sample.inputs)


def _divided(graphs: list[UnitGraph], sample: UnitSample, kind: str, size: int) -> Division:
    along = {*kind.split("+")} & {"sequence", "vocabulary"}
    layout: LayoutKind = next((known for known in get_args(LayoutKind) if known == kind), "pairs")
    if not along and kind != "context":  # the loss takes the whole output
        graphs = graphs[: len(sample.units)]
    tied = [] if "vocabulary" in along else _tied([module for _, module in sample.units])
    return divide(graphs, size, tied, layout, has_vocabulary="vocabulary" in along, has_sequence="sequence" in along)


def _has(division: Division, kind: str) -> bool:
    """Whether a division has all that its layouts divide."""
    has_loss = any(name_of(node) == LOSS for region in division.regions for node in region.sums)
    has_tokens = division.sequence is not None and bool(division.sequence.splits)
    return (
        not division.is_whole
        and ("vocabulary" not in kind or has_loss)
        and (("sequence" not in kind and kind != "context") or has_tokens)
    )


def _with_sums(profile: Profile, division: Division, sample: UnitSample, name: str) -> Profile:
    described = []
    for number, unit in enumerate(profile.units):
        numbers = {number} if number + 1 < len(profile.units) else {number, number + 1}  # with the loss
        sums = _sums(division, numbers, sample.samples)
        described.append(unit.replace(divided_sums=unit.divided_sums | {name: sums}))
    return profile.replace(units=tuple(described))


def _sums(division: Division, numbers: set[int], samples: int) -> DividedSums:
    """Returns what devices send and hold of the units with these numbers in the chain."""
    weights = _weights(division, numbers)
    divided = [tensor for node, tensor in weights if _is_divided(division.layout_of(node), tensor)]
    total_bytes = sum(tensor.nbytes for _, tensor in weights)
    share = sum(tensor.nbytes for tensor in divided) / total_bytes if total_bytes else 0.0
    rows = [row for row in division.collectives() if row.unit in numbers]
    sums = DividedSums(
        forward=tuple(sorted(row.size_bytes / samples for row in rows if row.is_forward)),
        backward=tuple(sorted(row.size_bytes / samples for row in rows if not row.is_forward)),
        parameter_share=share,
        work_share=share,
    )
    return sums if division.sequence is None else _along_sequence(sums, division, numbers, samples)


def _along_sequence(sums: DividedSums, division: Division, numbers: set[int], samples: int) -> DividedSums:
    """Returns what devices send and hold if they divide the sequence too."""
    weights = _weights(division, numbers)
    on_parts = {node for node in division.on_parts if division.chain.unit_of[node] in numbers}
    read = [(node, tensor) for node, tensor in weights if not on_parts.isdisjoint(node.users)]
    whole = [tensor for node, tensor in read if not _is_divided(division.layout_of(node), tensor)]
    exchanges = [] if division.regions else [size for node in on_parts for size in _attention_bytes(node)]
    return sums.replace(
        gathers=tuple(sorted(_bytes(node) / samples for node in _entries(division, numbers))),
        exchanges=tuple(sorted(size / samples / division.size for size in exchanges)),
        gradient_bytes=sum(tensor.nbytes for tensor in whole),
        work_share=1.0 if on_parts else sums.work_share,
    )


def _weights(division: Division, numbers: set[int]) -> list[tuple[fx.Node, Tensor]]:
    """Returns the trained parameters of some units, each with a node that reads it."""
    chain = division.chain
    held = ((node, t) for node, t in chain.held.items() if chain.unit_of[node] in numbers and t.requires_grad)
    return [*{id(tensor): (node, tensor) for node, tensor in held}.values()]


def _entries(division: Division, numbers: set[int]) -> set[fx.Node]:
    """Returns the tensors of some units that are gathered along the sequence where a divided operator begins."""
    assert division.sequence is not None
    entries = {node for region in division.regions for node in region.entries if node in division.sequence.labels}
    return {node for node in entries if division.chain.unit_of[node] in numbers}


def _is_divided(layout: ParamLayout, tensor: Tensor) -> bool:
    return layout.is_divided and layout.shape == tuple(tensor.shape)


def _attention_bytes(node: fx.Node) -> Iterator[int]:
    """Yields the bytes of an attention's queries, keys, values and result; nothing for other operations."""
    if name_of(node) == ATTENTION:
        for source in (*node.args[:3], node):
            assert isinstance(source, fx.Node)
            yield _bytes(source)


def _bytes(node: fx.Node) -> int:
    return prod(shape_of(node)) * int(node.meta["val"].element_size())


def _tied(units: Sequence[nn.Module]) -> list[Tensor]:
    """Returns the parameters that several units share: all devices keep them whole."""
    seen, tied = set[int](), list[Tensor]()
    for unit in units:
        own = {id(p): p for p in unit.parameters()}
        tied += [p for key, p in own.items() if key in seen]
        seen |= own.keys()
    return tied
