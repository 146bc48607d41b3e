"""What tests over several hosts need."""

import netns_hosts as network
import pytest
from loud import skip_outside_ci


@pytest.fixture(scope="session")
def several_hosts() -> None:
    """Hosts, as network namespaces of this machine, can be made here."""
    if lacking := network.missing():
        skip_outside_ci(f"{lacking}: tests over several hosts")
