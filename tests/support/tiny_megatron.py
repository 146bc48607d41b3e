"""Tiny megatron-core models in a layout, each rank a real process, under the contract or stock. For tests only.

The parent should have imported megatron-core already: ranks are forked from it and start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import tio_megatron
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract, Layout
from tio_megatron.layers.context import all_tokens, own_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing.ranks import run_ranks


@dataclass(frozen=True)
class Setup:
    """How a tiny model is run.

    ``ordered``: under the contract, else stock. ``padding``: what the vocabulary's padding rows hold (stock counts them, so give it 0.0).
    ``fields``: further fields of ``TransformerConfig``. All models of one process must have the same vocabulary.
    """

    path: Path
    layout: Layout = Layout()
    ordered: bool = True
    contract: Contract = field(default_factory=Contract)
    padding: float = float("nan")
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Processes it needs."""
        return self.layout.tp * self.layout.pp * self.layout.cp * self.layout.dp


def on_ranks(setup: Setup, work: Callable[[Any, Setup], Any], *, timeout: float = 120.0) -> list[Any]:
    """What ``work(model, setup)`` returns on each rank, the model built and loaded there."""
    return [results[0] for results in on_ranks_each([setup], work, timeout=timeout)]


def on_ranks_each(setups: Sequence[Setup], work: Callable[[Any, Setup], Any], *, timeout: float = 300.0) -> list[list[Any]]:
    """For each rank what ``work(model, setup)`` returns for each of ``setups``, which differ in nothing but the model: one start for all."""
    first = setups[0]
    assert all(replace(setup, path=first.path) == first for setup in setups)

    def rank_main(rank: int) -> list[Any]:
        found = []
        with running(first):
            for setup in setups:
                with Checkpoint(setup.path) as checkpoint:
                    found.append(work(build(setup, checkpoint), setup))
        return found

    return run_ranks(first.ranks, rank_main, timeout=timeout)


@contextlib.contextmanager
def running(setup: Setup) -> Iterator[None]:
    """On a rank: CPU device, megatron-core's groups, and the contract unless stock is asked for."""
    from megatron.core import parallel_state, tensor_parallel

    from tio_megatron.integrations.megatron import cpu_device

    layout = setup.layout
    with cpu_device.enabled():
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.expert_tp, context_parallel_size=layout.cp
        )
        tensor_parallel.random.model_parallel_cuda_manual_seed(1)
        with Checkpoint(setup.path) as checkpoint:
            vocab = checkpoint.config.shape.vocab
        with tio_megatron.apply(setup.contract, vocab_size=vocab) if setup.ordered else contextlib.nullcontext():
            yield


def build(setup: Setup, checkpoint: Checkpoint) -> Any:
    """On a rank: this stage of the model, of stock classes as a user writes it, with the checkpoint's weights."""
    from megatron.core import parallel_state

    from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
    from tio_megatron.integrations.megatron.weights.transfer import load_weights

    config, layout = checkpoint.config, setup.layout
    # Stock's padding, which differs by TP.
    rows = padded_vocab(config, layout)
    model = gpt_model(config, transformer_config(config, layout, **{"calculate_per_token_loss": True} | setup.fields), vocab_size=rows)
    load_weights(model, checkpoint)
    first = parallel_state.get_tensor_model_parallel_rank() * (rows // layout.tp)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                weight[max(0, config.shape.vocab - first) :] = setup.padding
    return model


def last_stage(results: Sequence[Any]) -> list[Any]:
    """The results of the ranks that have one."""
    return [result for result in results if result is not None]


def losses(model: Any, batches: Sequence[torch.Tensor], *, backward: bool = False, weight: float = 1.0) -> torch.Tensor | None:
    """Loss per token ``[samples, S]`` fp32 of ``batches`` (each ``[samples, S + 1]``) through megatron-core's own schedule, on the last stage.

    With ``backward`` the gradient of ``weight`` times the sum of all losses is added up. Context-parallel ranks get their tokens here, and
    all losses come back.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    group = parallel_state.get_context_parallel_group()
    cut = Sequences(None, group.rank(), group.size())
    found: list[torch.Tensor] = []
    length = batches[0].shape[1] - 1
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1) if cut.ranks == 1 else None

    def step(iterator: Iterator[torch.Tensor], stage: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(iterator)
        inputs, labels = (own_tokens(part.contiguous(), cut) for part in (tokens[:, :-1], tokens[:, 1:]))
        out = stage(inputs, torch.arange(inputs.shape[1]).expand_as(inputs), hidden, labels=labels)

        def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            found.append(all_tokens(per_token, cut, group))
            return per_token.sum() * weight, torch.tensor(1, dtype=torch.int), {}

        return out, loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=batches[0].shape[0],
        forward_only=not backward,
    )
    return torch.cat(found) if found else None


def ddp(model: Any, **options: Any) -> Any:
    """The model in megatron-core's DDP with fp32 gradients, stock's finalizing included."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from tio_megatron.integrations.megatron.training.grad_patches import finalize_weighted_grads

    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options), model)
    model.config.finalize_model_grads_func = finalize_weighted_grads
    wrapped.zero_grad_buffer()
    return wrapped


def gradients(model: Any, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every gradient in the fp32 buffers of :func:`ddp`, whole and by HF name, on every rank. Spoils the parameters."""
    from tio_megatron.integrations.megatron.weights.transfer import export_weights

    for parameter in model.parameters():
        parameter.data = parameter.main_grad.clone()
    return dict(export_weights(model, replace(checkpoint.config, dtype="float32"), destination=None))
