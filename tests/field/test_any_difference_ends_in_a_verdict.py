"""A difference of any shape, at any point, ends in a verdict: a documented cause, or *unknown* with status 2; never in a traceback."""

import json
from fnmatch import fnmatch

import pytest
import torch
from planted_model import Model, Plan, Sizes, weights_of
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.commands.answer import _finite
from tio_megatron.models.points import points
from tio_megatron.traces import Trace, TraceWriter, open_trace
from tio_megatron.verify.diagnosis import diagnose
from tio_megatron.verify.diagnosis.finding import KINDS

SIZES = Sizes(layers=2, hidden=8, heads=2, kv=1, head_dim=4, experts=4, top_k=2, width=4, vocab=12, moe=(True, False), dtype=torch.float32)
SEQUENCES = [[3, 1, 4, 1, 5], [6, 5, 3]]
POINTS = list({point.part: point.name for point in points(2, SIZES.moe)}.values()) + ["of_its_own"]
"""Each part of a layer once, in the dense layer where it has it."""
SHAPES = {
    "scalar": lambda x: x.reshape(len(x), -1)[:, 0],
    "one axis": lambda x: x.reshape(len(x), -1),
    "two": lambda x: x.reshape(len(x), -1, x.shape[-1] if x.dim() > 1 else 1),
    "three": lambda x: x.reshape(len(x), 1, -1, 1),
}


def one(value):
    def change(x):
        x.view(len(x), -1)[2, -1] = value(x.view(len(x), -1)[2, -1])
        return x

    return change


CHANGES = {
    "one element": one(lambda x: x + 1),
    "all": lambda x: x + torch.arange(x.numel()).view(x.shape).to(x.dtype) % 7,
    "all a little": lambda x: x * (1 + 1e-6 * torch.sin(torch.arange(x.numel()).view(x.shape))) if x.is_floating_point() else x + 1,
    "NaN": one(lambda x: x * float("nan") if x.is_floating_point() else x - 1),
    "all NaN": lambda x: x * float("nan") if x.is_floating_point() else -x - 1,
    "inf": one(lambda x: x - float("inf") if x.is_floating_point() else x * 0),
}


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """What a right run records, and its parameters; rows that are weighted early are added to it."""
    folder = tmp_path_factory.mktemp("trace") / "right"
    weights = weights_of(SIZES, 1)
    Model(SIZES, weights, Plan()).record(folder, SEQUENCES)
    trace = open_trace(folder)
    assert isinstance(trace, Trace)
    found = {name: trace.values(name) for name in trace.names}
    for name, source in (("expert_scaled", "expert_act"), ("expert_scaled_out", "expert_out")):
        found[f"layers.0.{name}"] = found[f"layers.0.{source}"] * found["layers.0.expert_probs"][..., None]
    found["of_its_own"] = found["final_norm"] * 2
    assert set(found) >= set(POINTS)
    return found, weights


def record(folder, values, weights):
    with TraceWriter(folder, SEQUENCES, engine="hand", shape=SIZES.shape, facts={"temperature": 1.0}, keep=True) as writer:
        for name, weight in weights.items():
            writer.weight(name, weight)
        places = torch.arange(sum(map(len, SEQUENCES)))
        writer.forward(places)
        for name, rows in values.items():
            writer.put(name, rows, places)


def not_a_number(rows):
    """In one row, where the type has that."""
    return torch.cat([rows[:1] * float("nan"), rows[1:]]) if rows.is_floating_point() else rows


@pytest.mark.parametrize("place", POINTS)
@pytest.mark.parametrize("about", ["usual", "of that shape too", "holding a NaN too"])
def test_of_any_shape(about, place, values, tmp_path):
    """The point has rows of another shape than the engines' recorders give it, and what it is made of is as usual, or has that shape, or holds a NaN."""
    held, weights = values
    known = next((point for point in [*points(2, SIZES.moe)] if point.name == place), None)
    made_of = {name: held[name] for name in (known.parents if known else ()) if name in held}
    if known and known.op == "combine":  # of rows that are weighted behind their down projection
        made_of = {name: rows for name, rows in made_of.items() if "scaled" not in name}
    used = {name: weight for name, weight in weights.items() if known and any(fnmatch(name, pattern) for pattern in known.weights)}
    for number, (shape, change) in enumerate((shape, change) for shape in SHAPES for change in CHANGES):
        shaped = {"of that shape too": SHAPES[shape], "holding a NaN too": not_a_number}.get(about, lambda rows: rows)
        whole = {name: shaped(rows).contiguous() for name, rows in made_of.items()}
        rows = SHAPES[shape](not_a_number(held[place]) if about.startswith("holding") else held[place]).contiguous()
        for side, recorded in (("right", rows), ("other", CHANGES[change](rows.clone()))):
            record(tmp_path / str(number) / side, whole | {place: recorded}, used)
        traces = [open_trace(tmp_path / str(number) / side) for side in ("right", "other")]
        if (traces[0].digests(place) == traces[1].digests(place)).all():
            continue
        found = diagnose(*traces)
        said = json.dumps(_finite(found.to_json()), allow_nan=False)
        assert found.kind in KINDS and found.point == place and found.evidence and found.cure, (shape, change, said)
        assert found.status == (2 if found.kind == "unknown" else 1), (shape, change, said)


def test_the_command_says_unknown_in_json(values, tmp_path):
    """Of log-probabilities that were clipped, which no known cause does."""
    held, weights = values
    for side, rows in (("A", held["logprob"]), ("B", held["logprob"].clamp_min(-3.0))):
        record(tmp_path / side, {"logits": held["logits"], "logprob": rows}, weights)
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path / "A"), str(tmp_path / "B"), "--json"])
    said = json.loads(told.stdout)
    assert (told.exit_code, said["status"], said["kind"], said["point"], said["side"]) == (2, 2, "unknown", "logprob", None), said
