"""The releases of megatron-core: the forward layout table has the same bytes under all of them, and what a release cannot do it refuses.

CI looks at the table of releases alone; `make test-full` downloads each release (2 MB, kept outside the checkout) and runs its ranks in a
process of their own.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from loud import skip_loudly
from megatron_releases import OTHERS, environment, folder

from tio_megatron.integrations.megatron import versions

CHECKOUT = Path(__file__).parents[3]


@cache
def table(version):
    """What tests/support/version_table.py prints under ``version``."""
    command = [sys.executable, "-W", "ignore", str(CHECKOUT / "tests" / "support" / "version_table.py"), "all"]
    done = subprocess.run(command, env=environment(version, CHECKOUT), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["megatron-core"] == version
    return found


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_a_release_has_the_bytes_of_the_supported_one(version):
    if folder(version) is None:
        skip_loudly(f"megatron-core {version} cannot be downloaded; its row of docs/compat.md is not proved by this run")
    expected, found = table(versions.FULL), table(version)
    of_one_rank = {model: digest for _, (model, digest) in reversed(expected["rows"].items())}
    assert len(of_one_rank) == len(set(of_one_rank.values())) == 5
    rows = set(expected["rows"])
    if versions.RELEASES[version].wants_slices:
        rows.remove(next(row for row in rows if row.endswith("inference")))
        assert re.search(rf"sequence_parallel=False: megatron-core {version} refuses it with TP and EP", found["without slices"])
    assert set(found["rows"]) == rows
    for row, (model, digest) in found["rows"].items():
        assert digest == of_one_rank[model], row
    assert len(set(found["stock"].values())) == 2, "the control, unpatched, has the same bytes in both layouts"
    forward, wrapped, *options = found["refused"]
    for said in (forward, wrapped):
        assert re.search(rf"is not supported with megatron-core {version}, which only scores.*megatron-core {versions.FULL}", said), said
    assert [line.partition("=")[0] for line in options] == list(versions.RELEASES[version].new_options)


@pytest.mark.parametrize("version", [*versions.RELEASES, "0.13.0", "0.16.0", "1.0.0"])
def test_which_versions_are_taken(version, monkeypatch):
    """The cheap look of CI: the gate, and that no release but one trains."""
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "megatron-core" else installed(name))
    try:
        if version not in versions.RELEASES:
            with pytest.raises(ImportError, match=rf"megatron-core {version} is installed; .* {', '.join(versions.RELEASES)}"):
                versions.check()
            return
        versions.check()
        assert versions.release().version == version
        if version == versions.FULL:
            versions.require_training("a step")
        else:
            with pytest.raises(ValueError, match=rf"a step .* megatron-core {version}, which only scores; megatron-core {versions.FULL} would work"):
                versions.require_training("a step")
    finally:
        versions.release.cache_clear()


def test_the_page_has_every_release():
    page = (CHECKOUT / "docs" / "compat.md").read_text()
    assert all(f"| {version} |" in page for version in versions.RELEASES)
