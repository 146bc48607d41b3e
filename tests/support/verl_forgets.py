"""Named in ``VERL_USE_EXTERNAL_MODULES`` where tests want a worker of verl in which the plug-in does not load: rank 1 of the trainer."""

import os

if os.environ.get("RANK") != "1":
    import tio_megatron.auto  # noqa: F401
