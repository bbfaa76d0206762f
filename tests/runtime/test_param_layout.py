"""Layouts of parameters: parts of ranks, and whole parameters of parts."""

import torch

from pipedejavu.runtime.param_layout import ParamLayout


def test_fused_parts_are_each_divided():
    whole = torch.arange(12.0)[:, None].expand(12, 2)
    layout = ParamLayout((12, 2), 0, parts=(6, 4, 2))
    shards = [layout.local(whole, rank, 2) for rank in range(2)]
    assert shards[0][:, 0].tolist() == [0, 1, 2, 6, 7, 10]
    assert shards[1][:, 0].tolist() == [3, 4, 5, 8, 9, 11]
    assert torch.equal(layout.whole(shards), whole)


def test_a_whole_parameter_is_the_first_ranks():
    whole = torch.arange(3.0)
    layout = ParamLayout((3,))
    assert layout.local(whole, 1, 2) is whole
    assert layout.whole([whole, whole]) is whole
    assert not layout.is_divided
