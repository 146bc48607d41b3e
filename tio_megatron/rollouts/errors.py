"""What goes wrong with a store."""

from __future__ import annotations


class StoreError(ValueError):
    """A store, or something that was to go into one, is not as it must be; says what and where."""
