"""A fixture for fault tests: an engine whose writers can be held in the middle of a batch."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.spark.engine import Engine, engine_status, start_engine, stop_engine
from sr_assets.settings import SparkSettings
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.rig import ALL_ON_SPARK, Rig, wait_until

#: By their tokens: within a session, an engine may get the process id of an earlier one.
_engines_with_hold: set[str] = set()


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold on the next writer at its first acknowledgement, once per arming, until released."""

    home: Path

    @property
    def marker(self) -> Path:
        """The file that a held writer waits for."""
        return self.home / "writer-held"

    def arm(self) -> None:
        """Hold the next writer."""
        self.marker.unlink(missing_ok=True)

    def await_writer(self, has_ended: Callable[[], bool] = lambda: False) -> int:
        """Wait until a writer is held; return the process id of its Python worker.

        `has_ended` tells whether the run has ended: then no writer comes.
        """
        wait_until(lambda: self._held() or has_ended(), "a writer in the middle of its batch")
        engine = engine_status(self.home)
        assert self._held(), f"no writer was held in {engine}; engines with the hook: {_engines_with_hold}"
        return int(self.marker.read_text())

    def _held(self) -> bool:
        return self.marker.exists() and bool(self.marker.read_text())

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which a started engine has the hook."""
        return {**os.environ, **hold_at(Point.PUBLISHING, self.marker)}

    def note_engine(self, engine: Engine | None) -> None:
        """Note that an engine was started in `environ`, so that no test restarts it."""
        assert engine is not None
        _engines_with_hold.add(engine.token)

    def release(self) -> None:
        """Release the writer and hold no other."""
        self.marker.write_text("released")


@pytest.fixture
def hold(rig: Rig) -> Hold:
    """A hold on the writers of the home's engine; an engine started without the hook is restarted."""
    # Hold only Spark's writers, not the run's own process.
    rig.spark = ALL_ON_SPARK
    # An existing marker holds no process. The engine's processes inherit the hook from their environment.
    writer_hold = Hold(rig.home)
    writer_hold.marker.write_text("disarmed")
    engine = engine_status(rig.home)
    if engine is None or engine.token not in _engines_with_hold:
        stop_engine(rig.home)
    with pytest.MonkeyPatch.context() as environment:
        for name, text in writer_hold.environ.items():
            environment.setenv(name, text)
        # It keeps a warm engine for a while, and replaces one that the run would replace.
        writer_hold.note_engine(start_engine(SparkSettings(), rig.home))
    return writer_hold
