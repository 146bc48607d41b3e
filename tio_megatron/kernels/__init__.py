"""Arithmetic: every floating-point operation whose order matters, one folder per operator. What moves between ranks lives in ``collectives``.

Each folder holds ``reference.py`` (plain torch: the definition), ``cpu.py`` (the C++ kernel of ``csrc/``, a ``tio::`` torch operator) and an
``__init__.py`` with the public functions, which choose by device and refuse what no family serves.
"""


def version() -> str:
    """The version of the kernel family in use, for ``Contract.fingerprint``. The same for every instruction set, since their bytes are."""
    from tio_megatron.kernels import library

    return library.version()
