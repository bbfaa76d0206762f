"""The library of devices: figures that agree with each other, each with its source."""

import pytest

from pipedejavu.facts import InputError, KnownDevice, known_device, read_catalog
from pipedejavu.facts.error import repeated

rows = pytest.mark.parametrize("row", read_catalog(), ids=lambda row: row.name)
PCIE = {15.75e9, 31.5e9, 63e9}
"""16 lanes of 8, 16 and 32 GT/s at 128 of 130 bits."""


def test_the_devices_that_people_have_are_there() -> None:
    names = [row.name for row in read_catalog()]
    wanted = ["v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "rtx-4090", "rtx-3090"]
    assert {*wanted, "gtx-1650", "t4", "l4"} <= set(names)
    assert sum(row.type == "cpu" for row in read_catalog()) >= 8
    assert repeated([alias for row in read_catalog() for alias in (row.name, *row.aliases)]) == []


@rows
def test_rates_are_products_of_their_parts(row: KnownDevice) -> None:
    """Documents round to three digits, some to two."""
    assert row.units * row.flop_per_cycle * row.cycles_per_s == pytest.approx(row.flop_per_s, rel=0.01)
    assert row.memory_bits * row.memory_transfers_per_s / 8 == pytest.approx(row.memory_bytes_per_s, rel=0.01)


@rows
def test_figures_are_plausible(row: KnownDevice) -> None:
    assert len(row.source) > 10
    assert row.name == row.name.lower()
    assert row.pcie_bytes_per_s in PCIE
    assert 0.5e12 < row.flop_per_s < 3e15
    assert 30e9 < row.memory_bytes_per_s < 10e12
    assert 1e9 <= row.cycles_per_s < 6e9
    # From what a byte of memory is worth: more than an operation, fewer than a thousand.
    assert 1 < row.flop_per_s / row.memory_bytes_per_s < 1000
    if row.type == "gpu":
        assert 4 << 30 <= row.memory_bytes < 300 << 30
        assert row.memory_bytes_per_s > row.peer_bytes_per_s
    else:
        assert (row.memory_bytes, row.peer_bytes_per_s) == (0, 0)
        assert row.memory_bits % 64 == 0


@rows
def test_an_efficiency_has_a_source(row: KnownDevice) -> None:
    assert (row.efficiency is None) == (row.efficiency_source == "")


@pytest.mark.parametrize("text", ["a100-80gb", "A100", " A100 80GB ", "a100_80gb"])
def test_names_are_read_as_people_write_them(text: str) -> None:
    assert known_device(text).name == "a100-80gb"


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(InputError, match=r"^the library of devices has no GPU 'rtx-4080'; did you mean 'rtx-4090'\?$"):
        known_device("rtx-4080", "gpu")
    with pytest.raises(InputError, match=r"^the library of devices has no CPU 'a100'; "):
        known_device("a100", "cpu")
