"""What would have to change."""

from math import inf

import pytest

from pipedejavu.search import Options, explain, nearest_fit, search
from tests.search.case import machine, profile

OPTIONS = Options(batch=4, is_runnable=True)


def test_where_nothing_fits_the_least_memory_that_would_is_named() -> None:
    # A unit has 400 bytes of weights, gradients and state, and keeps and sends next to nothing.
    model = profile([1e-3] * 2, weights=100, saved=0.0, boundary=0.0)
    place = machine(["fast"], room=600)
    result = search(model, place, OPTIONS)
    assert result.candidates == ()
    (change,) = nearest_fit(model, place, OPTIONS)
    assert change.text == "with 202 B more memory on each GPU"  # 800 are needed; a step is 600·0.25/32 = 4.7
    assert change.factor == inf
    assert str(change) in result.notes[0]


def test_a_smaller_batch_is_named_where_it_would_fit() -> None:
    model = profile([1e-3] * 2, weights=0, saved=100.0, boundary=100.0)
    place = machine(["fast"], room=500)
    options = Options(batch=8, samples=8, is_runnable=True)
    texts = [change.text for change in nearest_fit(model, place, options)]
    assert "with a batch of 4 samples in place of 8" in texts


def test_more_memory_is_named_with_what_it_gains() -> None:
    model = profile([1e-3] * 4, weights=100, saved=120.0, boundary=1.0)
    place = machine(["fast"], room=2400)
    (change,) = explain(model, place, Options(batch=4, samples=4, is_runnable=True))
    assert change.text == "with 1.2 KiB more memory on each GPU"
    assert change.factor == pytest.approx(4 / 3)  # units no longer run forward twice: 12 ms for 16
    assert str(change) == "with 1.2 KiB more memory on each GPU: 1.3× faster"
