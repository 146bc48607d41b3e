"""Random states of all ranks as JSON: torch's CPU generator, Python's, numpy's and megatron-core's tracked ones.

No number of a training under the contract is drawn from them (dropout is refused); a data loader may.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker

TRACKED = "megatron/"


def random_states() -> dict[str, str]:
    """This rank's states by name, as text."""
    version, words, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = numpy.random.get_state()
    found = {
        "torch": _text(torch.random.get_rng_state()),
        "python": json.dumps([version, list(words), gauss]),
        "numpy": json.dumps([algorithm, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]),
    }
    for name, state in get_cuda_rng_tracker().get_states().items():
        found[f"{TRACKED}{name}"] = _text(convert_cuda_rng_state(state, to_graphable=False))
    return found


def packed(everyone: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The states of all ranks, each kept once: ``ranks`` names what ``states`` holds."""
    states: dict[str, str] = {}
    ranks = []
    for theirs in everyone:
        mine = {}
        for name, text in theirs.items():
            mine[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
            states[mine[name]] = text
        ranks.append(mine)
    return {"ranks": ranks, "states": states}


def restore_random_states(saved: Mapping[str, Any], rank: int, *, same_layout: bool) -> list[str]:
    """Put this rank's states back: all of them in the layout they come from, else those that were the same on every rank.

    Returns:
        The names of the states that could not be carried to this layout and stay as they are.
    """
    ranks = saved["ranks"]
    names = sorted({name for theirs in ranks for name in theirs})
    kept = []
    for name in names:
        if same_layout:
            chosen = {ranks[rank][name]} if name in ranks[rank] else set()
        else:
            chosen = {theirs.get(name) for theirs in ranks}
        if len(chosen) != 1 or None in chosen or not _restore(name, saved["states"][chosen.pop()]):
            kept.append(name)
    return kept


def _restore(name: str, text: str) -> bool:
    if name == "torch":
        torch.random.set_rng_state(_tensor(text))
    elif name == "python":
        version, words, gauss = json.loads(text)
        random.setstate((version, tuple(words), gauss))
    elif name == "numpy":
        algorithm, keys, position, has_gauss, cached = json.loads(text)
        numpy.random.set_state((algorithm, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    else:
        tracker, key = get_cuda_rng_tracker(), name.removeprefix(TRACKED)
        states = tracker.get_states()
        if not isinstance(states.get(key), torch.Tensor):
            return False
        tracker.set_states(states | {key: _tensor(text)})
    return True


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
