"""Whether tensors are finite: one pass over each finds its largest absolute value, which is NaN if it holds NaN."""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


def largest_value(tensor: Tensor) -> Tensor:
    """Returns the largest absolute value in a tensor, on its device and in its dtype; 0 for an empty tensor."""
    if not tensor.numel():
        return tensor.new_zeros(())
    if tensor.is_complex():
        tensor = tensor.abs()
    elif tensor.element_size() == 1:  # float8, which has no minimum
        tensor = tensor.float()
    if tensor.is_cuda:
        norm: Tensor = torch.linalg.vector_norm(tensor, math.inf)
        return norm
    low, high = torch.aminmax(tensor)  # on a CPU some twenty times as fast as the norm
    return torch.maximum(high, -low)


def nonfinite(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yields the name of each floating-point tensor that is not finite, and what it holds; waits for a GPU."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex()]
    values = read_all(largest_value(tensors[name].detach()) for name in names)
    yield from ((name, value) for name, value in zip(names, values, strict=True) if not math.isfinite(value))


def read_all(values: Iterable[Tensor]) -> list[float]:
    """Reads numbers that may lie on a GPU, with one copy for all of them."""
    numbers = [value.double() for value in values]
    on_gpu = [n for n, number in enumerate(numbers) if number.is_cuda]
    if on_gpu:
        copied = torch.stack([numbers[n] for n in on_gpu]).cpu()
        for n, number in zip(on_gpu, copied, strict=True):
            numbers[n] = number
    return [number.item() for number in numbers]
