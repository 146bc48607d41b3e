"""The same examples on every run and machine, and no time limit on one: CI is slow and must not be moody."""

from hypothesis import settings

settings.register_profile("tio", deadline=None, derandomize=True)
settings.load_profile("tio")
