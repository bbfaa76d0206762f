"""The filters that a model keeps for one update, and the parts of its tensors that belong to them."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from pipedejavu.runtime.filter_layout import FilterDim, FilterLayout

Tensors = dict[str, Tensor]


class KeptFilters:
    """The filters that remain in each group, drawn with a seed per group."""

    def __init__(self, layout: FilterLayout, counts: Sequence[int], seeds: Sequence[int]):
        self.layout, self.counts = layout, tuple(counts)
        self.filters = tuple(
            self._draw(group.size, count, seed) for group, count, seed in zip(layout.groups, counts, seeds, strict=True)
        )
        """The numbers of the filters that remain, in each group."""

    @staticmethod
    def _draw(size: int, count: int, seed: int) -> Tensor:
        if count == size:
            return torch.arange(size, device="cpu")
        order = torch.randperm(size, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        return order[:count].sort().values

    @cached_property
    def masks(self) -> list[Tensor]:
        """For each group, one for each filter that remains and zero for the others."""
        pairs = zip(self.layout.groups, self.filters, strict=True)
        return [
            torch.zeros(group.size, dtype=torch.float32, device="cpu").index_fill_(0, drawn, 1.0)
            for group, drawn in pairs
        ]

    def is_whole(self, name: str) -> bool:
        """Whether nothing of a tensor is left out."""
        return not self._dims(name)

    def narrow(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the part of a parameter, its state or a buffer that remains: a copy, or the tensor if it is whole."""
        for dim in self._dims(name):
            tensor = tensor.index_select(dim.dim, self._entries(dim, tensor.device))
        return tensor

    def used(self, name: str, weight: Tensor) -> Tensor:
        """Returns the part of a weight that a forward computes with; its gradient is that of the whole weight.

        Channels that a layer reads are scaled by how many filters there are for each that remains, so that sums over
        them have the same mean as with all filters.
        """
        weight = self.narrow(name, weight)
        for dim in self._dims(name):
            if dim.is_read:
                weight = weight * (self.layout.groups[dim.group].size / self.counts[dim.group])
        return weight

    def put(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Writes the part that remains into a whole tensor; the rest stays as it is."""
        dims = self._dims(name)
        if not dims:
            whole.copy_(part)
            return
        entries = {dim.dim: self._entries(dim, whole.device) for dim in dims}
        if len(entries) > 1:  # rows and columns of a block
            rows, columns = entries[0], entries[1]
            whole[rows[:, None], columns[None, :]] = part
            return
        ((dim, chosen),) = entries.items()
        whole.index_copy_(dim, chosen, part)

    def _dims(self, name: str) -> list[FilterDim]:
        """Returns the dimensions of a tensor of which something is left out."""
        dims = self.layout.dims.get(name, ())
        return [dim for dim in dims if self.counts[dim.group] < self.layout.groups[dim.group].size]

    def _entries(self, dim: FilterDim, device: torch.device) -> Tensor:
        """Returns the entries of a dimension that remain."""
        drawn = self.filters[dim.group]
        if dim.run > 1:
            drawn = (drawn[:, None] * dim.run + torch.arange(dim.run, device="cpu")).flatten()
        return drawn.to(device)


def times_kept(name: str, shape: Sequence[int], rows: Sequence[KeptFilters]) -> Tensor:
    """Returns how many of some updates trained each entry of a parameter, in a shape that broadcasts to it."""
    dims = rows[0].layout.dims.get(name, ())
    if not dims:
        return torch.tensor(float(len(rows)), dtype=torch.float32, device="cpu")
    masks = {dim.dim: torch.stack([row.masks[dim.group].repeat_interleave(dim.run) for row in rows]) for dim in dims}
    count = masks[0].T @ masks[1] if len(masks) > 1 else next(iter(masks.values())).sum(0)
    lead = min(masks)
    return count.reshape((*(1,) * lead, *count.shape, *(1,) * (len(shape) - lead - count.dim())))


def merge(replicas: Sequence[Mapping[str, Tensor]], rows: Sequence[Sequence[KeptFilters]]) -> Tensors:
    """Returns the mean of weights of several replicas, each entry by the updates that trained it in each."""
    return {
        name: torch.stack([shares(name, tensors[name], rows, n) for n, tensors in enumerate(replicas)]).sum(0)
        for name in replicas[0]
    }


def shares(name: str, weight: Tensor, rows: Sequence[Sequence[KeptFilters]], replica: int) -> Tensor:
    """Returns what a replica adds to the mean of a weight: entries that no update trained count the same everywhere."""
    counts = [times_kept(name, weight.shape, own) for own in rows]
    total = torch.stack(counts).sum(0)
    mine = torch.where(total > 0, counts[replica], torch.ones_like(total))
    total = torch.where(total > 0, total, torch.full_like(total, len(rows)))
    return weight.detach() * mine.to(weight) / total.to(weight)
