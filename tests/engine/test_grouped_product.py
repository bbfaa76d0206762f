"""Grouped products in float64, against torch's own in float32."""

import pytest
import torch

from pipedejavu.engine.grouped_product import grouped_product, is_grouped_product

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)
FORMS = {
    "rows": ((8, 16), (3, 16, 8), ENDS),
    "columns": ((3, 8, 16), (16, 8), ENDS),
    "summed": ((16, 8), (8, 16), ENDS),
    "batched": ((3, 8, 16), (3, 16, 8), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_grouped_product_is_that_of_torch(form: str):
    *shapes, ends = FORMS[form]
    left, right = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes))
    expected = torch.nn.functional.grouped_mm(left.float(), right.float(), offs=ends)
    result = grouped_product(left.double(), right.double(), ends)
    torch.testing.assert_close(result.float(), expected, rtol=1e-5, atol=1e-5)


def test_the_operation_is_known():
    assert is_grouped_product(torch.ops.aten._grouped_mm.default)
    assert not is_grouped_product(torch.ops.aten.mm.default)
