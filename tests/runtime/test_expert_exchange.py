"""The all-to-alls of expert parallelism: equality with all experts on one rank."""

import torch
from torch import Tensor
from torch.nn import functional

from pipedejavu.runtime.expert_exchange import capacity_of, run_capped, run_slots, run_sorted
from pipedejavu.runtime.traffic import Counts
from tests.runtime.test_tensor_group import drawn
from tests.runtime.test_tensor_group import on_threads as on_tensor_threads

EXPERTS, WIDTH, TOP = 4, 6, 2


class RowThread:
    """One of several threads that divide experts."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, group.rank, group.size

    def gather(self, counts: Tensor) -> Tensor:
        return torch.stack(self.group.all_gather(counts))

    def all_to_all(self, rows: Tensor, table: Counts) -> Tensor:
        return self.group.all_to_all(rows, table[self.rank], [row[self.rank] for row in table])


def on_threads(size: int, work) -> list:
    return on_tensor_threads(size, lambda group: work(RowThread(group)))


def experts_of(first: Tensor, second: Tensor):
    """Returns a function that runs experts one by one, on rows sorted by expert."""

    def run(rows: Tensor, ends: Tensor) -> Tensor:
        begins, parts = 0, []
        for expert, end in enumerate(ends.tolist()):
            parts.append(functional.silu(rows[begins:end] @ first[expert]) @ second[expert])
            begins = end
        return torch.cat(parts)

    return run


def mixture(x: Tensor, router: Tensor, run) -> Tensor:
    """A mixture whose tokens are sorted by expert, as transformers' grouped form does it."""
    weight, expert = (x @ router).softmax(-1).topk(TOP)
    chosen, order = expert.flatten().sort(stable=True)
    ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)
    rows = run(x[order // TOP], ends) * weight.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return rows[back].view(-1, TOP, x.shape[1]).sum(1)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


ROUTER, FIRST, SECOND = drawn(WIDTH, EXPERTS), drawn(EXPERTS, WIDTH, 10, seed=1), drawn(EXPERTS, 10, WIDTH, seed=2)


def one_rank(tokens: Tensor) -> list[Tensor]:
    x, router, first, second = leaves(tokens, ROUTER, FIRST, SECOND)
    y = mixture(x, router, experts_of(first, second))
    (y**2).sum().backward()
    return [y.detach(), x.grad, router.grad, first.grad, second.grad]


def one_of_several(group: RowThread, tokens: Tensor, counts: list[int]) -> list[Tensor]:
    mine = slice(EXPERTS // group.size * group.rank, EXPERTS // group.size * (group.rank + 1))
    x, router, first, second = leaves(tokens.split(counts)[group.rank], ROUTER, FIRST[mine], SECOND[mine])
    y = mixture(x, router, lambda rows, ends: run_sorted(rows, ends, group, experts_of(first, second)))
    (y**2).sum().backward()
    return [y.detach(), x.grad, router.grad, first.grad, second.grad]


def check_equal(ranks: list[list[Tensor]], whole: list[Tensor]) -> None:
    """Tokens are joined, gradients of the router are summed, those of experts are joined: no divisor anywhere."""
    merge = [torch.cat, torch.cat, sum, torch.cat, torch.cat]
    for join, parts, expected in zip(merge, zip(*ranks, strict=True), whole, strict=True):
        torch.testing.assert_close(join(list(parts)), expected, rtol=1e-12, atol=1e-12)


def test_experts_on_several_ranks_equal_those_on_one():
    tokens = drawn(11, WIDTH, seed=3)
    for counts in ([7, 4], [4, 0, 1, 6]):
        check_equal(on_threads(len(counts), lambda g, c=counts: one_of_several(g, tokens, c)), one_rank(tokens))


def test_a_rank_whose_experts_get_no_token_takes_part():
    tokens = drawn(6, WIDTH, seed=3)
    tokens[:, 0] = 100.0  # with this column of the router all tokens choose experts 0 and 1
    router = torch.zeros(WIDTH, EXPERTS, dtype=torch.float64)
    router[0] = torch.tensor([2.0, 1.0, 0.0, 0.0])

    def work(group: RowThread) -> tuple[Tensor, Tensor | None]:
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        first, second = leaves(FIRST[mine], SECOND[mine])
        x = tokens.chunk(2)[group.rank].clone().requires_grad_()
        y = mixture(x, router, lambda rows, ends: run_sorted(rows, ends, group, experts_of(first, second)))
        y.sum().backward()
        return y.detach(), first.grad

    (_, busy), (_, idle) = on_threads(2, work)
    assert busy.abs().sum() > 0
    assert idle.abs().sum() == 0


def test_every_row_arrives_once_and_returns_to_its_place():
    seen: list[Tensor] = []

    def work(group: RowThread) -> Tensor:
        rows = torch.arange(10.0)[:, None] + 100 * group.rank
        ends = torch.tensor([[3, 3, 9, 10], [0, 4, 4, 10]][group.rank], dtype=torch.int32)

        def run(there: Tensor, _: Tensor) -> Tensor:
            seen.append(there)
            return there * 2

        return run_sorted(rows, ends, group, run)

    results = on_threads(2, work)
    assert sorted(torch.cat(seen).flatten().tolist()) == [*range(10), *range(100, 110)]
    for rank, result in enumerate(results):
        assert result.flatten().tolist() == [2 * (n + 100 * rank) for n in range(10)]


def test_slots_of_several_ranks_equal_those_on_one():
    slots = [3, 2]
    parts = [drawn(EXPERTS, count, WIDTH, seed=count) for count in slots]
    whole = leaves(torch.cat(parts, 1), FIRST)
    expected = (whole[0] @ whole[1]).tanh()
    (expected**2).sum().backward()

    def work(group: RowThread) -> list[Tensor]:
        rows, first = leaves(parts[group.rank], FIRST.chunk(2)[group.rank])
        y = run_slots(rows, group, lambda there: (there @ first).tanh())
        (y**2).sum().backward()
        return [y.detach(), rows.grad, first.grad]

    ranks = on_threads(2, work)
    for n, (expectation, dim) in enumerate([(expected.detach(), 1), (whole[0].grad, 1), (whole[1].grad, 0)]):
        torch.testing.assert_close(torch.cat([rank[n] for rank in ranks], dim), expectation, rtol=1e-12, atol=1e-12)


def test_rows_over_capacity_return_zeros_and_the_capacity_is_that_of_the_fullest_rank():
    ends = [[5, 5, 6, 8], [1, 2, 3, 4]]
    assert capacity_of(8, 4, 1.0) == 2
    sizes: set[int] = set()

    def work(group: RowThread) -> list[list[float]]:
        rows = (torch.arange(float(ends[group.rank][-1])) + 1)[:, None].requires_grad_()

        def run(there: Tensor, _: Tensor) -> Tensor:
            sizes.add(len(there))
            return there * 10

        result = run_capped(rows, torch.tensor(ends[group.rank], dtype=torch.int32), group, run, 1.0)
        result.sum().backward()
        return [result.flatten().tolist(), rows.grad.flatten().tolist()]

    first, second = on_threads(2, work)
    assert first == [[10, 20, 0, 0, 0, 60, 70, 80], [10, 10, 0, 0, 0, 10, 10, 10]]
    assert second == [[10, 20, 30, 40], [10] * 4]
    assert sizes == {2 * 2 * 2}  # two experts of a rank, two ranks, two slots


def test_a_capacity_that_does_not_bind_equals_all_experts_on_one_rank():
    tokens, counts = drawn(9, WIDTH, seed=4), [5, 4]

    def work(group: RowThread) -> list[Tensor]:
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        x, router, first, second = leaves(tokens.split(counts)[group.rank], ROUTER, FIRST[mine], SECOND[mine])
        experts = experts_of(first, second)
        y = mixture(x, router, lambda rows, ends: run_capped(rows, ends, group, experts, 4.0))
        (y**2).sum().backward()
        return [y.detach(), x.grad, router.grad, first.grad, second.grad]

    check_equal(on_threads(2, work), one_rank(tokens))
