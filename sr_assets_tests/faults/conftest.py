"""What tests of faults share: an engine whose writers can be held in the middle of a batch."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from sr_assets.adapters.checkpoints import Point
from sr_assets.adapters.spark.engine import engine_status, start_engine, stop_engine
from sr_assets.settings import SparkSettings
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.rig import ALL_ON_SPARK, Rig, wait_until

_prepared: set[int] = set()


@dataclass(frozen=True, slots=True)
class Hold:
    """Holds the next writer at its first acknowledgement, once for each time it is armed, until it is released."""

    marker: Path

    def arm(self) -> None:
        """Let the next writer stand still."""
        self.marker.unlink(missing_ok=True)

    def await_writer(self) -> int:
        """Wait until one does; returns the process id of its Python worker."""
        wait_until(lambda: self.marker.exists() and bool(self.marker.read_text()), "a writer amid its batch")
        return int(self.marker.read_text())

    def release(self) -> None:
        """Let it go on, and hold nobody else."""
        self.marker.write_text("released")


@pytest.fixture
def hold(rig: Rig) -> Hold:
    """A hold on the writers of the home's engine, which is started anew when it does not know of it."""
    # Only Spark's writers are held: the run's own process has other things to do than to stand still.
    rig.spark = ALL_ON_SPARK
    # What is there holds nobody: the engine's processes have the point in their environment from its start on.
    held = Hold(rig.home / "writer-held")
    held.marker.write_text("nobody")
    engine = engine_status(rig.home)
    if engine is None or engine.pid not in _prepared:
        stop_engine(rig.home)
        with pytest.MonkeyPatch.context() as environment:
            for name, text in hold_at(Point.PUBLISHING, held.marker).items():
                environment.setenv(name, text)
            engine = start_engine(SparkSettings(), rig.home)
        _prepared.add(engine.pid)
    return held
