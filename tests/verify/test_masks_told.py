"""Masks that no table holds are solved for; dropout is named only where each head loses keys of its own."""

import pytest
import torch
from faults import examine
from planted_model import Plan
from planted_variants import attending
from planting import BF16, FP32, Draw, Stage

SEEDS = (1, 2)


def attended(folder, seed, finish_or_mask, **more):
    """One pair whose attention differs in one layer: (finding, place, the side drawn)."""
    draw = Draw(600 + seed)
    sizes = draw.sizes(dtype=draw.choice([BF16, FP32]), heads=8, kv=4, head_dim=16, **more)
    place = f"layers.{draw.layer(sizes)}.attn"
    stage = Stage(folder, draw)
    stage.both(sizes, draw.sequences(sizes, 20, 36, count=3), Plan(steps={place: attending(finish_or_mask(draw))}))
    return examine(folder), place, stage.faulty


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["sinks", "every second", "prefix seen by all", "some keys", "blocks"])
def test_a_mask_is_a_mask(kind, seed, tmp_path):
    def mask(draw):
        width, sinks = draw.randint(4, 8), draw.randint(1, 3)
        lost = torch.rand(400, generator=torch.Generator().manual_seed(seed)) < 0.25

        def change(model, visible, at, scale, group):
            keys = torch.arange(visible.shape[1])
            begin, back = model.begin[at][:, None], at[:, None] - keys
            seen = {
                "sinks": visible & ((back < width) | (keys - begin < sinks)),
                "every second": visible & (back % 2 == 0),
                "prefix seen by all": visible | ((keys >= begin) & (keys - begin < width)),
                "some keys": visible & (~lost[: len(keys)] | (back == 0)),
                "blocks": visible & ((keys - begin) // width % 2 == (at[:, None] - begin) // width % 2),
            }[kind]
            return seen, scale, group, lambda p, dtype: p

        return change

    found, place, side = attended(tmp_path, seed, mask)
    assert (found.kind, found.cause, found.point, found.side) == ("framework", "mask", place, side), found
    assert "sees the keys" in found.evidence[0], found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_dropout_is_dropout(rate, seed, tmp_path):
    def drop(draw):
        noise = torch.Generator().manual_seed(seed)

        def change(model, visible, at, scale, group):
            return visible, scale, group, lambda p, dtype: p * (torch.rand(p.shape, generator=noise) >= rate) / (1 - rate)

        return change

    found, place, side = attended(tmp_path, seed, drop)
    assert (found.cause, found.point, found.side) == ("dropout", place, side), found
    assert abs(found.details["rate"] - rate) < 0.1, found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["a mask for each head", "a bias by distance", "a sink without a key"])
def test_what_is_neither_is_unknown(kind, seed, tmp_path):
    def other(draw):
        def change(model, visible, at, scale, group):
            def finish(p, dtype):
                n = p.shape[1]
                back = at[:, None] - torch.arange(p.shape[-1])
                if kind == "a sink without a key":
                    return p * 0.9
                apart = (back[:, None] % (2 + torch.arange(n)[None, :, None]) == 0).double()
                weight = apart if kind == "a mask for each head" else (-0.1 * back[:, None]).exp()
                out = p * weight
                return out / out.sum(-1, keepdim=True)

            return visible, scale, group, finish

        return change

    found, place, side = attended(tmp_path, seed, other)
    assert found.point == place and found.cause in ("", "scale") and (found.cause == "scale") == (kind == "a sink without a key") and not found.side, found
