"""The C++ library: how it is built, refused when it is not fit, and which instruction set it takes."""

import os
import subprocess
import sys

import pytest

from tio_megatron import kernels
from tio_megatron.kernels import build, library


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)


def test_version_is_a_short_word():
    assert kernels.version() == library.version()
    assert kernels.version().isprintable() and " " not in kernels.version()


def test_build_is_skipped_when_nothing_changed(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    before = build.LIBRARY.stat().st_mtime_ns
    assert build.build() == build.LIBRARY
    assert build.LIBRARY.stat().st_mtime_ns == before


def test_a_missing_compiler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler not found; install g\\+\\+") as caught:
        build.build(tmp_path / "x.so", tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.so").exists()


def test_a_file_that_does_not_compile_leaves_the_old_library(monkeypatch, tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "broken.cpp").write_text("int broken( {\n")
    old = tmp_path / "x.so"
    old.write_bytes(b"old")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    with pytest.raises(build.BuildError, match="does not compile"):
        build.build(old, tmp_path / "objects")
    assert old.read_bytes() == b"old"
    assert not list((tmp_path / "objects").iterdir())


def test_only_changed_files_are_compiled_again(monkeypatch, tmp_path):
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    (sources / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    build.build(tmp_path / "x.so", tmp_path / "objects")
    first = {path.name for path in (tmp_path / "objects").iterdir()}
    (sources / "two.cpp").write_text('extern "C" int two() { return 3; }\n')
    build.build(tmp_path / "x.so", tmp_path / "objects")
    second = {path.name for path in (tmp_path / "objects").iterdir()}
    assert {name for name in first if name.startswith("one")} == {name for name in second if name.startswith("one")}
    assert {name for name in first if name.startswith("two")} != {name for name in second if name.startswith("two")}


def test_a_library_older_than_its_sources_is_refused(monkeypatch):
    monkeypatch.setattr(build, "source_hash", lambda: "another")
    with pytest.raises(ImportError, match="older than its sources; run: make setup, or python -m tio_megatron.kernels.build"):
        library._load()


@pytest.mark.parametrize("contents, said", [(None, "is not built; run: "), (b"\x7fELF", "cannot be loaded .*: remove it, then run: make setup")])
def test_a_library_that_is_none_is_refused(monkeypatch, tmp_path, contents, said):
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "x.so")
    if contents is not None:
        build.LIBRARY.write_bytes(contents)
    with pytest.raises(build.LibraryError, match=said) as caught:
        library._load()
    assert "\n" not in str(caught.value)


def test_instruction_sets():
    assert library.supported_isas()[0] == "generic"
    before = library.isa()
    for name in library.supported_isas():
        with library.using_isa(name):
            assert library.isa() == name
    assert library.isa() == before
    with pytest.raises(ValueError, match="'sse9' is not available.*generic"):
        library.set_isa("sse9")


def test_the_environment_forces_an_instruction_set():
    code = "from tio_megatron.kernels import library; print(library.isa())"
    assert run_python(code, TIO_CPU_ISA="generic").stdout.strip() == "generic"
    wrong = run_python(code, TIO_CPU_ISA="sse9")
    assert wrong.returncode and "TIO_CPU_ISA" in wrong.stderr
