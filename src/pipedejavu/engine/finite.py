"""Checks whether tensors are finite, by the largest absolute value of each, which is NaN if any element is."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor


def largest_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the largest absolute value of each tensor, on its device; 0 for an empty tensor."""
    tensors = [_comparable(tensor.detach()) for tensor in tensors]
    if all(tensor.is_cuda for tensor in tensors):
        return list(torch._foreach_norm(tensors, math.inf)) if tensors else []
    return [_largest(tensor) for tensor in tensors]


def _comparable(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return tensor.new_zeros(1, dtype=torch.float32)
    if tensor.is_complex():
        return tensor.abs()
    return tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no order


def _largest(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)  # on a CPU about twenty times as fast as the norm
    return torch.maximum(high, -low)


def nonfinite(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yields the name and largest value of each floating-point tensor that is not finite; synchronises with a GPU."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex()]
    values = read_all(largest_values([tensors[name] for name in names]))
    yield from ((name, value) for name, value in zip(names, values, strict=True) if not math.isfinite(value))


def read_all(values: Sequence[Tensor]) -> list[float]:
    """Reads numbers that may be on a GPU, with one copy for all."""
    on_gpu = [n for n, value in enumerate(values) if value.is_cuda]
    numbers = [*values]
    if on_gpu:
        copied = torch.stack([values[n].double() for n in on_gpu]).cpu()
        for n, number in zip(on_gpu, copied, strict=True):
            numbers[n] = number
    return [number.item() for number in numbers]
