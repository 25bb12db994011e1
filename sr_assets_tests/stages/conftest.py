"""A fixture for tests of runs: a source server whose disk can be restored."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sr_assets_tests.rig import Rig
from sr_assets_tests.servers import NatsServer


@pytest.fixture
def restore_source(rig: Rig, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function: `save` copies the source's disk, `restore` restores that copy. The site has its own source
    server.
    """
    disk, saved = tmp_path / "source", tmp_path / "saved"
    with NatsServer(disk, "source") as source:
        rig.source = source

        def act(action: str) -> None:
            source.stop()
            old, new = (disk, saved) if action == "save" else (saved, disk)
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(old, new)
            source.start()

        yield act
