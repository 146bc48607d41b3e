"""PyPI's apex, which is another project, is named where a contract is applied: in every worker, at start."""

import logging
import sys

import pytest

import tio_megatron as tio
from tio_megatron.integrations import strangers
from tio_megatron.testing import run_ranks
from tio_megatron.verify.doctor import versions


@pytest.fixture
def unrelated(tmp_path, monkeypatch):
    """A package of that name whose import fails, as the real one's does where its own needs are not met."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('cannot import name UnencryptedCookieSessionFactoryConfig')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    return tmp_path / "apex"


def heard(rank):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tio_megatron").addHandler(handler)
    with tio.apply(vocab_size=700):
        return [line for line in lines if "apex" in line]


def test_every_worker_names_it_and_imports_nothing_of_it(unrelated):
    for (line,) in run_ranks(2, heard):
        assert line.startswith(f"apex in {unrelated} is not NVIDIA's or Ascend's apex") and "pip uninstall apex" in line
    assert "apex" not in sys.modules


def test_the_doctor_names_it_too(unrelated):
    (found,) = [finding for finding in versions.check() if "PyPI's unrelated project" in finding.what]
    assert found.works == "pip uninstall apex" and str(unrelated) in found.what


def test_control_nothing_is_said_of_nvidias_or_of_none(unrelated):
    (unrelated / "optimizers").mkdir()
    assert strangers.unrelated_apex() is None
    assert run_ranks(1, heard) == [[]]
    sys.path.remove(str(unrelated.parent))
    assert strangers.apex_warning() is None


def test_an_import_that_is_forbidden_is_none(unrelated, monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    assert strangers.unrelated_apex() is None
