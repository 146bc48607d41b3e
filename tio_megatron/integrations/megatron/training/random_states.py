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


def check_random_states(saved: Mapping[str, Any], *, same_layout: bool, world: int) -> None:
    """Refuse states that could not be put back, without touching any.

    Raises:
        ValueError: names the state.
    """
    if same_layout and len(saved["ranks"]) != world:
        raise ValueError(f"random: states of {len(saved['ranks'])} ranks in a layout of {world}")
    names = {theirs[name]: name for theirs in saved["ranks"] for name in theirs}
    for key, name in names.items():
        try:
            _try(name, saved["states"][key])
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError, RecursionError) as error:
            raise ValueError(f"random.states.{key}: no state of {name} ({str(error).splitlines()[0] if str(error) else error!r})") from error


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


def _try(name: str, text: str) -> None:
    """Give a state to a generator of its own."""
    if name == "torch":
        torch.Generator().set_state(_tensor(text))
    elif name == "python":
        random.Random().setstate(_python(text))
    elif name == "numpy":
        numpy.random.RandomState().set_state(_numpy(text))
    else:
        ours = get_cuda_rng_tracker().get_states().get(name.removeprefix(TRACKED))
        if isinstance(ours, torch.Tensor) and _tensor(text).numel() != ours.numel():
            raise ValueError(f"{_tensor(text).numel()} bytes, one has {ours.numel()}")


def _restore(name: str, text: str) -> bool:
    if name == "torch":
        torch.random.set_rng_state(_tensor(text))
    elif name == "python":
        random.setstate(_python(text))
    elif name == "numpy":
        numpy.random.set_state(_numpy(text))
    else:
        tracker, key = get_cuda_rng_tracker(), name.removeprefix(TRACKED)
        states = tracker.get_states()
        if not isinstance(states.get(key), torch.Tensor):
            return False
        tracker.set_states(states | {key: _tensor(text)})
    return True


def _python(text: str) -> tuple[Any, ...]:
    version, words, gauss = json.loads(text)
    return version, tuple(words), gauss


def _numpy(text: str) -> tuple[Any, ...]:
    algorithm, keys, position, has_gauss, cached = json.loads(text)
    return algorithm, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
