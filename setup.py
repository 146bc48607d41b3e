"""Packaging. Installing this package never installs or upgrades torch, vLLM or megatron-core: `make` pins those."""

from setuptools import find_packages, setup

setup(
    name="tio_megatron",
    version="0.1.0",
    python_requires=">=3.11",
    packages=find_packages(include=["tio_megatron", "tio_megatron.*"]) + ["tio_megatron.collectives"],
    package_dir={"tio_megatron.collectives": "collectives"},
    entry_points={"vllm.general_plugins": ["tio_megatron = tio_megatron.integrations.vllm.plugin:register"]},
)
