"""Shards of flattened parameters: even, in order, and together the whole."""

import pytest
import torch

from pipedejavu.engine.shard_layout import ALIGNED, ShardLayout


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shapes", [[(5, 3), (3,), (7,)], [(2,)], [(ALIGNED, 2), (1,), (ALIGNED,), ()], [(0, 4), (9,)]])
def test_the_shards_of_all_members_are_the_parameters_and_zeros(size, shapes):
    tensors = {f"p{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    layouts = [ShardLayout({name: t.shape for name, t in tensors.items()}, size, n) for n in range(size)]
    flat = layouts[0].flatten(tensors)
    count = sum(t.numel() for t in tensors.values())
    assert {layout.length for layout in layouts} == {-(-count // size)}
    assert len(flat) == size * layouts[0].length
    assert not flat[count:].any()
    assert torch.equal(torch.cat([layout.shard(flat) for layout in layouts]), flat)
    for name, view in layouts[0].views(flat).items():
        assert torch.equal(view, tensors[name])
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        parts = [layout.part(name, tensors[name]) for layout in layouts]
        assert torch.equal(torch.cat([p for p in parts if p is not None] or [flat[:0]]), tensors[name].reshape(-1))
        for layout, part in zip(layouts, parts, strict=True):
            held = layout.parts(layout.shard(flat)).get(name)
            assert (held is None) == (part is None)
            assert part is None or torch.equal(held, part)


def test_parameters_of_a_multiple_of_the_alignment_come_first():
    shapes = {"bias": torch.Size([3]), "weight": torch.Size([ALIGNED, 2]), "norm": torch.Size([ALIGNED])}
    layout = ShardLayout(shapes, 2, 0)
    views = layout.views(torch.zeros(2 * layout.length))
    assert [(name, view.storage_offset()) for name, view in views.items()] == [
        ("weight", 0), ("norm", 2 * ALIGNED), ("bias", 3 * ALIGNED)
    ]  # fmt: skip
