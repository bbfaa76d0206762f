"""Cores that are kept busy while a model is measured."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.profile import background_load


def test_company_works_until_the_end_and_leaves_the_number_of_threads() -> None:
    before, own = threading.active_count(), torch.get_num_threads()
    used_s = time.process_time() - time.thread_time()
    with background_load(2):
        assert threading.active_count() == before + 2
        assert torch.get_num_threads() == own
        while time.process_time() - time.thread_time() - used_s < 0.02:  # the time that the others have used
            time.sleep(0.001)
    assert threading.active_count() == before


def test_background_load_ends_with_an_error_and_may_be_empty() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="measured"), background_load(1):
        raise ValueError("measured")
    with background_load(0):
        assert threading.active_count() == before
