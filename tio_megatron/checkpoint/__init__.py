"""HF checkpoints as names, shapes, bytes and digests. No engine's symbol and no arithmetic lives here.

One table (:func:`tensor_table`, of :mod:`tio_megatron.models`) says for every tensor of a model which axis a layout may cut; loading, exporting, pushing
weights and digests all read it.
"""

from tio_megatron.checkpoint.config import CheckpointConfig, CheckpointError, require_no_code
from tio_megatron.checkpoint.digest import digest_differences, manifest_digest, row_digests, tensor_digest
from tio_megatron.checkpoint.held import HeldWeights, Weights
from tio_megatron.checkpoint.reader import Checkpoint
from tio_megatron.checkpoint.training import TrainingDraft, damaged_files, latest_training, training_state, unlisted_files, whole_beside
from tio_megatron.checkpoint.writer import write_checkpoint
from tio_megatron.models import Shard, TensorSpec, tensor_table

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "HeldWeights",
    "Shard",
    "TensorSpec",
    "TrainingDraft",
    "Weights",
    "damaged_files",
    "digest_differences",
    "latest_training",
    "manifest_digest",
    "require_no_code",
    "row_digests",
    "tensor_digest",
    "tensor_table",
    "training_state",
    "unlisted_files",
    "whole_beside",
    "write_checkpoint",
]
