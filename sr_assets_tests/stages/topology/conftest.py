"""A configuration of their own for the tests of native streams, which use the command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Configure = Callable[..., Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Return a function that writes the configuration of these keys and has the command use it."""

    def write(**keys: Any) -> Path:
        file = tmp_path / "replication.yaml"
        file.write_text(yaml.safe_dump({"name": "CENTRE", "state_store": str(tmp_path / "home"), **keys}))
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
        monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
        return file

    return write
