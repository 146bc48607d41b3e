"""``python -m tio_megatron.run SCRIPT ARGUMENTS``: a Megatron-LM script as it is, under the contract.

``torchrun --nproc-per-node 8 -m tio_megatron.run pretrain_gpt.py ...`` does the same on every rank. The script sees itself as the program:
its own name, arguments and folder. ``--tio-*`` among the arguments say which contract (default: that of ``TIO_CONTRACT``, else the default
one); the script's ``--help`` lists them.
"""

from __future__ import annotations

import os
import runpy
import sys

from tio_megatron.integrations.megatron_lm.start import switch_on

USAGE = "usage: python -m tio_megatron.run SCRIPT [ARGUMENTS]     (torchrun ... -m tio_megatron.run SCRIPT [ARGUMENTS])"


def main() -> None:
    """Apply, then run the script in this process.

    Raises:
        SystemExit: no script was named, or it does not exist (status 2).
    """
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return
    del sys.argv[0]
    script = sys.argv[0] if sys.argv else ""
    if not os.path.isfile(script):
        print(f"tio_megatron.run: no file {script!r}\n{USAGE}" if script else USAGE, file=sys.stderr)
        raise SystemExit(2)
    # As Python itself does for a script: its folder first. Before anything of megatron is imported, which may lie there.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    switch_on(sys.argv[1:], wanted=True)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
