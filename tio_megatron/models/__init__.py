"""What each architecture is made of: a file describes it, tables are derived. No engine is imported, no tensor is read and nothing is computed here.

A file of this room that has a ``MODEL`` describes an architecture. Tensor tables, loading and export, vLLM's packing, trace points, recorders, the plan's
costs and the doctor's models are read from it, and no other room names an architecture or a tensor of a checkpoint. Layers of a new kind need code in
``layers`` and ``integrations``; a dense decoder of the blocks that :mod:`.blocks` has is one file.
"""

from tio_megatron.models.description import Architecture, Block, Operation, Packing, Parameter, Shard, Tensor
from tio_megatron.models.points import SCALED, Point, points
from tio_megatron.models.registry import EXAMPLE, architecture_of, architectures, moe_layers, published, published_model, row_axis, shape_from_hf
from tio_megatron.models.tables import Placed, TensorSpec, megatron_tensors, parameters, tensor_count, tensor_table, tied_tensors, vocabulary_parameters

__all__ = [
    "EXAMPLE",
    "SCALED",
    "Architecture",
    "Block",
    "Operation",
    "Packing",
    "Parameter",
    "Placed",
    "Point",
    "Shard",
    "Tensor",
    "TensorSpec",
    "architecture_of",
    "architectures",
    "megatron_tensors",
    "moe_layers",
    "parameters",
    "points",
    "published",
    "published_model",
    "row_axis",
    "shape_from_hf",
    "tensor_count",
    "tensor_table",
    "tied_tensors",
    "vocabulary_parameters",
]
