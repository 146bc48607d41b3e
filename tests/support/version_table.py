"""The forward layout table under whatever megatron-core comes first on the path. Started as a process of its own, one for each release:

    PYTHONPATH=FOLDER_OF_THE_RELEASE:CHECKOUT:CHECKOUT/tests/support python tests/support/version_table.py all

Prints one JSON object: the release, and for each row the digest of all its log-probabilities, which must be that of the row's model on one rank.
"""

import copy
import hashlib
import importlib.metadata
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from moe_models import SEQUENCES, Row, joined, scores
from tiny_megatron import Setup, losses, on_ranks

from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.integrations.megatron.applied import refusals
from tio_megatron.integrations.megatron.versions import release
from tio_megatron.testing import RankError, run_ranks
from tio_megatron.testing.qwen3 import DENSE, write_tiny

NO_SLICES = Row(tp=2, ep=2, etp=2, inference=True)
EXPERTS = (
    Row(),
    Row(dtype="bfloat16"),
    Row(k=8),
    Row(tp=2, ep=2),
    Row(tp=2, etp=2, way="allgather", grouped=False),
    Row(ep=2, way="allgather", k=8),
    Row(ep=4, dtype="bfloat16"),
    Row(tp=4, ep=2, etp=2, way="allgather"),
    Row(tp=4, etp=4, grouped=False),
    Row(pp=2, ep=2, tp=2, way="allgather"),
    NO_SLICES,
    Row(cp=2, ep=2),
    Row(cp=2, ep=2, tp=2, way="allgather", dtype="bfloat16"),
)
"""Mixtures of experts; the rows of one rank first."""


@dataclass(frozen=True)
class Dense:
    """A dense model: a layout and how it is fed."""

    layout: Layout
    packed: bool = False
    tied: bool = False
    batch: int | None = None

    def __str__(self) -> str:
        return f"dense {self.layout}" + " packed" * self.packed + " tied" * self.tied + (f" batch {self.batch}" if self.batch else "")


DENSES = (
    Dense(Layout()),
    Dense(Layout(), tied=True),
    Dense(Layout(tp=2), batch=1),
    Dense(Layout(tp=2, sp=True), packed=True, tied=True),
    Dense(Layout(tp=4, sp=True)),
    Dense(Layout(tp=2, pp=2, sp=True), packed=True, batch=2),
    Dense(Layout(cp=2), packed=True),
    Dense(Layout(tp=2, cp=2, sp=True)),
)
QUICK = (Row(tp=2, ep=2), Dense(Layout(tp=2, sp=True), packed=True))
"""For the quickest look at a release, beside the rows of one rank."""


def digest(tensors: list[torch.Tensor]) -> str:
    """16 hex digits over the bytes."""
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def experts(row: Row) -> str:
    """The digest of a row of :data:`EXPERTS`."""
    return digest([joined(run_ranks(row.world, scores, row, {}, timeout=300), "ours")])


def dense(row: Dense, folder: Path) -> str:
    """The digest of a row of :data:`DENSES`."""
    path = write_tiny(folder / f"dense-{row.tied}", DENSE, tie_word_embeddings=row.tied)
    options = {"packed": row.packed, "batch": row.batch}
    found = [one.logprobs for one in on_ranks(Setup(path, row.layout), lambda model, _: token_logprobs(model, SEQUENCES, **options)) if one is not None]
    assert len({digest(one) for one in found}) == 1, f"{row}: ranks differ"
    return digest(found[0])


def model_of(row: Row | Dense) -> str:
    """Rows with one answer have one name."""
    return f"dense, tied {row.tied}" if isinstance(row, Dense) else f"experts, top-{row.k}, {row.dtype}"


def without_slices() -> str:
    """What is said of TP and EP without sequence parallelism, where stock refuses it."""
    try:
        experts(NO_SLICES)
    except RankError as error:
        return str(error).strip().splitlines()[-1].strip()
    return "nothing was refused"


def stock(folder: Path) -> dict[str, str]:
    """Unpatched losses of one dense bf16 model on 1 and 4 ranks: the control, which must differ."""
    path = write_tiny(folder / "control", DENSE, vocab_size=1024)
    tokens = torch.randint(700, (2, 161), generator=torch.Generator().manual_seed(2))
    found = {}
    for layout in (Layout(), Layout(tp=4, sp=True)):
        setup = Setup(path, layout, ordered=False, padding=0.0)
        found[str(layout)] = digest([one for one in on_ranks(setup, lambda model, _: losses(model, [tokens])) if one is not None][:1])
    return found


def refused(folder: Path) -> list[str]:
    """What is said when training is begun: gradients, data parallelism; and what of an option that 0.16.1 does not have, where there is one."""

    def begin(model: torch.nn.Module, setup: Setup) -> list[str]:
        tokens = torch.tensor([[1, 2, 3]])
        tries = (
            lambda: model(tokens, torch.arange(3)[None], None),
            lambda: DistributedDataParallel(model.config, DistributedDataParallelConfig(), model),
        )
        return [said(one) for one in tries] + [*map(str, refusals.unknown_options(with_new_options(model.config)))]

    return on_ranks(Setup(write_tiny(folder / "refused", DENSE)), begin)[0]


def with_new_options(config: TransformerConfig) -> TransformerConfig:
    """A copy in which every option that 0.16.1 does not have is on."""
    changed = copy.copy(config)
    for name in release().new_options:
        setattr(changed, name, "on")
    return changed


def said(attempt) -> str:
    """The message of the ``ValueError`` that ``attempt`` ends with."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def main(which: str) -> dict[str, object]:
    """``all`` rows, or ``quick``."""
    rows = [*EXPERTS, *DENSES] if which == "all" else [EXPERTS[0], DENSES[0], *QUICK]
    rows = [row for row in rows if row != NO_SLICES or not release().wants_slices]
    with TemporaryDirectory(prefix="tio-versions-") as name:
        folder = Path(name)
        found = {str(row): (model_of(row), experts(row) if isinstance(row, Row) else dense(row, folder)) for row in rows}
        return {
            "megatron-core": importlib.metadata.version("megatron-core"),
            "rows": found,
            "without slices": without_slices() if release().wants_slices else None,
            "stock": stock(folder) if which == "all" else None,
            "refused": None if release().trains else refused(folder),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1]), indent=1))
