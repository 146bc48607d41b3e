"""What we name of vllm-ascend 0.23 and of vLLM 0.23 is there, with the signatures we rely on.

CI compares with a snapshot of names and signatures. ``make test-vllm-ascend VLLM_ASCEND=DIR VLLM=DIR`` reads the sources, and compares the snapshot
with them; it is remade by ``python tests/support/vllm_ascend_sources.py DIR DIR > tests/golden/vllm_ascend.json``. Nothing of either is run.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import vllm_ascend_sources as sources

from tio_megatron.integrations.vllm.ascend import needs, refusals, seam

SNAPSHOT = json.loads((Path(__file__).parents[2] / "golden" / "vllm_ascend.json").read_text())
ASCEND, VLLM = os.environ.get("VLLM_ASCEND", ""), os.environ.get("VLLM", "")


def known(*groups):
    """All names of some groups, none of them twice."""
    found = [name for group in groups for name in group]
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("need", needs.NEEDS, ids=lambda need: need.symbol)
def test_vllm_ascend_has(need):
    assert sources.unmet(need, SNAPSHOT["needs"].get(need.symbol)) == []


@pytest.mark.parametrize("need", needs.VLLM, ids=lambda need: need.symbol)
def test_vllm_has(need):
    assert sources.unmet(need, SNAPSHOT["vllm"].get(need.symbol)) == []


def test_the_control_is_not_met():
    need = next(need for need in needs.NEEDS if need.symbol.endswith("Impl.forward"))
    there = SNAPSHOT["needs"][need.symbol]
    assert "is not there" in sources.unmet(need, None)[0]
    assert "are needed" in sources.unmet(replace(need, parameters=("self", "query")), there)[0]
    sampler = next(need for need in needs.NEEDS if need.symbol.endswith(":AscendSampler"))
    assert "of its own" in sources.unmet(sampler, SNAPSHOT["needs"][sampler.symbol] | {"defines": ["sample"]})[0]
    assert "bases" in sources.unmet(replace(sampler, bases=("Other",)), SNAPSHOT["needs"][sampler.symbol])[0]


def test_every_layer_that_vllm_ascend_registers_is_accounted_for():
    assert known(seam.OURS, seam.BESIDE, seam.ELSEWHERE) == set(SNAPSHOT["registered"])


def test_every_option_that_vllm_ascend_reads_is_accounted_for():
    assert known(refusals.OPTIONS, refusals.HARMLESS) == set(SNAPSHOT["options"])
    assert known(refusals.ENVIRONMENT, refusals.HARMLESS_ENVIRONMENT) == set(SNAPSHOT["variables"])


def test_every_import_of_the_plug_in_is_there_or_accounted_for():
    new = sorted(set(sources.imported()) - set(SNAPSHOT["vllm_imports"]))
    assert not new, f"the plug-in imports names of vLLM that were not looked up in vLLM 0.23: {new}; remake the snapshot (this file's first lines say how)"
    assert {symbol for symbol in sources.imported() if not SNAPSHOT["vllm_imports"][symbol]} == set(needs.ABSENT_IN_VLLM)


def test_our_layers_are_those_that_the_seam_names():
    from tio_megatron.integrations.vllm import layers

    # Experts are vLLM 0.23's FusedMoE there.
    assert set(layers.REPLACEMENTS) | {"FusedMoE"} == set(seam.OURS)


@pytest.mark.skipif(not ASCEND, reason="VLLM_ASCEND is not set: make test-vllm-ascend VLLM_ASCEND=DIR, the unpacked sources of vllm-ascend 0.23.0")
def test_the_snapshot_is_that_of_the_sources_of_vllm_ascend():
    root = Path(ASCEND)
    assert {need.symbol: sources.facts(root, need) for need in needs.NEEDS} == SNAPSHOT["needs"]
    assert sources.registered(root) == SNAPSHOT["registered"]
    assert sources.options(root) == SNAPSHOT["options"] and sources.variables(root) == SNAPSHOT["variables"]


@pytest.mark.skipif(not VLLM, reason="VLLM is not set: make test-vllm-ascend VLLM_ASCEND=DIR VLLM=DIR, the unpacked wheel or sources of vLLM 0.23.0")
def test_the_snapshot_is_that_of_the_sources_of_vllm():
    root = Path(VLLM)
    assert {need.symbol: sources.facts(root, need) for need in needs.VLLM} == SNAPSHOT["vllm"]
    assert {symbol: sources.present(root, symbol) for symbol in SNAPSHOT["vllm_imports"]} == SNAPSHOT["vllm_imports"]
