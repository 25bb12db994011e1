"""The Dagster instance's folder and storage, prepared before several processes use them."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.connection_file import remove_connections
from sr_assets.adapters.data import keep_values
from sr_assets.adapters.home import open_home, refuse_foreign_home
from sr_assets.adapters.locking import living_holder, lock
from sr_assets.adapters.private import open_private, own_folder, write_private
from sr_assets.dagster_storage import create_storage, has_history, is_created
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError
from sr_assets.settings import Settings
from sr_assets.settings.loading import VALUES_VARIABLE, hand_down

if TYPE_CHECKING:
    from dagster import DagsterInstance


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
    """Raise ConfigurationError for a home of another user, a read-only home or one on a network disk.

    Creates nothing: for a missing home, the nearest existing parent is checked.
    """
    refuse_foreign_home(home)
    _check_disk(home)


def _check_disk(home: Path) -> None:
    """Raise ConfigurationError for a read-only folder, or a network disk with its unreliable locks and memory maps."""
    folder = next(folder for folder in (home, *home.parents) if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{home}: {folder} cannot be written; choose another folder with SR_ASSETS_HOME or state_store"
        )
    kind = _disk_kind(folder.resolve())
    if kind in _REMOTE_DISKS:
        raise ConfigurationError(
            f"{home}: is on a network disk ({kind}), where locks are unreliable; "
            "choose a local disk with SR_ASSETS_HOME or state_store"
        )


def _disk_kind(folder: Path) -> str:
    """Return the file system type of a folder, or "" if the system does not list it."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    # A mount point's blanks are escaped as \040. The innermost mount counts, or the later of two on one point.
    points = [(mount[1].replace("\\040", " "), mount[2]) for mount in mounts]
    around = [(len(point), index, kind) for index, (point, kind) in enumerate(points) if folder.is_relative_to(point)]
    return max(around)[2] if around else ""


def prepare_instance(settings: Settings) -> Path:
    """Create the home and the Dagster instance's folder, set DAGSTER_HOME for this process and its children; return it.

    The folder is `DAGSTER_HOME`, else `<home>/dagster`; it gets the package's dagster.yaml if it has none and no runs. Raises
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
                f"{needed}: cannot be written: {error.strerror}; choose another folder with SR_ASSETS_HOME or state_store"
            ) from None
    _remove_old_connections(settings)
    os.environ["DAGSTER_HOME"] = str(folder)
    file = folder / "dagster.yaml"
    # Without this file, an instance with runs has Dagster's own settings, which others may rely on.
    if not file.exists() and (folder == own or not has_history(folder)):
        write_private(file, files("sr_assets").joinpath("dagster.yaml").read_text(encoding="utf-8"))
    return folder


def _remove_old_connections(settings: Settings) -> None:
    """Delete connection files, which contain passwords, that a killed run left at a site no longer configured."""
    for site in (settings.home / "sites").glob("*"):
        if site.name not in settings.sites and (site / "lock").exists():
            remove_connections(site)


def prepare_storage(folder: Path) -> None:
    """Create the storage's tables in one process: concurrent creation by several fails."""
    with storage_errors(folder), open_private(folder / ".storage.lock") as file:
        lock(file, None)
        # SQLite's default file. In another storage, or if it is missing, opening the storage creates the tables.
        if is_created(folder):
            return
        with open_instance() as instance:
            create_storage(instance)


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Translate exceptions of Dagster's storage, such as a full disk, into a one-line RunError; log the trace at debug."""
    try:
        yield
    except SrAssetsError:
        raise
    except Exception as error:  # Dagster translates no exception of its database
        logger.debug("Dagster's storage", exc_info=True)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"Dagster's storage in {folder} is unusable: {reason}") from None


def open_instance() -> DagsterInstance:
    """Return the instance in DAGSTER_HOME; a context manager."""
    from dagster import DagsterInstance

    return DagsterInstance.get()


@contextlib.contextmanager
def prepared_instance() -> Iterator[DagsterInstance]:
    """Open the instance in DAGSTER_HOME inside the block, with prepared storage; exceptions of its storage are a RunError."""
    folder = Path(os.environ["DAGSTER_HOME"])
    prepare_storage(folder)
    with storage_errors(folder), open_instance() as instance:
        yield instance


def mark_start(settings: Settings) -> None:
    """Give child processes a new start id, with which each start copies ephemeral streams again, and our static values."""
    from sr_assets.stages.source.position import START_VARIABLE

    os.environ[START_VARIABLE] = uuid.uuid4().hex
    keep_values(settings)
    for file in settings.home.glob("values-*.json"):
        if living_holder(f"(pid {file.stem.removeprefix('values-')})") is None:
            file.unlink(missing_ok=True)
    if settings.loaded and settings.loaded.static:
        # Not in the variable itself, which every program that a child starts would inherit.
        file = settings.home / f"values-{os.getpid()}.json"
        write_private(file, hand_down(settings), durable=False)
        os.environ[VALUES_VARIABLE] = str(file)
