"""No file outside ``tio_megatron/models`` names an architecture or a tensor of a checkpoint, but for tests and documents.

The rule. Forbidden in string constants and attribute names (docstrings are documents) are, as whole words,

* what descriptions call their architectures, model types and published models;
* the parts of their tensors' names and of vLLM's names of them, and the names that are two plain words (``mlp.gate``).

Not forbidden is what an engine calls a thing itself, whatever the architecture: parts of Megatron's names (``linear_qkv``, ``input_layernorm``), parts that
are plain words (``experts``), and vLLM's names of the parameters of its own experts (``w13_weight``). A point of a trace has a name of ours, which may be
spelled as a tensor is (``o_proj``): in the rooms that look at traces a constant that is a point's whole name is a point.
"""

import ast
import re
from functools import cache

import pytest

from tests.test_rooms import ROOT, modules, parsed, room
from tio_megatron import models

TRACES = ("verify", "commands", "traces", "recording", "transformers_models")
"""Rooms, and folders of an engine, that look at points of traces."""

OF_AN_ENGINE = {"tio_megatron/integrations/vllm/ascend/needs.py": {"lm_head"}}
"""Files that name an argument of an engine's function that is spelled as a tensor is."""


def blocks():
    for described in models.architectures().values():
        yield from (block for block in (described.first, described.attention, described.dense, described.experts, described.last) if block)


@cache
def forbidden():
    described = models.architectures().values()
    whole = {word for each in described for word in (each.name, each.model_type, *each.published)}
    held = [parameter for block in blocks() for parameter in block.parameters]
    names = {tensor.name for parameter in held for tensor in parameter.tensors} | {parameter.transformers for parameter in held}
    names |= {parameter.vllm for parameter in held if not parameter.of_experts}
    engine = {part for parameter in held for name in parameter.megatron for part in name.split(".")}
    whole |= {part for name in names for part in name.split(".") if "_" in part} - engine
    return whole | {name.removesuffix(".weight") for name in names if "_" not in name and re.fullmatch(r"\w+\.\w+\.weight", name)}


@cache
def points():
    return {operation.point for block in blocks() for operation in block.operations}


def named(tree, traces=False):
    """(line, word) of every forbidden word in string constants and attribute names of a file."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    words = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, sorted(forbidden(), key=len, reverse=True)))})(?![\w-])")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in forbidden():
            yield node.lineno, node.attr
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documents:
            continue
        if traces and re.sub(r"^(layers\.\d+)?\.", "", node.value) in points():
            continue
        yield from ((node.lineno, found) for found in words.findall(node.value))


def names_of_models():
    """Every place outside ``models/`` that names an architecture or a tensor of a checkpoint: file, line and word."""
    found = []
    for path in modules():
        file = path.relative_to(ROOT)
        if room(path) not in ("models", "testing"):
            words = named(parsed(path), bool({*TRACES} & {*file.parts}))
            found += [f"{file}:{line}: {word}" for line, word in words if word not in OF_AN_ENGINE.get(str(file), ())]
    return found


def test_architectures_and_their_tensors_are_named_in_their_descriptions():
    assert {"Qwen3MoeForCausalLM", "qwen3", "Qwen3-8B", "q_proj", "qkv_proj", "embed_tokens", "mlp.gate", "model.norm"} <= forbidden()
    assert not {"experts", "linear_qkv", "input_layernorm", "mlp", "w13_weight", "weight"} & forbidden()
    found = names_of_models()
    assert not found, "say it in a description below tio_megatron/models, and derive what is needed:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('x = f"model.layers.{n}.self_attn.q_proj.weight"', {"self_attn", "q_proj"}),
        ("layer.mlp.gate_up_proj(x)", {"gate_up_proj"}),
        ('names = ("Qwen3ForCausalLM",)', {"Qwen3ForCausalLM"}),
        ('kind == "qwen3_moe"', {"qwen3_moe"}),
        ('router = "mlp.gate.weight"', {"mlp.gate"}),
        ('help = "such as Qwen3-8B"', {"Qwen3-8B"}),
        ('keep = "o_proj"', {"o_proj"}),
        ('"""q_proj, in a document."""\nlayer.self_attention.linear_qkv, "input_layernorm", "vocab_parallel_lm_head", "TioQwen3", "o_projector"', set()),
    ],
)
def test_a_planted_name_is_caught(source, words):
    assert {word for _, word in named(ast.parse(source))} == words


def test_a_point_is_no_tensor():
    source = ast.parse('keep = "o_proj", "layers.0.o_proj"\nname = "self_attn.o_proj"')
    assert [word for _, word in named(source, traces=True)] == ["self_attn", "o_proj"]
