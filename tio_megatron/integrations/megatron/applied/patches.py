"""The patches that :func:`tio_megatron.apply` installs: one small function each, where megatron-core has no seam."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from tio_megatron import collectives
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron.training.grad_patches import DDP, grad_patches
from tio_megatron.integrations.megatron.training.optimizer_patches import optimizer_patches
from tio_megatron.integrations.megatron.training.schedule_patches import schedule_patches
from tio_megatron.integrations.megatron.versions import release, require_training
from tio_megatron.integrations.patching import Patch

MAPPINGS = "megatron.core.tensor_parallel.mappings"
GPT = "megatron.core.models.gpt.gpt_model:GPTModel"


def all_patches() -> list[Patch]:
    """Every patch for the installed release."""
    return [
        Patch(
            f"{GPT}.__init__", build_ordered, why="the one place every model passes, whatever spec and imports its author used", stock="the model's own code"
        ),
        Patch(f"{GPT}.forward", run_ordered, why="a model built before apply() would compute half of the sums in stock's order", stock="the forward pass"),
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            configure,
            why="stock asks Transformer Engine for its version before a model is built, and dies where there is none",
            stock="every other check: those of ours wait for the model",
        ),
        Patch(
            "megatron.core.transformer.attention:apply_rotary_pos_emb",
            rotate,
            why="Attention.forward reads this name; a spec has no part for it",
            stock="latent attention's own import of the same function",
        ),
        Patch(
            "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy",
            cross_entropy,
            why="vocab_parallel_cross_entropy reads this name, and many modules import that function by value",
            stock="transposes and the loss function around it",
        ),
        Patch(f"{MAPPINGS}:_reduce", all_reduce, why="every tensor-parallel all-reduce of the mappings ends here", stock="integers: their sums have no order"),
        Patch(f"{MAPPINGS}:_reduce_scatter_along_first_dim", reduce_scatter, why="every tensor-parallel reduce-scatter of the mappings ends here"),
        Patch(f"{MAPPINGS}:_gather_along_first_dim", gather, why="gloo refuses uneven sizes; bytes are only moved", stock="even gathers"),
        *(training_patches() if release().trains else refusing_patches()),
    ]


def training_patches() -> list[Patch]:
    """Gradients, optimizer, schedules: of the one release that trains."""
    return [*grad_patches(), *optimizer_patches(), *schedule_patches()]


def refusing_patches() -> list[Patch]:
    """Where training begins, under a release that only scores: get_megatron_optimizer wants a model in DDP, and :func:`run_ordered` refuses gradients."""
    return [Patch(f"{DDP}.__init__", refuse_training("DistributedDataParallel"), why="training would add in stock's order, in silence")]


def refuse_training(what: str) -> Callable[[Any], Any]:
    """A function that raises in place of the original."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def refused(*args: Any, **kwargs: Any) -> Any:
            require_training(what)

        return refused

    return build


def build_ordered(original: Callable[..., None]) -> Callable[..., None]:
    """``GPTModel.__init__``: refuse what the contract cannot hold, convert the layer spec, then adopt the parts that no spec covers."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from tio_megatron.integrations.megatron.applied import build
        from tio_megatron.integrations.megatron.weights.random_weights import true_rows

        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        build.prepare(bound.arguments)
        rows = bound.arguments["vocab_size"]
        with true_rows(bound.arguments["config"], rows, build.true_vocab(rows)):
            original(*bound.args, **bound.kwargs)
        build.finish(self, bound.arguments)

    return __init__


def run_ordered(original: Callable[..., Any]) -> Callable[..., Any]:
    """``GPTModel.forward``: refuse a model of another contract, and megatron-core's inference engines, then run stock's code."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from tio_megatron.integrations.megatron.applied import build
        from tio_megatron.integrations.megatron.training import micro_batches

        build.check_runs(self)
        if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None or len(args) > 5 and args[5] is not None:
            raise ValueError("inference_context is not supported: megatron-core's inference engines are not covered; score whole sequences instead")
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, torch.Tensor) and not tokens.numel():
            raise ValueError(f"GPTModel: input_ids has shape {list(tokens.shape)}, an empty batch; leave it out of the step, on every rank")
        micro_batches.enter(kwargs.get("packed_seq_params", args[6] if len(args) > 6 else None))
        return original(self, *args, **kwargs)

    return forward


def configure(original: Callable[..., None]) -> Callable[..., None]:
    """``TransformerConfig.__post_init__``: quantized products, and what some releases choke on, are refused by name before stock looks."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        from tio_megatron.integrations.megatron.applied import refusals

        refusals.check_early(self)
        original(self)

    return __post_init__


def rotate(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``apply_rotary_pos_emb``: one fp32 rotation and one rounding, from the table that our rotary embedding gives in place of angles."""

    def apply_rotary_pos_emb(
        t: torch.Tensor, freqs: torch.Tensor, config: Any, cu_seqlens: torch.Tensor | None = None, mscale: float = 1.0, cp_group: Any = None, **more: Any
    ) -> torch.Tensor:
        from tio_megatron.layers.rope import rope
        from tio_megatron.layers.sequences import Sequences

        # Row 0 of the table holds cosines of 0; angles at position 0 are 0.
        if freqs.dtype != torch.float32 or freqs.shape[-1] != t.shape[-1] or float(freqs[0, 0, 0, 0]) != 1.0 or mscale != 1.0 or any(more.values()):
            raise ValueError("rope: angles of a stock rotary embedding reached the ordered rotation; build the model under tio_megatron.apply()")
        if release().groups is None:
            cp_group = parallel_state.get_context_parallel_group()
        rank, ranks = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
        return rope(t, freqs[:, 0, 0], Sequences(cu_seqlens, rank, ranks))

    return apply_rotary_pos_emb


def cross_entropy(original: Any) -> Any:
    """``_VocabParallelCrossEntropy``: minus our log-probability, over the true vocabulary."""

    class OrderedCrossEntropy:
        """Stands in for the autograd class; only ``apply`` is used."""

        @staticmethod
        def apply(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, tp_group: Any = None) -> torch.Tensor:
            """``[s, b, rows of this rank]`` logits and ``[s, b]`` targets to the ``[s, b]`` fp32 loss.

            Raises:
                ValueError: label smoothing, or a target outside the vocabulary.
            """
            from tio_megatron.integrations.megatron.modules.parts import vocab_shard
            from tio_megatron.layers.vocab import vocab_logprob

            if label_smoothing:
                raise ValueError(f"cross entropy: label_smoothing={label_smoothing} is not supported; 0.0 would work")
            group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
            session = state.session()
            vocab = session.vocab_size if session is not None and session.vocab_size is not None else logits.shape[-1] * group.size()
            return -vocab_logprob(logits.float(), target, vocab_shard(vocab, logits.shape[-1], group), group=group)

    return OrderedCrossEntropy


def all_reduce(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``_reduce``: the tree over ranks in fp32, one rounding; integers go to stock."""

    def _reduce(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        group = _tensor(group)
        if group.size() == 1 or not input_.is_floating_point():
            return original(input_) if release().groups is None else original(input_, group)
        return collectives.all_reduce(_as_fp32(input_), group, out_dtype=input_.dtype)

    return _reduce


def reduce_scatter(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``_reduce_scatter_along_first_dim``: the tree over ranks in fp32, one rounding, this rank's slice; integers go to stock."""

    def _reduce_scatter_along_first_dim(
        input_: torch.Tensor, group: Any = None, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        group = _tensor(group)
        if group.size() == 1 or not input_.is_floating_point():
            return original(input_, group, input_split_sizes, use_global_buffer)
        splits = None if input_split_sizes is None else [int(n) for n in input_split_sizes]
        return collectives.reduce_scatter(_as_fp32(input_), group, splits=splits, out_dtype=input_.dtype)

    return _reduce_scatter_along_first_dim


def gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``_gather_along_first_dim``: uneven sizes through our own move."""

    def _gather_along_first_dim(input_: torch.Tensor, group: Any = None, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        group = _tensor(group)
        if group.size() == 1 or output_split_sizes is None:
            return original(input_, group, output_split_sizes, use_global_buffer)
        return collectives.all_gather(input_.contiguous(), group, sizes=[int(n) for n in output_split_sizes])

    return _gather_along_first_dim


def _tensor(group: Any) -> Any:
    """The first releases leave the group out where it is the tensor-parallel one."""
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


def _as_fp32(t: torch.Tensor) -> torch.Tensor:
    if t.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"tensor-parallel sum: dtype {t.dtype} is not supported; bf16 and fp32 are")
    return t.float().contiguous()
