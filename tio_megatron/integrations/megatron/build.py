"""What happens around the building and running of a ``GPTModel`` under a contract."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.utils import get_pg_rank

from tio_megatron.integrations.megatron import modules, refusals, specs, state, workers

logger = logging.getLogger(__name__)


def prepare(arguments: dict[str, Any]) -> None:
    """Before stock builds: refuse what the contract cannot hold, and put our parts into the layer spec.

    Args:
        arguments: of ``GPTModel.__init__``, changed in place.

    Raises:
        ValueError: an unsupported option, part or layout, by name; or a rank in which the contract is not in force.
    """
    workers.meet(arguments["pg_collection"])
    config = arguments["config"]
    vocab = true_vocab(arguments["vocab_size"])
    refusals.check(config, arguments, state.active(), vocab)
    pg_collection = arguments["pg_collection"]
    pp_rank = None if pg_collection is None else get_pg_rank(pg_collection.pp)
    arguments["transformer_layer_spec"] = specs.convert(arguments["transformer_layer_spec"], config, arguments["vp_stage"], pp_rank)


def finish(model: Any) -> None:
    """After stock has built: adopt what no spec covers (embedding, rotary table, output layer), and remember the contract.

    Raises:
        ValueError: the vocabulary is cut where no block of the contract ends.
    """
    vocab = true_vocab(model.vocab_size)
    modules.vocab_shard(vocab, model.vocab_size // model.tp_group.size(), model.tp_group)
    if hasattr(model, "embedding"):
        modules.adopt_embedding(model.embedding.word_embeddings, vocab)
    model.rotary_pos_emb = modules.OrderedRotaryEmbedding(model.config.kv_channels, model.rotary_base, model.pg_collection.cp)
    if hasattr(model, "output_layer"):
        modules.adopt_output(model.output_layer, vocab)
    model.tio_setting = state.session()
    if model.tio_setting.vocab_size is None:
        logger.info("all %d rows of the vocabulary count; if some are padding, give apply() the true vocab_size", model.vocab_size)


def check_runs(model: Any) -> None:
    """Refuse to run a model that was built for another order.

    Raises:
        RuntimeError: it was built outside ``apply()``, or under another contract.
    """
    setting = getattr(model, "tio_setting", None)
    if setting is None:
        raise RuntimeError("this model was built before tio_megatron.apply(): its layers are stock's; build it again under the contract")
    if setting != state.session():
        raise RuntimeError("this model was built under another contract than the one in force; build it again")


def true_vocab(rows: int) -> int:
    """The true vocabulary of a model with ``rows`` rows: what ``apply()`` was told, or all of them."""
    setting = state.session()
    return rows if setting is None or setting.vocab_size is None else setting.vocab_size
