"""The order of every sum, as data. Pure Python: no torch, no numpy, no arithmetic on tensors lives here."""

from tio_megatron.contract.families import FAMILIES, Family
from tio_megatron.contract.layout import Layout
from tio_megatron.contract.misfits import LayoutProblem
from tio_megatron.contract.model import ModelShape
from tio_megatron.contract.spec import Contract, Cuts
from tio_megatron.contract.tree import Node, ReductionTree
from tio_megatron.contract.vocab import VocabOrder

__all__ = ["FAMILIES", "Contract", "Cuts", "Family", "Layout", "LayoutProblem", "ModelShape", "Node", "ReductionTree", "VocabOrder"]
