"""Parameters that differ behind the first difference are said in one line beside it."""

from faults import examine
from planted_model import Plan, weights_of
from planting import BF16, Draw, Stage


def test_they_are_one_line(tmp_path):
    draw = Draw(9)
    sizes = draw.sizes(dtype=BF16, layers=2, moe=False)
    weights = weights_of(sizes, 3)
    other = {name: weight * 2 for name, weight in weights.items() if name.startswith("model.layers.1.")}
    place = "layers.0.attn_norm"
    wrong = Plan(steps={place: lambda model, usual, x, w, **_: (x.float() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()).to(BF16) * w})
    for changed in ({}, other):
        stage = Stage(tmp_path / str(len(changed)), draw)
        stage.both(sizes, draw.sequences(sizes, 10, 20), wrong, weights=weights, wrong_weights=weights | changed)
        found = examine(stage.folder)
        said = [line for line in found.evidence if "used elsewhere" in line]
        assert (found.cause, found.point, len(said)) == ("norm-cast", place, int(bool(changed))), found
    names = ", ".join(f"model.layers.1.{name}.weight" for name in ("input_layernorm", "mlp.down_proj", "mlp.gate_proj"))
    assert f"{names} and {len(other) - 3} more" in said[0]
