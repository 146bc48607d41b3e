"""Packaging: what the package is made of, and how its one C++ library gets in. Tools' settings are in pyproject.toml.

torch, vLLM and megatron-core are not named anywhere here, nor is anything that asks for them: installing this package, with any extra,
must never install or upgrade the engines that somebody has set up for their machine. `make` pins them, in requirements.lock.
"""

import re
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
KERNELS = ROOT / "tio_megatron" / "kernels"


class BuildLibrary(build_ext):
    """Builds the library with the same code as ``python -m tio_megatron.kernels.build``, run by path: nothing is importable yet."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain C library: no Python version in its name."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        self.build_to(Path(self.get_ext_fullpath(ext.name)).resolve())

    def copy_extensions_to_source(self) -> None:
        """Editable: linked again in its place, which replaces it in one step; a copy would overwrite a library that is in use."""
        self.build_to(KERNELS / "_tio_cpu.so")

    def build_to(self, library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        module = runpy.run_path(str(KERNELS / "build.py"))
        try:
            module["build"](library)
        except module["BuildError"] as error:
            raise SystemExit(str(error)) from None


class PlatformWheel(bdist_wheel):
    """The library depends on the processor and the C library, not on the Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


version = re.search(r'^__version__ = "(.+)"$', (ROOT / "tio_megatron" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)[1]
sources = sorted(str(path.relative_to(ROOT)) for path in (KERNELS / "csrc").glob("*.cpp"))

setup(
    name="tio_megatron",
    version=version,
    description="Train-inference one: one order for every floating-point sum in Megatron training and vLLM rollout: equal log-probabilities",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["reinforcement learning", "Megatron", "vLLM", "Ascend", "determinism", "mixture of experts"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # collectives/ stands at the top level and is imported only as tio_megatron.collectives: here by package_dir, in a checkout by a link
    packages=find_packages(include=["tio_megatron", "tio_megatron.*"], exclude=["tio_megatron.collectives*"])
    + ["tio_megatron.collectives", *(f"tio_megatron.collectives.{name}" for name in find_packages("collectives"))],
    package_dir={"tio_megatron.collectives": "collectives"},
    package_data={"tio_megatron.integrations": ["facts/*.json"]},
    ext_modules=[Extension("tio_megatron.kernels._tio_cpu", sources)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    entry_points={
        "vllm.general_plugins": ["tio_megatron = tio_megatron.integrations.vllm.plugin:register"],
        "console_scripts": ["tio = tio_megatron.cli:main"],
    },
    install_requires=["numpy", "pyyaml", "rich", "safetensors", "typer"],
    extras_require={
        # beside a vLLM of your own: what our side of it imports and vLLM brings anyway
        "vllm": ["tokenizers", "transformers", "safetensors"],
        # beside a torch and torch_npu of your own (they come in pairs): what torch_npu and CANN's Python tools import
        "npu": ["attrs", "decorator", "psutil", "pyyaml", "scipy"],
        # beside `pip install --no-deps deepspeed`: what DeepSpeed imports, but for torch
        "deepspeed": ["einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic>=2", "tqdm"],
        "dev": ["hypothesis", "matplotlib", "mypy", "pytest", "pytest-timeout", "ruff", "threadpoolctl"],
    },
)
