"""Runs Megatron-LM's ``pretrain_gpt.py``, the real one or the stand-in, and reads what it saved."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).parent / "stand_ins" / "megatron_lm"

MODEL = """--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 32
 --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 1000000 --swiglu --disable-bias-linear
 --untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall
 --moe-router-load-balancing-type none --attention-dropout 0 --hidden-dropout 0 --bf16 --max-position-embeddings 64""".split()
"""A small model by the arguments that people give for Qwen3-MoE."""

RUN = """--seq-length 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
 --mock-data --tokenizer-type NullTokenizer --vocab-size 999 --split 99,1,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 7
 --use-cpu-initialization --use-distributed-optimizer --overlap-grad-reduce""".split()

CPU = "--distributed-backend gloo --tio-device cpu".split()
STOCK = """--tio-contract 0 --transformer-impl local --no-rope-fusion --no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion
 --no-masked-softmax-fusion --no-persist-layer-norm --disable-jit-fuser""".split()
"""What stock Megatron-LM needs to run on a CPU, beside the device: nothing of CUDA, apex or Transformer Engine."""

LAYOUTS = {
    "TP 1": [],
    "TP 2": "--tensor-model-parallel-size 2 --sequence-parallel".split(),
    "TP 2 EP 2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1".split(),
    "EP 2 DP 2": "--expert-model-parallel-size 2".split(),
    "PP 2": "--pipeline-model-parallel-size 2".split(),
}


def ranks_of(layout: str) -> int:
    """One rank, or two."""
    return 1 if layout == "TP 1" else 2


YAML = """
language_model: {num_layers: 2, hidden_size: 128, ffn_hidden_size: 256, num_attention_heads: 8, num_query_groups: 4, kv_channels: 32,
  qk_layernorm: true, normalization: RMSNorm, layernorm_epsilon: 1.e-6, activation_func: swiglu, gated_linear_unit: true, add_bias_linear: false,
  num_moe_experts: 8, moe_router_topk: 4, moe_ffn_hidden_size: 64, moe_token_dispatcher_type: alltoall, moe_grouped_gemm: true,
  moe_router_load_balancing_type: none, attention_dropout: 0.0, hidden_dropout: 0.0, init_method: null}
model_parallel: {bf16: true, use_cpu_initialization: true, tensor_model_parallel_size: %(tp)d, sequence_parallel: %(sp)s, expert_model_parallel_size: %(ep)d,
  expert_tensor_parallel_size: 1, pipeline_model_parallel_size: 1, context_parallel_size: 1}
position_embedding_type: rope
rotary_base: 1000000
untie_embeddings_and_output_weights: true
max_position_embeddings: 64
seq_length: 64
micro_batch_size: 2
global_batch_size: 4
lr: 1e-3
min_lr: 1.e-4
lr_decay_style: cosine
weight_decay: 0.1
clip_grad: 1.0
mock_data: true
tokenizer_type: NullTokenizer
vocab_size: 999
split: 99,1,0
eval_iters: 0
eval_interval: 1000
log_interval: 1
seed: 7
use_distributed_optimizer: true
overlap_grad_reduce: true
distributed_backend: gloo
"""
"""What MODEL and RUN say, as a file for ``--yaml-cfg``, and a layout."""


PAGE = ROOT / "docs" / "megatron-lm.md"


def printed() -> list[str]:
    """The arguments of the command that the page prints, as they stand there: for two ranks, and with a layout."""
    start = "torchrun --nproc-per-node 2 -m tio_megatron.run pretrain_gpt.py "
    (block,) = (block for block in PAGE.read_text().split("```") if block.strip().startswith(start))
    return shlex.split(block.replace("\\\n", " ").strip().removeprefix(start))


def run(
    folder: Path,
    layout: str,
    *more: str,
    script: str | Path = "pretrain_gpt.py",
    starter: bool = True,
    variables: dict[str, str] | None = None,
    yaml_cfg: Path | None = None,
    said: Sequence[str] | None = None,
) -> str:
    """What the script prints (both streams) in that layout; the last line is its status.

    Args:
        folder: of Megatron-LM, or of the stand-in.
        more: arguments after those of the model and of the layout.
        starter: by ``tio_megatron.run``; else the script itself is started.
        yaml_cfg: a file that says what the model, the run and the layout are, in place of arguments.
        said: arguments that say all that, in place of ours; ``layout`` tells the number of ranks alone.
    """
    ranks = ranks_of(layout)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TIO_CONTRACT", "TIO_MEGATRON")}
    path = os.pathsep.join([str(ROOT), str(folder), *os.environ.get("MEGATRON_LM_NEEDS", "").split(os.pathsep)]).strip(os.pathsep)
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"} | (variables or {})
    started = ["-m", "tio_megatron.run", str(folder / script)] if starter else [str(folder / script)]
    if ranks > 1:
        started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *started]
    elif "--help" not in more:
        # What torchrun would set for one rank, without the time it takes to start.
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if said is None:
        said = [*MODEL, *RUN, *CPU, *LAYOUTS[layout]] if yaml_cfg is None else ["--yaml-cfg", str(yaml_cfg), *CPU[2:]]
    done = subprocess.run([sys.executable, *started, *said, *more], capture_output=True, text=True, env=environment, timeout=400)
    return f"{done.stdout}\n{done.stderr}\nstatus {done.returncode}"


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, whole, of the newest checkpoint in ``folder``; the optimizer's, which are cut by the layout, are left out."""
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    reader = dcp.FileSystemReader(folder / f"iter_{iteration:07d}")
    described = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if name.startswith(("embedding.", "decoder.", "output_layer.")) and hasattr(entry, "size")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def trained(
    folder: Path,
    out: Path,
    layout: str,
    *more: str,
    load: Path | None = None,
    iters: int = 3,
    yaml_cfg: Path | None = None,
    said: Sequence[str] | None = None,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights after a few steps in that layout, and what the steps report: losses (where they are printed) and norms."""
    start = [] if load is None else ["--load", str(load), "--finetune", "--no-load-rng"]
    text = run(folder, layout, "--train-iters", str(iters), "--save", str(out), "--save-interval", str(iters), *start, *more, yaml_cfg=yaml_cfg, said=said)
    assert text.endswith("status 0"), text[-4000:]
    # Ranks print into one stream, sometimes behind each other's lines.
    return saved(out), re.findall(r"\| ((?:lm loss|grad norm): \S+)", text)


def linked(sources: Path, target: Path) -> Path:
    """A folder of links to the sources, as they are, with the datasets' C++ helper of megatron-core's wheel beside them: it is compiled already."""
    import megatron.core

    for pattern in ("*.py", "megatron/**/*"):
        for path in sources.glob(pattern):
            if path.is_file():
                link = target / path.relative_to(sources)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
    for path in (Path(megatron.core.__file__).parent / "datasets").glob("helpers_cpp*.so"):
        (target / "megatron" / "core" / "datasets" / path.name).symlink_to(path)
    return target
