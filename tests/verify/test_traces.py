"""Traces: digests of shards add up to the whole row's, what is written is read back, a large one opens quickly, a bad one is refused by name."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tio_megatron.testing import assert_same_bytes
from tio_megatron.traces import Tracer, TraceWriter, Unfinished, open_trace, row_digests
from tio_megatron.traces.digest import tensor_digest
from tio_megatron.traces.writer import write_arrays
from tio_megatron.verify.diagnosis import diagnose

SHAPE = {"layers": 1, "moe": [False], "tied": False}
TOKENS = [[3, 1, 4], [1, 5, 9, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_digests_of_shards_add_up(dtype):
    rows = torch.randn(5, 12).mul(1000).to(dtype)
    whole = row_digests(rows)
    parts = sum(row_digests(rows[:, a:b], a, 12) for a, b in ((0, 3), (3, 4), (4, 12)))
    assert_same_bytes(whole, parts)
    slots = torch.stack([row_digests(row[None], torch.tensor([4]), 20) for row in rows])[:, 0]
    assert_same_bytes(slots, row_digests(rows, 4, 20))


def test_one_bit_changes_a_digest_and_the_type_does_not():
    row = torch.randn(1, 64)
    for column in range(64):
        other = row.clone()
        other.view(torch.int32)[0, column] ^= 1 << (column % 32)
        assert row_digests(row) != row_digests(other)
    assert row_digests(torch.zeros(1, 2)) != row_digests(torch.tensor([[0.0, -0.0]]))
    assert row_digests(row.bfloat16()) == row_digests(row.bfloat16().float()) != row_digests(row)
    swapped = row.flip(1)
    assert row_digests(row) != row_digests(swapped)
    nan = torch.tensor([[float("nan")]])
    assert row_digests(nan) == row_digests(-nan)


def test_a_parameter_is_not_its_transpose():
    weight = torch.randn(4, 4)
    assert tensor_digest(weight) != tensor_digest(weight.t()) and tensor_digest(weight) == tensor_digest(weight.clone())


def written(folder, values, tokens=TOKENS, keep=True, **facts):
    with TraceWriter(folder, tokens, engine="test", shape=SHAPE, facts=facts, keep=keep) as writer:
        tracer = Tracer(writer)
        with tracer.rows([(1, 0, 2), 2, (0, 0, 3)]):
            tracer.point("embed", torch.cat([values[3:5], torch.full((2, 6), 7.0), values[:3]])[None])
        with tracer.rows([(1, 2, 4)]):
            tracer.point("embed", values[5:, :2], columns=0, width=[6])
            tracer.point("embed", values[5:, 2:], columns=2, width=[6])
            tracer.point("my.own", values[5:].long())
        writer.weight("w", values)
    return folder


def test_written_and_read_back(tmp_path):
    values = torch.randn(7, 6)
    trace = open_trace(written(tmp_path / "a", values, temperature=0.5))
    assert_same_bytes(trace.values("embed"), values)
    assert_same_bytes(torch.from_numpy(trace.digests("embed").copy()), row_digests(values))
    assert_same_bytes(trace.weight("w"), values)
    assert trace.names == ["embed", "my.own"] and trace.facts == {"temperature": 0.5}
    assert trace.tokens.tolist() == [3, 1, 4, 1, 5, 9, 2] and trace.where(4) == (1, 1)
    assert trace.passes["batch"].tolist() == [7] * 5 + [2] * 2 and trace.passes["padding"].tolist() == [2] * 5 + [0] * 2
    assert trace.columns("my.own").tolist() == [0] * 5 + [6] * 2


def test_outside_a_pass_and_when_suspended_nothing_is_recorded(tmp_path):
    writer = TraceWriter(tmp_path / "a", TOKENS, engine="test", shape=SHAPE)
    tracer = Tracer(writer)
    tracer.point("embed", torch.zeros(3, 2))
    tracer.suspended = True
    with tracer.rows([(0, 0, 3)]):
        tracer.point("embed", torch.zeros(3, 2))
    assert not writer.points
    with pytest.raises(ValueError, match="tokens 0 to 4 of a sequence of 3"), tracer.rows([(0, 0, 4)]):
        pass
    tracer.suspended = False
    with tracer.rows([(0, 0, 3)]), pytest.raises(ValueError, match="embed: a tensor of .5, 2. for 3 tokens"):
        tracer.point("embed", torch.zeros(5, 2))
    writer.close()


def broken(folder, change):
    header = json.loads((folder / "trace.json").read_text())
    change(header)
    (folder / "trace.json").write_text(json.dumps(header))


BAD = {
    "no folder": (lambda p: p.rename(p.parent / "gone"), "no such folder"),
    "no header": (lambda p: [(p / name).unlink() for name in ("trace.json", "progress.json")], "no trace"),
    "cut header": (lambda p: (p / "trace.json").write_text('{"format": "tio'), "no header of a trace"),
    "other JSON": (lambda p: (p / "trace.json").write_text("[]"), "some other JSON"),
    "other version": (lambda p: broken(p, lambda h: h.update(version=99)), "a trace of version 99; this package reads version 1"),
    "no lengths": (lambda p: broken(p, lambda h: h.pop("lengths")), "a damaged header"),
    "a path as a name": (lambda p: broken(p, lambda h: h.update(kept=["../../secret"])), "a damaged header .*'../../secret' is no name"),
    "cut rows": (lambda p: (p / "rows.safetensors").write_bytes((p / "rows.safetensors").read_bytes()[:-8]), "the file is cut off"),
    "no rows": (lambda p: (p / "rows.safetensors").unlink(), "rows.safetensors is missing"),
    "rows of another trace": (lambda p: broken(p, lambda h: h.update(lengths=[3, 5])), "does not fit trace.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_trace_is_named(case, tmp_path):
    spoil, says = BAD[case]
    folder = written(tmp_path / "a", torch.randn(7, 6))
    spoil(folder)
    with pytest.raises(ValueError, match=says):
        open_trace(folder)


def test_a_kept_tensor_that_is_gone_is_named(tmp_path):
    folder = written(tmp_path / "a", torch.randn(7, 6))
    (folder / "values" / "embed.safetensors").unlink()
    with pytest.raises(ValueError, match="embed.safetensors is missing"):
        open_trace(folder).values("embed")


def test_other_tokens_are_refused_and_a_second_trace_in_a_folder_too(tmp_path):
    values = torch.randn(7, 6)
    a = open_trace(written(tmp_path / "a", values))
    for other, says in (
        ([[3, 1, 4], [1, 5, 9, 3]], "token 3 of sequence 1 is 2 in A and 3 in B"),
        ([[3, 1, 4, 1], [5, 9, 2]], "sequence 0 has 3 in A and 4 in B"),
    ):
        with TraceWriter(tmp_path / str(other[0]), other, engine="test", shape=SHAPE):
            pass
        with pytest.raises(ValueError, match=says):
            diagnose(a, open_trace(tmp_path / str(other[0])))
    with pytest.raises(ValueError, match="there is a trace already"):
        written(tmp_path / "a", values)


def test_a_run_that_ended_early_is_unfinished(tmp_path):
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "a", TOKENS, engine="test", shape=SHAPE) as writer:
        writer.put("embed", torch.zeros(2, 3), torch.tensor([0, 1]))
        raise ZeroDivisionError
    found = open_trace(tmp_path / "a")
    assert isinstance(found, Unfinished) and found.ranks[0]["point"] == "embed" and found.ranks[0]["rows"] == 2
    said = diagnose(open_trace(written(tmp_path / "b", torch.randn(7, 6))), found)
    assert (said.kind, said.cause, said.side, said.status) == ("unfinished", "hang", "B", 1)


def test_without_tensors_the_place_is_still_named(tmp_path):
    values = torch.randn(7, 6)
    other = values.clone()
    other[4, 2] += 1e-6
    found = diagnose(open_trace(written(tmp_path / "a", values, keep=False)), open_trace(written(tmp_path / "b", other, keep=False)))
    assert (found.status, found.point, found.rows, found.first) == (2, "embed", 1, (1, 1)) and "only digests were recorded" in " ".join(found.evidence)


LARGE = """
import resource, sys
from tio_megatron.verify.diagnosis import diagnose
from tio_megatron.traces import open_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = diagnose(open_trace(sys.argv[1]), open_trace(sys.argv[2]))
print(found.verdict, "|", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("layers", [3, pytest.param(48, marks=pytest.mark.full)])
def test_a_large_trace_opens_in_little_memory(layers, tmp_path):
    """48 layers and 8192 tokens, every point of a mixture of experts, twice, one row different in the last layer."""
    tokens = [[7] * 8192]
    for name in "ab":
        with TraceWriter(tmp_path / name, tokens, engine="test", shape={"layers": layers, "moe": [True] * layers}):
            pass
        trace = open_trace(tmp_path / name)
        names = [point.name for point in trace.graph]
        header = json.loads((tmp_path / name / "trace.json").read_text())
        header["points"] = {point: {"dtype": "bfloat16", "shape": [8], "largest": 1.0, "nonfinite": 0} for point in names}
        arrays = {"tokens": np.full(8192, 7), **{kind: np.ones(8192, dtype=np.int32) for kind in ("sequence", "call", "batch", "padding")}}
        for point in names:
            arrays[point] = np.arange(8192, dtype=np.int64)
            arrays[f"{point}#squares"], arrays[f"{point}#columns"] = np.ones(8192, dtype=np.float32), np.full(8192, 8, dtype=np.int32)
        if name == "b":
            arrays[f"layers.{layers - 1}.o_proj"][4000] += 1
        write_arrays(tmp_path / name / "rows.safetensors", arrays)
        (tmp_path / name / "trace.json").write_text(json.dumps(header))
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path / "a"), str(tmp_path / "b")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    verdict, mib = done.stdout.split("|")
    assert verdict.startswith(f"unknown at layers.{layers - 1}.o_proj") and float(mib) < 1024, done.stdout


@pytest.mark.parametrize("name", ["sketches", "values", "weights"])
def test_a_file_that_is_cut_off_is_said_though_nobody_reads_it(tmp_path, name):
    import torch

    from tio_megatron.traces import TraceWriter, open_trace

    with TraceWriter(tmp_path / "t", [[1, 2, 3]], engine="mine", shape={"layers": 1, "moe": [False]}, keep=True) as writer:
        writer.weight("model.embed_tokens.weight", torch.arange(4000.0).view(8, 500))
    files = [tmp_path / "t" / "sketches.safetensors"] if name == "sketches" else sorted((tmp_path / "t" / name).glob("*.safetensors"))
    if not files:
        pytest.skip("the trace has no such file")
    open_trace(tmp_path / "t").close()
    files[0].write_bytes(files[0].read_bytes()[:-40])
    with pytest.raises(ValueError, match=files[0].name):
        open_trace(tmp_path / "t")
