"""One rank of a world over several hosts, started by torchrun: sums of many sizes, then training in some layouts. Rank 0 prints digests as JSON.

torchrun ... host_ranks.py '{"rows": ["tp4+ep4"], "steps": 2, "sizes": [1, 4096]}'
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from training_rows import CONTRACT, folder  # noqa: E402

from examples.qwen3_moe.training import Recipe, Training, parse  # noqa: E402
from tio_megatron.collectives import all_reduce, reduce_scatter  # noqa: E402
from tio_megatron.contract import ReductionTree  # noqa: E402
from tio_megatron.integrations.megatron.scoring import token_logprobs  # noqa: E402
from tio_megatron.kernels.math import tree_add  # noqa: E402


def part(rank: int, elements: int) -> torch.Tensor:
    """What a rank adds: numbers of very different sizes, the same wherever they are made."""
    made = torch.Generator().manual_seed(1000 * rank + elements % 997)
    return torch.randn(elements, generator=made) * torch.exp2(torch.randint(-12, 12, (elements,), generator=made).float())


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def sums(sizes: list[int]) -> dict[str, str]:
    """Digests of all-reduces and reduce-scatters by every schedule, and of the tree that they promise, made here from all ranks' parts."""
    found, ranks = {}, dist.get_world_size()
    assert str(ReductionTree(ranks))
    for elements in sizes:
        mine = part(dist.get_rank(), elements * ranks)
        found[f"{elements} tree"] = digest(tree_add(torch.stack([part(rank, elements * ranks) for rank in range(ranks)])))
        for schedule in ("auto", "doubling", "scatter", "ring"):
            found[f"{elements} {schedule}"] = digest(all_reduce(mine.clone(), dist.group.WORLD, schedule=schedule))
        pieces = [torch.empty(elements) for _ in range(ranks)]
        dist.all_gather(pieces, reduce_scatter(mine.clone(), dist.group.WORLD))
        found[f"{elements} scattered"] = digest(torch.cat(pieces))
        vendor = mine.clone()
        dist.all_reduce(vendor)
        found[f"{elements} vendor"] = digest(vendor)
    return found


def scored(run: Training) -> str:
    """The digest of the log-probabilities of some sequences; the last pipeline stage has them."""
    made = torch.Generator().manual_seed(7)
    sequences = [torch.randint(0, run.config.shape.vocab, (length,), generator=made).tolist() for length in (5, 33, 18, 2)]
    scores = token_logprobs(run.model, sequences)
    mine = None if scores is None else digest(torch.cat(scores.logprobs))
    everybody: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    (one,) = {found for found in everybody if found is not None}
    return one


def trained(words: str, steps: int, ordered: bool = True) -> str:
    """The digest of everything trained in one layout, and (under the contract) of log-probabilities afterwards; all ranks agree on them."""
    run = Training(Recipe(folder("moe"), steps=steps, warmup=1, lr=5e-3), parse(words), CONTRACT if ordered else None)
    for _ in range(steps):
        run.step()
    made = run.sha256() + (f" log-probabilities {scored(run)}" if ordered else "")
    run.close()
    return made


def main(settings: dict) -> dict:
    """Everything asked for, on this rank."""
    found = {"sums": sums(settings.get("sizes", [])), "rows": {row: trained(row, settings["steps"]) for row in settings.get("rows", [])}}
    return found | {"stock": {row: trained(row, settings["steps"], ordered=False) for row in settings.get("stock", [])}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    from examples.qwen3_moe.world import choose_interface

    choose_interface()
    dist.init_process_group("gloo")
    answer = main(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()
