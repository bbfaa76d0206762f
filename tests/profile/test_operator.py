"""Rows of measured operators: how they are read, and which operation is of which class."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.profile.operator import CLASSES, classify, known_rows, read_rows

HEADER = "device,type,dtype,operator,pass,shape,flop,bytes,time_s,spread,flop_per_s,bytes_per_s"


@pytest.mark.parametrize(
    ("name", "class_"),
    [
        ("mm", "matmul"),
        ("addmm", "matmul"),
        ("bmm", "matmul"),
        ("baddbmm", "matmul"),
        ("convolution", "conv"),
        ("convolution_backward", "conv"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("_scaled_dot_product_efficient_attention", "attention"),
        ("native_layer_norm_backward", "norm"),
        ("native_batch_norm", "norm"),
        ("_softmax_backward_data", "softmax"),
        ("_log_softmax", "softmax"),
        ("nll_loss_forward", "softmax"),
        ("embedding_dense_backward", "embedding"),
        ("index_select", "embedding"),
        ("add", "elementwise"),
        ("mul", "elementwise"),
        ("gelu_backward", "elementwise"),
        ("sum", "elementwise"),
        ("max_pool2d_with_indices", "elementwise"),
    ],
)
def test_operations_have_a_class(name: str, class_: str) -> None:
    assert classify(name) == class_


def test_the_rows_of_the_project_are_whole() -> None:
    rows = known_rows()
    assert {row.class_ for row in rows} == set(CLASSES)
    assert {row.pass_ for row in rows} == {"forward", "backward"}
    for row in rows:
        assert row.flop / row.time_s <= row.flop_per_s * (1 + 1e-4) or row.operator != "matmul"


def test_a_row_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEADER}\nd,cpu,float32,matmul,forward,1x1x1,2,12,1e-6,0.1,1e9,1e10\n")
    (row,) = read_rows(str(path))
    assert (row.class_, row.bound_s) == ("matmul", 2e-9)
    for text in (
        "d,cpu,float32,matmul,forward,1x1x1,2,12,0,0.1,1e9,1e10",
        "d,cpu,float32,add,forward,1,0,4,x,0,1,1",
        "d",
    ):
        path.write_text(f"{HEADER}\n{text}\n")
        with pytest.raises(InputError, match=r"line 2: .* but it must be a number above zero"):
            read_rows(str(path))
    path.write_text(HEADER.replace("flop_per_s", "rate"))
    with pytest.raises(InputError, match="column 'flop_per_s' is missing; measure rows with bench/operators"):
        read_rows(str(path))
