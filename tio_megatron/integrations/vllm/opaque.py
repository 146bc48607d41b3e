"""Layers whose inside a graph compiler must not see: they look at numbers, or talk to other ranks. In a graph each is one operator.

vLLM compiles a whole model at once and accepts no gap. A layer that cannot be captured is called by its name, ``tio_vllm::layer``, and found
where vLLM finds its attention layers: in the running engine's forward context. So a graph that was kept on disk serves any engine of the
same configuration. In eager mode nothing changes. What is captured around these layers are our kernels' operators, so no sum and no rounding
is left to the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context


class Opaque:
    """Mixin of such a layer. It calls :meth:`become_opaque` when it is built, and :meth:`call` where it would compute."""

    def become_opaque(self, prefix: str) -> None:
        """Be found by the name of ``prefix``, the layer's place in its model.

        Raises:
            ValueError: another layer has that name.
        """
        self.opaque_name = f"tio:{prefix}"
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if self.opaque_name in layers:
            raise ValueError(f"two layers are called {prefix}")
        layers[self.opaque_name] = self

    def call(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        """:meth:`compute`; as one operator while a compiler captures it."""
        if torch.compiler.is_compiling():
            return torch.ops.tio_vllm.layer(x, second, self.opaque_name)
        return self.compute(x, second)

    def compute(self, x: Tensor, second: Tensor | None) -> Tensor:
        """The layer's work."""
        raise NotImplementedError

    def like(self, x: Tensor) -> Tensor:
        """An empty tensor of the result's shape and type."""
        raise NotImplementedError


def _named(name: str) -> Any:
    return get_forward_context().no_compile_layers[name]


_library = torch.library.Library("tio_vllm", "FRAGMENT")
_library.define("layer(Tensor x, Tensor? second, str name) -> Tensor")
_library.impl("layer", lambda x, second, name: _named(name).compute(x, second), "CPU")
torch.library.register_fake("tio_vllm::layer", lambda x, second, name: _named(name).like(x), lib=_library)
