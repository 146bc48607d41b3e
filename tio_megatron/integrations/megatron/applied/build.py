"""What happens around the building and running of a ``GPTModel`` under a contract."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tio_megatron.integrations.megatron import groups
from tio_megatron.integrations.megatron.applied import refusals, state, workers
from tio_megatron.integrations.megatron.modules import parts as modules
from tio_megatron.integrations.megatron.modules import specs
from tio_megatron.integrations.megatron.versions import FULL, release

logger = logging.getLogger(__name__)


def prepare(arguments: dict[str, Any]) -> None:
    """Before stock builds: refuse what the contract cannot hold, and put our parts into the layer spec.

    Args:
        arguments: of ``GPTModel.__init__``, changed in place.

    Raises:
        ValueError: an unsupported option, part or layout, by name; or a rank in which the contract is not in force.
    """
    held = groups.passed(arguments)
    workers.meet(held)
    config = arguments["config"]
    vocab = true_vocab(arguments["vocab_size"])
    refusals.check(config, arguments, state.active(), vocab)
    pp_rank = None if held is None or held.pp is None else held.pp.rank()
    arguments["transformer_layer_spec"] = specs.convert(arguments["transformer_layer_spec"], config, arguments.get("vp_stage"), pp_rank)


def finish(model: Any, arguments: dict[str, Any]) -> None:
    """After stock has built: adopt what no spec covers (embedding, rotary table, output layer), and remember the contract and the groups.

    Raises:
        ValueError: the vocabulary is cut where no block of the contract ends.
    """
    vocab = true_vocab(model.vocab_size)
    model.tio_groups = held = groups.given(arguments)
    modules.vocab_shard(vocab, model.vocab_size // held.tp.size(), held.tp)
    if hasattr(model, "embedding"):
        modules.adopt_embedding(model.embedding.word_embeddings, vocab)
    model.rotary_pos_emb = modules.OrderedRotaryEmbedding(model.config.kv_channels, model.rotary_base, held.cp)
    if hasattr(model, "output_layer"):
        modules.adopt_output(model.output_layer, vocab)
    model.tio_setting = state.session()
    if model.tio_setting.vocab_size is None:
        logger.info("all %d rows of the vocabulary count; if some are padding, give apply() the true vocab_size", model.vocab_size)


def check_runs(model: Any) -> None:
    """Refuse to run a model that was built for another order, and gradients where the installed megatron-core only scores.

    Raises:
        RuntimeError: it was built outside ``apply()``, or under another contract.
        ValueError: gradients are wanted, and this release of megatron-core has none under a contract.
    """
    setting = getattr(model, "tio_setting", None)
    if setting is None:
        raise RuntimeError("this model was built before tio_megatron.apply(): its layers are stock's; build it again under the contract")
    if setting != state.session():
        raise RuntimeError("this model was built under another contract than the one in force; build it again")
    if not release().trains and torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters()):
        raise ValueError(
            f"GPTModel: training under a contract is not supported with megatron-core {release().version}, which only scores: run it under torch.no_grad(), "
            f"or install megatron-core {FULL}"
        )


def true_vocab(rows: int) -> int:
    """The true vocabulary of a model with ``rows`` rows: what ``apply()`` was told, or all of them."""
    setting = state.session()
    return rows if setting is None or setting.vocab_size is None else setting.vocab_size
