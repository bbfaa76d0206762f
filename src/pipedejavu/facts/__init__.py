"""Frozen records of machines, models and measurements; imports nothing else of the project, and never torch."""

from pipedejavu.facts.catalog import KnownDevice, known_device, read_catalog
from pipedejavu.facts.cluster import Cluster, compose, parse_cluster, read_machine
from pipedejavu.facts.error import FaultsError, InputError, nearest
from pipedejavu.facts.file import open_file, read_file, remove, replace_file
from pipedejavu.facts.gc_pause import paused_collector
from pipedejavu.facts.head_form import HeadForm
from pipedejavu.facts.json_text import finite_form, to_json_text
from pipedejavu.facts.machine import (
    MANY_CORES,
    TRAFFIC,
    CollectiveKind,
    CollectiveTime,
    Device,
    Host,
    Link,
    Machine,
    Overlap,
    Route,
    part_kind,
)
from pipedejavu.facts.malloc_heap import keep_heap
from pipedejavu.facts.measurement import Measurement, Survey
from pipedejavu.facts.memory_file import MemoryFile
from pipedejavu.facts.parent_death import end_with_parent
from pipedejavu.facts.part_slowdown import with_part_times
from pipedejavu.facts.profile import Cost, DividedSums, Edge, Profile, Tie, Unit, UnitTime, joint_spread
from pipedejavu.facts.published import read_profile
from pipedejavu.facts.quantity import Bytes, format_bytes, format_seconds
from pipedejavu.facts.record import Record, write_file
from pipedejavu.facts.timeline import MEMORY_CLASSES, MemoryCurve, Span, Timeline, WorkerSummary

__all__ = [
    "MANY_CORES",
    "MEMORY_CLASSES",
    "TRAFFIC",
    "Bytes",
    "Cluster",
    "CollectiveKind",
    "CollectiveTime",
    "Cost",
    "Device",
    "DividedSums",
    "Edge",
    "FaultsError",
    "HeadForm",
    "Host",
    "InputError",
    "KnownDevice",
    "Link",
    "Machine",
    "Measurement",
    "MemoryCurve",
    "MemoryFile",
    "Overlap",
    "Profile",
    "Record",
    "Route",
    "Span",
    "Survey",
    "Tie",
    "Timeline",
    "Unit",
    "UnitTime",
    "WorkerSummary",
    "compose",
    "end_with_parent",
    "finite_form",
    "format_bytes",
    "format_seconds",
    "joint_spread",
    "keep_heap",
    "known_device",
    "nearest",
    "open_file",
    "parse_cluster",
    "part_kind",
    "paused_collector",
    "read_catalog",
    "read_file",
    "read_machine",
    "read_profile",
    "remove",
    "replace_file",
    "to_json_text",
    "with_part_times",
    "write_file",
]
