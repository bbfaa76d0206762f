"""Shares of a summation service: they are all of a vector, load every interface alike, and become chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedejavu.program.summation import CHUNK_BYTES, chunks_of, interface_share, summed_runs, summing_shares


@given(st.integers(2, 40), st.integers(0, 60))
def test_shares_are_all_of_a_vector_and_load_interfaces_as_published(n: int, k: int) -> None:
    trainer, helper = summing_shares(n, k)
    assert n * trainer + k * helper == pytest.approx(1)
    sent = 1 - trainer + (n - 1) * trainer  # what others sum, and its own sums to all others
    assert interface_share(n, k) == pytest.approx(max(sent, n * helper if k else 0))
    if k <= n:
        assert interface_share(n, k) == pytest.approx(2 * n * (n - 1) / (n * n + k * n - 2 * k))
        assert not k or sent == pytest.approx(n * helper)


def test_without_helpers_it_is_an_all_reduce_and_with_as_many_a_parameter_server() -> None:
    assert interface_share(4, 0) == pytest.approx(2 * 3 / 4)
    assert interface_share(4, 4) == interface_share(4, 7) == 1
    assert summing_shares(4, 4) == (0, 0.25)


@given(st.integers(0, 5_000_000), st.integers(2, 8), st.integers(0, 8), st.sampled_from([2, 4, 8]))
def test_runs_and_chunks_cover_a_vector_once(numel: int, n: int, k: int, itemsize: int) -> None:
    runs = summed_runs(numel, n, k)
    assert len(runs) == n + k
    chunks = [chunk for run in runs for chunk in chunks_of(run, itemsize)]
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks)][: len(chunks)]
    assert sum(map(len, chunks)) == numel
    assert all(0 < len(chunk) * itemsize <= CHUNK_BYTES for chunk in chunks)
    whole = (numel * share for share in [*[summing_shares(n, k)[0]] * n, *[summing_shares(n, k)[1]] * k])
    assert all(abs(len(run) - share) <= 1.001 for run, share in zip(runs, whole, strict=True))
