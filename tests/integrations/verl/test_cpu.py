"""verl's device layer on a CPU is imported, switched on and off. verl's registry is a stand-in here; make test-verl has the real one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOOKS = """
import sys, types

class Registry:
    @staticmethod
    def register(*words, **more):
        return lambda platform: platform

modules = {name: types.ModuleType(name) for name in ("verl", "verl.plugin", "verl.plugin.platform", "verl.plugin.platform.platform_base")}
manager = types.SimpleNamespace(_current_platform=None)
modules["verl.plugin.platform"].PlatformRegistry, modules["verl.plugin.platform"].platform_manager = Registry, manager
modules["verl.plugin.platform.platform_base"].PlatformBase = object
sys.modules.update(modules)

from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.verl import cpu, local_layers

assert isinstance(manager._current_platform, cpu.CpuPlatform) and cpu._switch.is_on and local_layers._switch.is_on
cpu.enable()
cpu.disable()
assert manager._current_platform is None and not cpu._switch.is_on and not local_layers._switch.is_on
print("done")
"""


def test_importing_it_switches_it_on():
    environment = {name: value for name, value in os.environ.items() if name not in ("TIO_CONTRACT", "VERL_ENGINE_DEVICE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOKS], env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]
