"""Work in parallel tasks of a Spark session, on this host's engine and on a cluster, and the package for it.

Work is an object with `run`, which takes and yields Arrow batches (`mapInArrow`), or a group's table (`applyInArrow`). It is
pickled into the task's function, where no plan, option or event log shows it, and returns all results as rows: exactly one
attempt's for each task.
"""

from __future__ import annotations

import functools
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from sr_assets.adapters.private import own_folder
from sr_assets.adapters.spark.config import source_digest

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_PACKAGE: Final = Path(__file__).resolve().parents[2]
#: The earliest time that an archive supports, so that equal sources give equal archives.
_TIMELESS: Final = (1980, 1, 1, 0, 0, 0)


class Work(Protocol):
    """What tasks do; it must be picklable."""

    @property
    def schema(self) -> str:
        """The schema of the results, in Spark's syntax."""

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do one task's share, given by its rows, and yield its results."""
        ...


class GroupWork(Protocol):
    """What tasks do with a group of rows; it must be picklable."""

    @property
    def schema(self) -> str:
        """The schema of the results, in Spark's syntax."""

    def run(self, rows: pa.Table) -> pa.Table:
        """Return the results of a group, which is in memory."""
        ...


def run_tasks(
    session: SparkSession, rows: pa.Table | range, work: Work, partitions: int | None = None, *, by: str | None = None
) -> pa.Table:
    """Do work on `rows` in this many parallel tasks, and return all results, unordered.

    A `range` has a row for each of its numbers, in the column `id`, and each task gets consecutive ones. A table is spread
    evenly, or so that rows with equal values in the column `by` go to one task; without `partitions` Spark decides. Raises what
    PySpark raises.
    """
    if isinstance(rows, range):
        frame = session.range(rows.start, rows.stop, rows.step, partitions)
    else:
        frame = session.createDataFrame(rows)
        if partitions == 1:
            frame = frame.coalesce(1)
        elif partitions is not None:
            frame = frame.repartition(partitions, *([by] if by else []))
    return in_tasks(frame, work).toArrow()


def in_tasks(frame: DataFrame, work: Work) -> DataFrame:
    """Return the results of work on a frame; each of its partitions is a task's rows."""
    return frame.mapInArrow(_task_of(work), work.schema)


def in_groups(frame: DataFrame, by: str, work: GroupWork) -> DataFrame:
    """Return the results of work on each group of rows with equal values in the column `by`."""
    return frame.groupBy(by).applyInArrow(_task_of(work), work.schema)


def _task_of(work: Work | GroupWork) -> Callable[[Any], Any]:
    """Return the function that does a task's work on an executor that may have only the shipped modules.

    A Python worker serves several sessions, so it may have loaded modules of an earlier version.
    """
    packed, archive = pickle.dumps(work), archive_name()

    # A nested function is pickled as code, not by name, so loading it needs none of our modules.
    def task(rows: Any) -> Any:
        import pickle
        import sys

        path = next((path for path in sys.path if path.endswith(archive)), None)
        if path is not None:
            earlier = [name for name in sys.modules if name.partition(".")[0] == "sr_assets"]
            if not all(str(getattr(sys.modules[name], "__file__", "")).startswith(path) for name in earlier):
                for name in earlier:
                    del sys.modules[name]
            sys.path.remove(path)
            sys.path.insert(0, path)
        return pickle.loads(packed).run(rows)  # noqa: S301  our own bytes

    return task


@functools.cache
def archive_name() -> str:
    """Return the name of this package's archive, which depends on the source."""
    return f"sr_assets-{source_digest()[:16]}.zip"


def package_archive(folder: Path) -> Path:
    """Return the archive of this package's modules in a folder; make it if missing, and delete those of other sources."""
    own_folder(folder)
    archive = folder / archive_name()
    if not archive.exists():
        for old in folder.glob("sr_assets-*.zip"):
            old.unlink(missing_ok=True)
        draft = folder / f".{archive.name}"
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as packed:
            for module in sorted(_PACKAGE.rglob("*.py")):
                entry = zipfile.ZipInfo(str(module.relative_to(_PACKAGE.parent)), _TIMELESS)
                packed.writestr(entry, module.read_bytes(), zipfile.ZIP_DEFLATED)
        draft.replace(archive)
    return archive
