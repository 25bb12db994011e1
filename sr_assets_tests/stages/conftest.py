"""What tests of a run share: a source whose disk can be set back."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.rig import Rig


@pytest.fixture
def restore_source(rig: Rig, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A site whose source server is its own; `save` keeps its disk as it is now, `restore` sets it back to that."""
    disk, saved = tmp_path / "frail", tmp_path / "saved"
    with NatsServer(disk, "frail") as source:
        rig.source = source

        def act(action: str) -> None:
            source.stop()
            old, new = (disk, saved) if action == "save" else (saved, disk)
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(old, new)
            source.start()

        yield act
