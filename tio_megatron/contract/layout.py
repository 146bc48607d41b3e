"""How one side cuts the model. Names follow Megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from tio_megatron.contract.tree import is_power_of_two
from tio_megatron.findings.messages import shown


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups of one side (trainer or rollout).

    ``tp`` tensor, ``ep`` expert, ``etp`` expert-tensor, ``pp`` pipeline, ``cp`` context, ``dp`` data parallel; ``sp`` is sequence
    parallelism. ``etp`` defaults to ``tp`` divided among nothing, as in Megatron: the same as ``tp``.

    Raises:
        ValueError: a size that is no whole number of at least 1, ``sp`` that is neither True nor False, or sequence parallelism without tensor parallelism.

    >>> str(Layout(tp=2, ep=2, etp=1, sp=True))
    'TP 2 EP 2 ETP 1 SP'
    """

    tp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    pp: int = 1
    cp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "etp", "pp", "cp", "dp"):
            size = getattr(self, name)
            if size is None and name == "etp":
                continue
            if type(size) is not int:  # True would print as a size
                raise ValueError(f"layout: {name} must be a whole number, got {shown(size)}")
            if size < 1:
                raise ValueError(f"layout: {name} must be at least 1, got {shown(size)}")
        if type(self.sp) is not bool:
            raise ValueError(f"layout: sp must be True or False, got {shown(self.sp)}")
        if self.sp and self.tp == 1:
            raise ValueError("layout: sequence parallelism (sp) needs tp of at least 2")

    @property
    def expert_tp(self) -> int:
        """The expert-tensor-parallel size in force: ``etp`` or, when it is not given, ``tp``."""
        return self.tp if self.etp is None else self.etp

    @property
    def on_leaves(self) -> bool:
        """Whether any number of leaves, a power of two, divides by ``tp`` and by ``expert_tp``."""
        return is_power_of_two(self.tp) and is_power_of_two(self.expert_tp)

    @classmethod
    def for_vllm(cls, tp: int = 1, expert_parallel: bool = False, dp: int = 1) -> Layout:
        """The layout vLLM makes of ``tensor_parallel_size`` and ``enable_expert_parallel``: experts are cut whole or by TP, never both.

        >>> str(Layout.for_vllm(tp=2, expert_parallel=True))
        'TP 2 EP 2 ETP 1'
        """
        for name, size in (("tp", tp), ("dp", dp)):
            if type(size) is not int:
                raise ValueError(f"layout: {name} must be a whole number, got {shown(size)}")
        if type(expert_parallel) is not bool:
            raise ValueError(f"layout: expert_parallel must be True or False, got {shown(expert_parallel)}")
        return cls(tp=tp, ep=tp * dp, etp=1, dp=dp) if expert_parallel else cls(tp=tp, etp=tp, dp=dp)

    def __str__(self) -> str:
        words = [f"TP {self.tp}"]
        words += [f"EP {self.ep}"] if self.ep > 1 else []
        words += [f"ETP {self.expert_tp}"] if self.expert_tp != self.tp else []
        words += ["SP"] if self.sp else []
        words += [f"{name.upper()} {getattr(self, name)}" for name in ("pp", "cp", "dp") if getattr(self, name) > 1]
        return " ".join(words)
