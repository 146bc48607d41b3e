"""Arithmetic: every floating-point operation whose order matters, one folder per operator. What moves between ranks lives in ``collectives``.

Each folder holds ``reference.py`` (plain torch: the definition), ``cpu.py`` (the C++ kernel of ``csrc/``, a ``tio::`` torch operator), the
kernels of other families beside it (``triton.py``) and an ``__init__.py`` with the public functions. The choice is made by the tensors'
device (``families.py``); what no family serves is refused.
"""


def version(family: str = "cpu") -> str:
    """The version of a kernel family, for ``Contract.fingerprint``. The same for every instruction set, since their bytes are."""
    from tio_megatron.kernels import families

    return families.version(family)


def load(family: str) -> None:
    """Bring the kernels of a contract's family into this process (``cpu`` is always there).

    Raises:
        ValueError: no such family, or what it needs is not installed.
    """
    from tio_megatron.kernels import families

    families.load(family)
