"""Builds the C++ library next to this file: ``python -m tio_megatron.kernels.build``. Needs a compiler; no torch, no Python headers.

The one library serves every x86-64 processor: functions carry their instruction set and the choice is made at run time. A source file
is compiled again only when it, a header or the command has changed; the finished library is moved into place in one step.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
LIBRARY = HERE / "_tio_cpu.so"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized")
"""No instruction set (functions carry theirs), no fast-math, no contraction: a product and a sum stay two roundings unless fma is written."""


class BuildError(RuntimeError):
    """The library cannot be built; the message is one line and says what is missing."""


class LibraryError(ImportError):
    """The C++ library is missing, cannot be loaded or is not built from these sources; the message is one line and says what to run."""


def source_hash() -> str:
    """16 hex digits over the sources and flags; a library carries those it was built from."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in _files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(library: Path = LIBRARY, objects: Path | None = None, quiet: bool = True) -> Path:
    """Build ``library`` unless it is already built from these sources. Safe to interrupt and to run twice at once.

    Args:
        library: where the shared library goes.
        objects: where compiled files are kept between builds; default ``build/kernels`` beside the package.

    Raises:
        BuildError: no compiler, or a file that does not compile.
    """
    wanted = source_hash()
    if library.exists() and wanted.encode() in library.read_bytes():
        return library
    compiler = _compiler()
    objects = objects or HERE.parent.parent / "build" / "kernels"
    objects.mkdir(parents=True, exist_ok=True)
    common = [path for path in _files() if path.suffix == ".h"]

    def compile_one(source: Path) -> Path:
        define = [f'-DTIO_SOURCES="{wanted}"'] if source.name == "isa.cpp" else []
        digest = hashlib.sha256(" ".join([compiler, *FLAGS, *define]).encode())
        for path in (*common, source):
            digest.update(path.read_bytes())
        target = objects / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not target.exists():
            _run([compiler, *FLAGS, *define, "-c", str(source)], target, quiet)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        compiled = list(pool.map(compile_one, [path for path in _files() if path.suffix == ".cpp"]))
    _run([compiler, *FLAGS, "-shared", *map(str, compiled)], library, quiet)
    for old in objects.glob("*.o"):
        if old not in compiled:
            old.unlink(missing_ok=True)
    return library


def _files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if not shutil.which(name):
        raise BuildError(f"tio_megatron: no C++ compiler: {name} not found; install g++ (Debian: apt-get install g++) or set CXX")
    return name


def _run(command: list[str], output: Path, quiet: bool) -> None:
    """Run a compiler that writes ``output``, by way of a temporary file beside it."""
    handle, temporary = tempfile.mkstemp(dir=output.parent, suffix=output.suffix)
    os.close(handle)
    if not quiet:
        print(" ".join([*command, "-o", str(output)]))
    try:
        done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"tio_megatron: the C++ library does not compile: {' '.join(command)}\n{done.stderr}")
        if done.stderr and not quiet:
            print(done.stderr, file=sys.stderr)
        os.chmod(temporary, 0o755)
        os.replace(temporary, output)
    finally:
        Path(temporary).unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        print(build(quiet="-v" not in sys.argv))
    except BuildError as error:
        sys.exit(str(error))
