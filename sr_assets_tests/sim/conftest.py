"""Where the homes of simulated sites are."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sr_assets_tests.sim.platform import IN_MEMORY


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder without a disk."""
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=IN_MEMORY) as made:
        yield Path(made)
