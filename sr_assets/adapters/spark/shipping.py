"""Shipping work to a cluster: the package as an archive, and one task function for all jobs.

A job is an object with `run`, which takes and yields Arrow batches. It travels inside the task's function, where no
plan, option or event log shows it.
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

_PACKAGE: Final = Path(__file__).resolve().parents[2]
#: The earliest time that an archive supports, so that equal sources give equal archives.
_TIMELESS: Final = (1980, 1, 1, 0, 0, 0)


class Job(Protocol):
    """Work for executors; must be picklable."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do one task's share, given by its rows."""
        ...


@functools.cache
def archive_name() -> str:
    """Return the name of this package's archive, which depends on the source. The archive lives as long as this
    process.
    """
    return f"sr_assets-{source_digest()[:16]}.zip"


def package_archive(folder: Path) -> Path:
    """Return the archive of this package's modules in a folder; create it if missing, and delete those of other
    sources.
    """
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


def task_of(job: Job) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function that runs a job on an executor with only the shipped modules.

    A Python worker serves several sessions, so it may have loaded modules of an earlier version.
    """
    packed, archive = pickle.dumps(job), archive_name()

    # A nested function is pickled as code, not by name, so loading it needs none of our modules.
    def task(batches: Iterator[Any]) -> Iterator[Any]:
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
        return pickle.loads(packed).run(batches)  # type: ignore[no-any-return]  # noqa: S301  our own bytes

    return task
