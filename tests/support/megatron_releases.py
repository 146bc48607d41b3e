"""Other releases of megatron-core for tests: each unpacked once into a folder outside the checkout, to be put first on a process's path."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from tio_megatron.integrations.megatron.versions import FULL, RELEASES

OTHERS = tuple(version for version in RELEASES if version != FULL)


def cache() -> Path:
    """Where they are kept: beside the cache of wheels."""
    wheels = os.environ.get("TIO_WHEEL_CACHE") or Path.home() / ".cache" / "tio_megatron" / "wheels"
    return Path(wheels).parent / "megatron-core"


def folder(version: str) -> Path | None:
    """The folder of ``version``, downloaded if need be (2 MB); ``None`` when there is no way to get it, with pip's words on stderr.

    Only the package itself: its requirements are those of the environment. Releases from 0.17 on ask for Python 3.12 and run on 3.11 all the same.
    """
    target = cache() / version
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "megatron" / "core" / "__init__.py").exists():
            return target
        new = target.parent / f".new-{version}"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-compile", "--ignore-requires-python"]
        done = subprocess.run([*pip, "--upgrade", "--target", str(new), f"megatron-core=={version}"], capture_output=True, text=True, timeout=300)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return None
        new.rename(target)
    return target


def environment(version: str, checkout: Path) -> dict[str, str]:
    """The environment of a process that finds ``version`` first (the installed release needs no folder)."""
    first = [] if version == FULL else [str(cache() / version)]
    path = [*first, str(checkout), str(checkout / "tests" / "support")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
