"""Entry point of stock vLLM's general plug-ins, loaded in every process."""


def register() -> None:
    """Inactive unless switched on."""
