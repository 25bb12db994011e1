"""What a signal does, wherever it arrives."""

import sqlite3

import pytest
from sqlalchemy import NullPool, create_engine

from sr_assets.operate.processes import interrupted_in_order


class Interrupted(sqlite3.Connection):
    """A connection whose closing is interrupted."""

    def close(self) -> None:
        """Close, and be interrupted at it."""
        super().close()
        raise KeyboardInterrupt


def test_an_interrupt_amid_dagsters_storage_shows_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("sqlite://", poolclass=NullPool, connect_args={"factory": Interrupted})
    with interrupted_in_order(), pytest.raises(KeyboardInterrupt):
        engine.connect().close()
    assert caplog.text == ""
