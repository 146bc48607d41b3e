"""Megatron's expert layer with our dispatchers."""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.integrations.megatron.moe_dispatchers import DISPATCHERS
from tio_megatron.integrations.megatron.moe_refusals import refuse_moe


class OrderedMoELayer(MoELayer):
    """``MoELayer`` whose dispatcher is ours. Its router and experts come from the submodules; stock's forward drives them.

    Stock chooses the dispatcher by a string inside ``__init__``, with no seam, so it is replaced right after.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **more: Any,
    ) -> None:
        refuse_moe(config)
        pg_collection = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, pg_collection, **more)
        dispatcher = DISPATCHERS[config.moe_token_dispatcher_type]
        self.token_dispatcher = dispatcher(self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection)
