"""Known devices: figures of public documents, each with its source, for machines that are not at hand.

A stated rate is what the arithmetic units could do; training reaches a share of it, which is given where it is known.
"""

from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field

from pipedejavu.facts.error import InputError, nearest
from pipedejavu.facts.quantity import Bytes, BytesPerSecond, FlopPerSecond
from pipedejavu.facts.record import Record


class KnownDevice(Record):
    """One model of GPU, or of CPU: then the figures are those of one socket."""

    name: str
    aliases: tuple[str, ...] = ()
    title: str
    type: Literal["cpu", "gpu"]
    memory_bytes: Bytes = 0
    """Of a GPU, without what ECC takes of it; a CPU's is the host's."""
    memory_bytes_per_s: BytesPerSecond
    memory_bits: int = Field(ge=1)
    """Width of the memory's bus."""
    memory_transfers_per_s: float = Field(gt=0)
    """Of each of its bits."""
    flop_per_s: FlopPerSecond
    """Of matrix products in `dtype`, dense, accumulated in float32; of a CPU at its base clock."""
    dtype: Literal["float32", "float16", "bfloat16"]
    units: int = Field(ge=1)
    """Tensor cores, CUDA cores where there are none, or a CPU's cores."""
    flop_per_cycle: int = Field(ge=1)
    """Of each unit."""
    cycles_per_s: float = Field(gt=0)
    pcie_bytes_per_s: BytesPerSecond
    """One way, 16 lanes."""
    peer_bytes_per_s: BytesPerSecond = 0.0
    """One way, of NVLink that joins all such GPUs of a host; zero without."""
    source: str = Field(min_length=1)
    efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of `flop_per_s` that training was seen to reach, recomputation counted; None is unknown."""
    efficiency_source: str = ""
    """A publication with its figure, or the entry of docs/log.md."""


class Catalog(Record):
    """All known devices."""

    devices: tuple[KnownDevice, ...]


@cache
def read_catalog() -> tuple[KnownDevice, ...]:
    """Returns the devices that come with the project."""
    text = files("pipedejavu.facts").joinpath("catalog.json").read_text("utf-8")
    return Catalog.from_json(text, source="catalog.json").devices


def known_device(name: str, type_: Literal["cpu", "gpu"] | None = None) -> KnownDevice:
    """Returns a device by its name or an alias; raises InputError with the nearest name of its type."""
    rows = [row for row in read_catalog() if type_ in (None, row.type)]
    names = {alias: row for row in rows for alias in (row.name, *row.aliases)}
    asked = name.strip().lower().replace(" ", "-").replace("_", "-")
    if asked in names:
        return names[asked]
    what = {"cpu": "CPU", "gpu": "GPU", None: "device"}[type_]
    raise InputError(f"the library of devices has no {what} '{name}'{nearest(asked, names)}")
