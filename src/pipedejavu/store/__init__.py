"""Checkpoints on disk: sharded safetensors with a hashed manifest, written atomically, without pickles."""

from pipedejavu.store.checkpoint import Checkpoint, is_sound
from pipedejavu.store.checkpoint_dir import CheckpointDir
from pipedejavu.store.foreign import export_dcp, export_hf, import_dcp, import_hf, read_weights
from pipedejavu.store.manifest import CheckpointError, DamagedError, Manifest
from pipedejavu.store.saver import Saver
from pipedejavu.store.shard_file import Tensors

__all__ = [
    "Checkpoint",
    "CheckpointDir",
    "CheckpointError",
    "DamagedError",
    "Manifest",
    "Saver",
    "Tensors",
    "export_dcp",
    "export_hf",
    "import_dcp",
    "import_hf",
    "is_sound",
    "read_weights",
]
