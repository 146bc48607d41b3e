"""Layouts as people write them (``tp2+ep2+allgather``), and how many ranks they need."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tio_megatron.contract.layout import Layout
from tio_megatron.findings.messages import shown

DISPATCHERS = ("alltoall", "allgather")


@dataclass(frozen=True)
class TrainerLayout:
    """Megatron's layout and its token dispatcher.

    >>> trainer = TrainerLayout.parse("tp2+ep2")
    >>> str(trainer), trainer.ranks
    ('TP 2 EP 2 ETP 1 SP', 2)
    >>> str(TrainerLayout.parse("ep2+allgather"))
    'TP 1 EP 2 DP 2 allgather'
    """

    layout: Layout
    dispatcher: str = "alltoall"

    @classmethod
    def of(cls, *, tp: int = 1, ep: int = 1, etp: int | None = None, pp: int = 1, cp: int = 1, sp: bool | None = None, dp: int | None = None,
           dispatcher: str = "alltoall") -> TrainerLayout:  # fmt: skip
        """Fill what is left out: ``etp`` is 1 with experts spread over ranks and ``tp`` without, ``sp`` is on with ``tp`` (Megatron trains
        a mixture of experts in no other way), ``dp`` is the smallest that holds the expert groups.

        Raises:
            ValueError: the sizes do not fit each other.
        """
        etp = etp if etp is not None else (1 if ep > 1 else tp)
        for name, size in (("tp", tp), ("ep", ep), ("etp", etp), ("pp", pp), ("cp", cp)):
            if size < 1:
                raise ValueError(f"layout: {name} must be at least 1, got {size}")
        if dp is None:
            dp = math.lcm(tp * cp, ep * etp) // (tp * cp)
        if (tp * cp * dp) % (ep * etp):
            raise ValueError(f"layout: ep {ep} times etp {etp} does not divide the {tp * cp * dp} ranks of a stage (tp {tp}, dp {dp})")
        return cls(Layout(tp=tp, ep=ep, etp=etp, sp=tp > 1 if sp is None else sp, pp=pp, cp=cp, dp=dp), dispatcher)

    @classmethod
    def parse(cls, text: str) -> TrainerLayout:
        """From words joined by ``+``: ``tp2``, ``ep2``, ``etp1``, ``pp2``, ``dp2``, ``sp``, ``alltoall`` or ``allgather``.

        Raises:
            ValueError: an unknown word, or sizes that do not fit.
        """
        fields: dict[str, int | bool | str] = {}
        for word in re.split(r"[+,\s]+", text.strip().lower()):
            if sized := re.fullmatch(r"(tp|ep|etp|pp|cp|dp)(\d{1,9})", word, re.ASCII):
                if sized[1] in fields:
                    raise ValueError(f"layout {shown(text)}: {sized[1]} is given twice")
                fields[sized[1]] = int(sized[2])
            elif word in ("sp", "nosp"):
                fields["sp"] = word == "sp"
            elif word in DISPATCHERS:
                fields["dispatcher"] = word
            else:
                raise ValueError(f"layout {shown(text)}: {shown(word)} is none of tpN, epN, etpN, ppN, dpN, sp, {', '.join(DISPATCHERS)}; example: tp2+ep2+sp")
        return cls.of(**fields)  # type: ignore[arg-type]

    @property
    def ranks(self) -> int:
        """Processes of this layout."""
        return self.layout.tp * self.layout.cp * self.layout.pp * self.layout.dp

    def __str__(self) -> str:
        return f"{self.layout}{'' if self.dispatcher == 'alltoall' else ' ' + self.dispatcher}"

    @property
    def words(self) -> str:
        """What :meth:`parse` reads."""
        sizes = self.layout
        return f"tp{sizes.tp}+ep{sizes.ep}+etp{sizes.expert_tp}+pp{sizes.pp}+cp{sizes.cp}+dp{sizes.dp}+{'sp' if sizes.sp else 'nosp'}+{self.dispatcher}"


@dataclass(frozen=True)
class RolloutLayout:
    """vLLM's layout.

    >>> str(RolloutLayout.parse("tp2+ep")), RolloutLayout.parse("tp2").layout.expert_tp
    ('TP 2 EP 2', 2)
    """

    tp: int = 1
    expert_parallel: bool = False

    @classmethod
    def parse(cls, text: str) -> RolloutLayout:
        """From ``tpN`` or ``tpN+ep`` (experts spread whole over the N ranks).

        Raises:
            ValueError: an unknown word.
        """
        tp: int | None = None
        expert_parallel, asked = False, ""
        for word in re.split(r"[+,\s]+", text.strip().lower()):
            if sized := re.fullmatch(r"tp([1-9]\d{0,8})", word, re.ASCII):
                if tp is not None:
                    raise ValueError(f"rollout layout {shown(text)}: tp is given twice")
                tp = int(sized[1])
            elif re.fullmatch(r"ep\d{0,9}", word, re.ASCII):
                expert_parallel, asked = True, word[2:]
            else:
                raise ValueError(f"rollout layout {shown(text)}: {shown(word)} is neither tpN nor ep; example: tp2+ep")
        tp = tp or 1
        if asked and int(asked) != tp:
            raise ValueError(f"rollout layout {shown(text)}: vLLM spreads experts over its tp ranks, so ep is tp ({tp}); write tp{tp}+ep")
        return cls(tp, expert_parallel)

    @property
    def layout(self) -> Layout:
        """In the contract's terms."""
        return Layout.for_vllm(self.tp, self.expert_parallel)

    def __str__(self) -> str:
        return f"TP {self.tp}{f' EP {self.tp}' if self.expert_parallel else ''}"
