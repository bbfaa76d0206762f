"""The library of devices: figures that agree with each other, each with its source."""

import json
import re
from decimal import Decimal
from importlib.resources import files
from pathlib import Path

import pytest

from pipedejavu.facts import InputError, KnownDevice, compose, known_device, parse_cluster, read_catalog
from pipedejavu.facts.error import repeated

ROOT = Path(__file__).parents[2]
rows = pytest.mark.parametrize("row", read_catalog(), ids=lambda row: row.name)
CATALOG = json.loads(files("pipedejavu.facts").joinpath("catalog.json").read_text("utf-8"))
STATED = {row["name"]: row for row in CATALOG["devices"]}
"""The same devices, with figures as their documents write them."""
PCIE = {15.75e9, 31.5e9, 63e9}
"""16 lanes of 8, 16 and 32 GT/s at 128 of 130 bits."""
NVLINK = 25e9
"""One way of one link, from the second generation to the fourth."""


def test_the_devices_that_people_have_are_there() -> None:
    names = [row.name for row in read_catalog()]
    wanted = ["v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "rtx-4090", "rtx-3090"]
    assert {*wanted, "gtx-1650", "t4", "l4", "l40s", "a10", "rtx-a6000"} <= set(names)
    assert {"epyc-7763", "epyc-9654", "xeon-8380", "xeon-8480", "ryzen-7950x", "core-i9-13900k"} <= set(names)
    assert repeated([alias for row in read_catalog() for alias in (row.name, *row.aliases)]) == []


@rows
def test_rates_are_products_of_their_parts(row: KnownDevice) -> None:
    """To the last digit that is stated, where zeros at the end of a whole number do not count; but always to 1 %."""
    derived = {
        "flop_per_s": row.units * row.flop_per_cycle * row.cycles_per_s,
        "memory_bytes_per_s": row.memory_bits * row.memory_transfers_per_s / 8,
    }
    for field, value in derived.items():
        number, _unit = STATED[row.name][field].split()
        stated, digits = getattr(row, field), Decimal(number).normalize().as_tuple()
        assert isinstance(digits.exponent, int)
        half_digit = stated / float(number) * 10.0**digits.exponent / 2
        assert value == pytest.approx(stated, abs=min(half_digit, 0.01 * stated), rel=0)


@rows
def test_figures_are_plausible(row: KnownDevice) -> None:
    assert row.name == row.name.lower()
    assert row.pcie_bytes_per_s in PCIE
    assert row.peer_bytes_per_s % NVLINK == 0
    assert 0.5e12 < row.flop_per_s < 3e15
    assert 30e9 < row.memory_bytes_per_s < 10e12
    assert 1e9 <= row.cycles_per_s < 6e9
    # From what a byte of memory is worth: more than an operation, fewer than a thousand.
    assert 1 < row.flop_per_s / row.memory_bytes_per_s < 1000
    if row.type == "gpu":
        assert 4 << 30 <= row.memory_bytes < 300 << 30
        assert row.memory_bytes_per_s > row.peer_bytes_per_s
        # A core multiplies and adds; tensor cores are powers of two of them.
        assert row.flop_per_cycle == 2 if row.dtype == "float32" else row.flop_per_cycle in (64, 128, 256, 512, 1024)
    else:
        assert (row.memory_bytes, row.peer_bytes_per_s) == (0, 0)
        assert row.memory_bits % 64 == 0
        assert row.flop_per_cycle in (32, 64)  # two units that multiply and add 256 or 512 bits


@rows
def test_figures_name_a_document(row: KnownDevice) -> None:
    documents = ("Datasheet", "whitepaper", "Product Brief", "product page", "ARK: ")
    assert any(word in row.source for word in documents)
    maker, model = row.title.split()[0], re.findall(r"[A-Z]*\d\w*", row.title)[0]
    assert maker in row.source
    assert model in row.source or "whitepaper" in row.source


@rows
def test_an_efficiency_has_a_source_that_states_it(row: KnownDevice) -> None:
    """A share with where it can be looked up; a measurement of ours must be in the log, under its date."""
    if row.efficiency is None:
        assert row.efficiency_source == ""
        return
    assert f"{100 * row.efficiency:.0f} %" in row.efficiency_source
    if ours := re.search(r"docs/log\.md, (\S+): .* (\d+) TFLOP/s", row.efficiency_source):
        pages = [path.read_text("utf-8") for path in (ROOT / "docs/log").glob("*.md")]
        entries = [entry for page in pages for entry in page.split("\n## ")]
        assert any(entry.startswith(ours[1]) and f"| {ours[2]} |" in entry for entry in entries)
        assert float(ours[2]) * 1e12 / row.flop_per_s == pytest.approx(row.efficiency, abs=0.005)
    else:
        assert re.search(r"arXiv:\d{4}\.\d{5}|README\.md", row.efficiency_source)


@rows
def test_the_page_of_machines_has_every_device(row: KnownDevice) -> None:
    stated = STATED[row.name]
    names = ", ".join(f"`{name}`" for name in (row.name, *row.aliases))
    memory = [stated["memory_bytes"]] if row.type == "gpu" else [str(row.units)]
    share = f"{100 * row.efficiency:.0f} %" if row.efficiency else ""
    cells = [names, *memory, stated["memory_bytes_per_s"], f"{stated['flop_per_s']} {row.dtype}", share]
    assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in (ROOT / "docs/machines.md").read_text("utf-8")


@rows
def test_every_name_composes(row: KnownDevice) -> None:
    for name in (row.name, *row.aliases):
        machine = compose(parse_cluster(f"2x{name}" if row.type == "cpu" else f"2x{name} + epyc-7763"))
        kinds = [device.kind for device in machine.devices]
        assert kinds == ([f"2x{row.name}"] if row.type == "cpu" else [row.name, row.name, "epyc-7763"])


@pytest.mark.parametrize("text", ["a100-80gb", "A100", " A100 80GB ", "a100_80gb"])
def test_names_are_read_as_people_write_them(text: str) -> None:
    assert known_device(text).name == "a100-80gb"


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(InputError, match=r"^the library of devices has no GPU 'rtx-4080'; did you mean 'rtx-4090'\?$"):
        known_device("rtx-4080", "gpu")
    with pytest.raises(InputError, match=r"^the library of devices has no CPU 'a100'; "):
        known_device("a100", "cpu")
