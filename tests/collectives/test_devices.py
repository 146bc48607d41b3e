"""Sums and moves between ranks stay on the tensors' device: run on a device of shapes alone, where nothing of the CPU's could be mixed in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tio_megatron import collectives as c
from tio_megatron.collectives import wire
from tio_megatron.contract import ReductionTree

class OneDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        mixed = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)} - {"meta"}
        assert not mixed, (func, mixed)
        return out

# The two places where bytes leave a rank: here nothing leaves, and what would must be on the device.
sent = []
def there(*tensors): sent.extend(tensors); assert all(t.device.type == "meta" for t in tensors), tensors
wire.links = lambda sends, recvs, group, deadline: there(*(t for _, t in [*sends, *recvs]))
wire.all_to_all = lambda out, out_counts, x, in_counts, group, deadline: there(out, x)

dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=4)
group, tree = dist.group.WORLD, ReductionTree(8)
spans = [tree.frontier(2 * r, 2 * r + 2) for r in range(4)]
def made(*shape, dtype=torch.float32): return torch.empty(*shape, dtype=dtype, device="meta")
with OneDevice():
    for schedule in ("doubling", "scatter", "ring"):
        assert c.all_reduce(made(3, 40), group, schedule=schedule, out_dtype=torch.bfloat16).shape == (3, 40)
        assert c.all_reduce_nodes(made(1, 3, 40), spans, tree, group, schedule=schedule).shape == (3, 40)
    assert c.reduce_scatter(made(8, 40), group).shape == (2, 40)
    assert c.reduce_scatter_nodes(made(1, 8, 40), spans, tree, group, splits=[1, 5, 0, 2]).shape[1:] == (40,)
    assert c.all_gather(made(2, 5, dtype=torch.bfloat16), group).shape == (8, 5)
    assert c.all_to_all(made(8, 5, dtype=torch.bfloat16), None, None, group).shape == (8, 5)
    assert c.all_max(made(7), group).shape == (7,)
print("on one device" if len(sent) > 20 else len(sent))
"""


@pytest.mark.full
def test_nothing_in_a_collective_assumes_the_cpu() -> None:
    for rank in (0, 3):
        done = subprocess.run([sys.executable, "-c", CODE.replace("RANK", str(rank))], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.strip() == "on one device", done.stderr[-3000:]
