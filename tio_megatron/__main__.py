"""``python -m tio_megatron``: the same as the ``tio`` command."""

from tio_megatron.cli import main

main()
