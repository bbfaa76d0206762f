"""Collectives of tensor groups: values, and gradients against the same formula on whole tensors."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipedejavu.runtime import tensor_group as tg
from pipedejavu.runtime.rank_tensor_group import ThreadMeeting, ThreadTensorGroup


def on_threads(size: int, work: Callable[[ThreadTensorGroup], object]) -> list:
    """Runs `work` on every rank of a group of threads; returns the results in the order of the ranks."""
    meeting, results = ThreadMeeting(size), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadTensorGroup(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.stop()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_then_row_equals_the_dense_layers(size: int):
    x, a, b = drawn(3, 8), drawn(8, 12, seed=1), drawn(12, 8, seed=2)
    whole = [t.clone().requires_grad_() for t in (x, a, b)]
    expected = (whole[0] @ whole[1]).tanh() @ whole[2]
    (expected**2).sum().backward()

    def work(group: ThreadTensorGroup) -> list[Tensor]:
        mine = [x, a.chunk(size, 1)[group.rank], b.chunk(size, 0)[group.rank]]
        leaves = [t.clone().requires_grad_() for t in mine]
        y = tg.sum_forward((tg.sum_backward(leaves[0], group) @ leaves[1]).tanh() @ leaves[2], group)
        (y**2).sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    ranks = on_threads(size, work)
    for y, dx, _, _ in ranks:
        torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dx, whole[0].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[2] for r in ranks], 1), whole[1].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[3] for r in ranks], 0), whole[2].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_gather_and_scatter_sum_are_conjugate(size: int):
    x, w = drawn(8, 4), [drawn(8, 8, seed=r + 1) for r in range(size)]
    leaf = x.clone().requires_grad_()
    expected = sum(w[r] @ leaf for r in range(size))
    (expected**3).sum().backward()

    def work(group: ThreadTensorGroup) -> tuple[Tensor, Tensor]:
        mine = x.chunk(size, 0)[group.rank].clone().requires_grad_()
        y = tg.scatter_sum(w[group.rank] @ tg.gather(mine, 0, group), 0, group)
        (y**3).sum().backward()
        return y.detach(), mine.grad

    ranks = on_threads(size, work)
    torch.testing.assert_close(torch.cat([y for y, _ in ranks]), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([d for _, d in ranks]), leaf.grad, rtol=1e-12, atol=1e-12)


def test_take_part_and_join_parts_are_conjugate():
    x = drawn(4, 6)
    leaf = x.clone().requires_grad_()
    (leaf.sin() ** 2).sum().backward()

    def work(group: ThreadTensorGroup) -> tuple[Tensor, Tensor]:
        mine = x.clone().requires_grad_()
        y = tg.join_parts(tg.take_part(mine, 1, group).sin(), 1, group)
        (y**2).sum().backward()
        return y.detach(), mine.grad

    for y, gradient in on_threads(2, work):
        torch.testing.assert_close(y, x.sin(), rtol=0, atol=0)
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-15, atol=1e-15)


def test_exchange_returns_gradients_to_their_rows():
    sent = [[1, 2], [3, 0]]  # by rank, rows for each rank

    def work(group: ThreadTensorGroup) -> tuple[Tensor, Tensor]:
        rows = (torch.arange(3.0)[:, None] + 10 * group.rank).requires_grad_()
        mine = tg.exchange(rows, sent[group.rank], [sent[r][group.rank] for r in range(2)], group)
        (mine * (group.rank + 1)).sum().backward()
        return mine.detach(), rows.grad

    (first, to_first), (second, to_second) = on_threads(2, work)
    assert first.flatten().tolist() == [0, 10, 11, 12]
    assert second.flatten().tolist() == [1, 2]
    assert to_first.flatten().tolist() == [1, 2, 2]
    assert to_second.flatten().tolist() == [1, 1, 1]
