"""What several tests of the doctor need."""

import pytest

from tio_megatron.verify import doctor


@pytest.fixture
def configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, switches and symbols of this process say nothing about options."""
    for part in ("versions", "switches", "symbols"):
        monkeypatch.setattr(getattr(doctor, part), "check", lambda *_, **__: ())
