"""Said aloud where DeepSpeed is missing; its modules skip themselves."""

import importlib.util
import warnings

if importlib.util.find_spec("deepspeed") is None:
    warnings.warn("NOT RUN: tests/integrations/deepspeed, deepspeed is not installed here: make test-deepspeed", stacklevel=1)
