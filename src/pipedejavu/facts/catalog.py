"""Known devices: published figures, each with its source, for machines that are not at hand.

A stated rate is the peak of the arithmetic units; training reaches a share of it, which is given if it is known.
"""

from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field

from pipedejavu.facts.error import InputError, nearest
from pipedejavu.facts.quantity import Bytes, BytesPerSecond, FlopPerSecond
from pipedejavu.facts.record import Record


class KnownDevice(Record):
    """One model of GPU or CPU; a CPU's figures are those of one socket."""

    name: str
    aliases: tuple[str, ...] = ()
    title: str
    type: Literal["cpu", "gpu"]
    memory_bytes: Bytes = 0
    """Memory of a GPU, after what ECC takes; zero for a CPU, whose memory is the host's."""
    memory_bytes_per_s: BytesPerSecond
    memory_bits: int = Field(ge=1)
    """Width of the memory bus."""
    memory_transfers_per_s: float = Field(gt=0)
    """Transfers per second on each bit of the bus."""
    flop_per_s: FlopPerSecond
    """Dense matrix products in `dtype`, accumulated in float32; a CPU's at its base clock."""
    dtype: Literal["float32", "float16", "bfloat16"]
    units: int = Field(ge=1)
    """Tensor cores, CUDA cores if there are none, or a CPU's cores."""
    flop_per_cycle: int = Field(ge=1)
    """FLOP per cycle of each unit."""
    cycles_per_s: float = Field(gt=0)
    pcie_bytes_per_s: BytesPerSecond
    """In one direction, over 16 lanes."""
    peer_bytes_per_s: BytesPerSecond = 0.0
    """NVLink between all such GPUs of a host, in one direction; zero if there is none."""
    power_w: float = Field(gt=0)
    """The power that the vendor states: of a GPU's board, or of a CPU's package at its base clock."""
    source: str = Field(min_length=1)
    efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of `flop_per_s` observed in training, counting recomputation; None if unknown."""
    efficiency_source: str = ""
    """A publication with its figure, or an entry of docs/log.md."""


class Catalog(Record):
    """All known devices."""

    devices: tuple[KnownDevice, ...]


@cache
def read_catalog() -> tuple[KnownDevice, ...]:
    """Returns the devices of `catalog.json`."""
    text = files("pipedejavu.facts").joinpath("catalog.json").read_text("utf-8")
    return Catalog.from_json(text, source="catalog.json").devices


def known_device(name: str, type_: Literal["cpu", "gpu"] | None = None) -> KnownDevice:
    """Returns a device by its name or alias; raises InputError with the nearest name of its type."""
    rows = [row for row in read_catalog() if type_ in (None, row.type)]
    names = {alias: row for row in rows for alias in (row.name, *row.aliases)}
    asked = name.strip().lower().replace(" ", "-").replace("_", "-")
    if asked in names:
        return names[asked]
    what = {"cpu": "CPU", "gpu": "GPU", None: "device"}[type_]
    raise InputError(f"the library of devices has no {what} '{name}'{nearest(asked, names)}")
