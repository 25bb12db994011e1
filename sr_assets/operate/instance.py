"""The Dagster instance: its folder, the disk under it, and its storage, prepared before several processes use it.

Not here: the processes (`services`, `runs`), its settings (`dagster.yaml`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import uuid
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.connection_file import remove_connections
from sr_assets.adapters.home import open_home, refuse_foreign_home
from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private, own_folder, write_private
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster import DagsterInstance

    from sr_assets.settings import Settings

logger = logging.getLogger(__name__)

_REMOTE_DISKS: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "gpfs",
        "beegfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
    }
)


def check_home(home: Path) -> None:
    """Refuse a home that is another user's, cannot be written, or lies on a network disk.

    Nothing is created: for a home that does not exist its nearest existing parent is checked. Raises ConfigurationError.
    """
    refuse_foreign_home(home)
    _check_disk(home)


def _check_disk(home: Path) -> None:
    """Refuse a folder that cannot be written or lies on a network disk, whose locks and memory maps cannot be trusted."""
    folder = next(folder for folder in (home, *home.parents) if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{home}: {folder} cannot be written; name another folder with SR_ASSETS_HOME or state_store"
        )
    kind = _disk_kind(folder.resolve())
    if kind in _REMOTE_DISKS:
        raise ConfigurationError(
            f"{home} lies on a network disk ({kind}), where locks cannot be trusted; "
            "name a local one with SR_ASSETS_HOME or state_store"
        )


def _disk_kind(folder: Path) -> str:
    """Return the type of the file system of a folder; empty when the system does not name it."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    # Blanks in a mount point are written \040; the innermost mount counts, of two on one point the later.
    points = [(mount[1].replace("\\040", " "), mount[2]) for mount in mounts]
    around = [(len(point), index, kind) for index, (point, kind) in enumerate(points) if folder.is_relative_to(point)]
    return max(around)[2] if around else ""


def prepare_instance(settings: Settings) -> Path:
    """Create the home and the Dagster instance's folder, set DAGSTER_HOME for this process and its children; return it.

    The folder is `DAGSTER_HOME`, else `<home>/dagster`; it gets the package's dagster.yaml if it has none. Raises
    ConfigurationError if a folder is unusable.
    """
    own = settings.home / "dagster"
    folder = Path(os.environ.get("DAGSTER_HOME") or own).expanduser().absolute()
    check_home(settings.home)
    _check_disk(folder)
    for needed in (settings.home, folder):
        try:
            if needed == settings.home:
                open_home(needed, settings.published_mode)
            elif needed == own:
                own_folder(needed)
            else:
                needed.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=needed):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{needed} cannot be written: {error.strerror}; name another with SR_ASSETS_HOME or state_store"
            ) from None
    _remove_old_connections(settings)
    os.environ["DAGSTER_HOME"] = str(folder)
    file = folder / "dagster.yaml"
    if not file.exists():
        write_private(file, files("sr_assets").joinpath("dagster.yaml").read_text(encoding="utf-8"))
    return folder


def _remove_old_connections(settings: Settings) -> None:
    """Remove the connection files, passwords included, that a killed run left at a site which is configured no more."""
    for site in (settings.home / "sites").glob("*"):
        if site.name not in settings.sites:
            remove_connections(site)


def prepare_storage(folder: Path) -> None:
    """Create the storage's tables in one process before several use it: created side by side they collide."""
    with storage_errors(folder), open_private(folder / ".storage.lock") as file:
        lock(file, None)
        # Where SQLite keeps the runs by default; elsewhere, and the first time, opening the storage creates its tables.
        if (folder / "history" / "runs.db").exists():
            return
        with open_instance() as instance:
            instance.get_runs_count()
            instance.all_asset_keys()
            instance.all_instigator_state()


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn what Dagster's storage raises, for example on a full disk, into a RunError of one line; `debug` logs the trace."""
    try:
        yield
    except SrAssetsError:
        raise
    except Exception as error:  # Dagster passes on every exception of its database
        logger.debug("Dagster's storage", exc_info=True)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"Dagster's storage in {folder} cannot be used: {reason}") from None


def open_instance() -> DagsterInstance:
    """The instance in DAGSTER_HOME; a context manager."""
    from dagster import DagsterInstance

    return DagsterInstance.get()


def mark_start() -> None:
    """Give the child processes a new start id: ephemeral streams are copied again once for each start."""
    from sr_assets.stages.source.position import START_VARIABLE

    os.environ[START_VARIABLE] = uuid.uuid4().hex
