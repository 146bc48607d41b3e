"""Libraries that let torch_npu be imported where CANN is not: every call of a device fails. Not CANN, and no arithmetic.

torch_npu's wheel names CANN's shared libraries. The loader wants them to exist and to define the functions that the wheel uses, so
this makes them: it reads from the wheel's own ELF tables which libraries and functions are missing, writes one C function for each, and
compiles that with gcc. A call returns :data:`NO_DEVICE`; a few answer, since the import and torch's guards ask them: there is a chip with the number 0,
and whatever is wanted of it fails.

``python tests/npu/stub.py DIR`` writes the libraries to DIR and prints the value that ``LD_LIBRARY_PATH`` needs.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

NO_DEVICE = 507899
"""CANN's number for an internal error of its runtime."""

ANSWERS = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned int *count) { if (count) *count = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { if (device) *device = 0; return 0; }",
    "aclrtSetDevice": "int aclrtSetDevice(int device) { return 0; }",
    "aclrtGetSocName": "const char *aclrtGetSocName(void) { return 0; }",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no CANN here: a stand-in for loading"; }',
    "aclAppLog": "void aclAppLog(void) {}",
    "aclFinalize": "int aclFinalize(void) { return 0; }",
    "MsprofRegisterCallback": "int MsprofRegisterCallback(void) { return 0; }",
    "MsprofGetHashId": "unsigned long MsprofGetHashId(void) { return 0; }",
    "MsprofSysCycleTime": "unsigned long MsprofSysCycleTime(void) { return 0; }",
}
"""What the import asks, and what torch's guards ask before a shape is worked out."""

PREFIXES = ("acl", "rt", "Msprof", "Hccl", "ge", "tdt", "hccl")
"""C functions of CANN begin so; other missing names belong to libraries that the wheel loads only when they are used."""


def lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def wanted(library: Path) -> set[str]:
    """The shared libraries that the loader looks for."""
    return {line.split("[")[1].split("]")[0] for line in lines("readelf", "-d", str(library)) if "(NEEDED)" in line}


def missing(library: Path) -> set[str]:
    return {line.split()[-1] for line in lines("nm", "-D", "--undefined-only", str(library)) if "@" not in line}


def defined(library: Path) -> set[str]:
    return {line.split()[-1].split("@")[0] for line in lines("nm", "-D", "--defined-only", str(library)) if line.split()}


def make(folder: Path) -> Path:
    """Write the libraries to ``folder``.

    Raises:
        FileNotFoundError: torch or torch_npu is not installed in this Python.
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    ours = sorted((packages / "torch_npu" / "lib").glob("*.so")) + sorted((packages / "torch_npu").glob("_C*.so"))
    theirs = sorted((packages / "torch" / "lib").glob("*.so*"))
    if not ours or not theirs:
        raise FileNotFoundError(f"no torch and torch_npu in {packages}")
    present = {path.name for path in (*ours, *theirs)}
    libraries = {name for path in ours for name in wanted(path)} - present
    libraries = {name for name in libraries if not system_has(name)}
    functions = {name for path in ours for name in missing(path)} - {name for path in (*ours, *theirs) for name in defined(path)}
    functions = {name for name in functions if name.startswith(PREFIXES)}
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stub.c"
    body = [ANSWERS.get(name) or f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in sorted(functions)]
    source.write_text("/* A stand-in for loading. Not CANN: every call of a device fails. */\n" + "\n".join(body) + "\n")
    # One library holds all functions; the others only exist. The loader looks a function up in all of them.
    first, *rest = sorted(libraries)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{first}", "-o", str(folder / first), str(source)], check=True)
    empty = folder / "empty.c"
    empty.write_text("")
    for name in rest:
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(empty)], check=True)
    return folder


def system_has(name: str) -> bool:
    """The system's loader finds the library without help, or it is Python's or torch's own."""
    if name.startswith(("libc.", "libm.", "libdl.", "libpthread.", "librt.", "libgcc_s.", "libstdc++.", "ld-linux", "libpython")):
        return True
    return any(name in line for line in lines("/sbin/ldconfig", "-p"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/npu/stub.py DIR")
    print(make(Path(sys.argv[1]).resolve()))
