"""Megatron's expert layer with our dispatchers."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.integrations.megatron import groups
from tio_megatron.integrations.megatron.applied.moe_refusals import refuse_moe
from tio_megatron.integrations.megatron.modules.dispatchers import DISPATCHERS
from tio_megatron.integrations.megatron.modules.router import adopt_router
from tio_megatron.integrations.megatron.versions import release


class OrderedMoELayer(MoELayer):
    """``MoELayer`` whose dispatcher is ours. Its router and experts come from the submodules; stock's forward drives them.

    Stock chooses the dispatcher by a string inside ``__init__``, with no seam, so it is replaced right after.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        **more: Any,
    ) -> None:
        refuse_moe(config)
        held = groups.as_keyword(groups.given(more))
        super().__init__(config, submodules, layer_number, **more | held)
        if not release().router_in_spec:
            adopt_router(self.router)
        dispatcher = DISPATCHERS[config.moe_token_dispatcher_type]
        self.token_dispatcher = dispatcher(self.num_local_experts, self.local_expert_indices, config=self.config, **held)
