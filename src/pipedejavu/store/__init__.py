"""Checkpoints on disk: sharded safetensors with a hashed manifest, whole or not at all, and never a pickle."""

from pipedejavu.store.checkpoint import Checkpoint, is_sound
from pipedejavu.store.foreign import export_dcp, export_hugging, import_dcp, import_hugging, read_weights
from pipedejavu.store.manifest import CheckpointError, DamagedError, Manifest
from pipedejavu.store.part import Tensors
from pipedejavu.store.saver import Saver
from pipedejavu.store.shelf import Shelf

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedError",
    "Manifest",
    "Saver",
    "Shelf",
    "Tensors",
    "export_dcp",
    "export_hugging",
    "import_dcp",
    "import_hugging",
    "is_sound",
    "read_weights",
]
