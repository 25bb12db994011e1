"""`fleet.json`, the manifest of `fleet.duckdb`: the shown publications, and older files that readers have open.

A replaced `fleet.duckdb` keeps a hard link in `published/earlier`, by which the system tells whether a process has it
open. As long as one has, the Parquet files of its views stay. The lock `fleet.lock` protects both files.
"""

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from sr_assets.adapters import times
from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.locking import lock, read_holder, write_holder
from sr_assets.adapters.private import make_shared_folder, open_private, write_private
from sr_assets.adapters.published.publication import FOLDER, publication_folder, read_publication
from sr_assets.adapters.published.tables import SCHEMA_VERSION
from sr_assets.domain.errors import RunError

#: A replaced file counts as open for this long: without leases, a reader is invisible until it locks the file.
_GRACE_SECONDS: Final = 10.0
_CHECK_SECONDS: Final = 1.0
_EARLIER: Final = f"{FOLDER}/earlier"
#: How long a run waits for another publishing site: a hanging one must not stop all others.
LOCK_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A `fleet.duckdb` that may be open: its number, and the time of its replacement in monotonic seconds."""

    number: int
    replaced_at: float | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of `fleet.json`: the file's identity, the home in its views, and the publications that they show.

    Each `fleet.duckdb` has a number, higher than all before. `opened` are the files that may be open, including the
    current one. `parts` has a checksum for each view of the file and for `site_leaders`, by name. The files of an
    earlier version are not `relative`: their views have no `sr_assets_home`.
    """

    home: str = ""
    number: int = 0
    file: list[int] = field(default_factory=list)
    sites: dict[str, str] = field(default_factory=dict)
    opened: list[Opened] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    relative: bool = False

    @property
    def numbers(self) -> list[int]:
        """Numbers of the files that may be open."""
        return [file.number for file in self.opened]


def read_manifest(home: Path) -> Manifest:
    """Return the manifest of a home, or an empty one if it is missing or of another schema version."""
    try:
        content = json.loads((home / "fleet.json").read_text())
        if content.pop("schema_version") != SCHEMA_VERSION:
            return Manifest()
        return Manifest(**{**content, "opened": [Opened(**file) for file in content["opened"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return Manifest()


def write_manifest(home: Path, manifest: Manifest) -> None:
    """Replace the manifest."""
    write_private(home / "fleet.json", json.dumps({"schema_version": SCHEMA_VERSION, **asdict(manifest)}))


def identity(file: Path) -> list[int]:
    """Return inode, size and modification time of a file, or an empty list if it is missing."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def shows(home: Path, site: str, token: str, manifest: Manifest | None = None) -> bool:
    """Return whether `fleet.duckdb` is the file of the manifest, at this path, and shows this publication of a site."""
    manifest = manifest or read_manifest(home)
    return (
        manifest.sites.get(site) == token
        and manifest.home == str(home.resolve())
        and bool(manifest.file)
        and manifest.file == identity(home / "fleet.duckdb")
    )


def has_absolute_views(manifest: Manifest) -> bool:
    """Return whether an earlier version wrote the views, which name files by absolute paths and lack later columns."""
    return bool(manifest.home) and not manifest.relative


def is_published(home: Path, site: str) -> bool:
    """Return whether `fleet.duckdb` shows the last publication of a site, with all its files."""

    def check() -> bool:
        try:
            publication = read_publication(publication_folder(home, site))
        except OtherSchemaError:
            return False
        return publication is not None and shows(home, site, publication.token)

    if check():
        return True
    # A site may be replacing the file right now.
    try:
        with locked(home, "a check", _CHECK_SECONDS):
            return check()
    except FleetBusyError:
        return True


def retain_open_files(home: Path, manifest: Manifest, number: int) -> list[Opened]:
    """Return the files that may be open once the file with `number` replaces `fleet.duckdb`.

    Call it inside the lock, before the replacement. It links the current `fleet.duckdb`, and deletes links that no
    process has open.
    """
    folder = home / _EARLIER
    make_shared_folder(folder)
    now, retained = times.monotonic(), [Opened(number)]
    for earlier in manifest.opened:
        file, replaced_at = folder / str(earlier.number), earlier.replaced_at
        if replaced_at is None:
            replaced_at = now
            # The file may be missing, or its disk may not support hard links.
            with contextlib.suppress(OSError):
                file.hardlink_to(home / "fleet.duckdb")
        if 0 <= now - replaced_at < _GRACE_SECONDS or (file.exists() and is_open(file)):
            retained.append(Opened(earlier.number, replaced_at))
    names = {str(earlier.number) for earlier in retained}
    for file in folder.iterdir():
        if file.name not in names and file.name.isdecimal():
            file.unlink()
    return retained


def earlier_file(home: Path, number: int) -> Path:
    """Return the link that keeps a replaced `fleet.duckdb`."""
    return home / _EARLIER / str(number)


def is_open(file: Path) -> bool:
    """Return whether any process, including this one, has a file open."""
    with file.open("r+b") as handle:
        for request in (_take_lease, _take_lock):
            try:
                request(handle)
            except BlockingIOError:
                return True
            except (AttributeError, OSError):
                continue
            return False
    return True


def _take_lease(handle: BinaryIO) -> None:
    """Request a write lease: Linux grants it only if no other handle has the file open."""
    # A process that opens the file now waits for microseconds; the usual signal, SIGIO, would end this process.
    fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def _take_lock(handle: BinaryIO) -> None:
    """Request DuckDB's lock, which misses this process, and a process that opened the file twice and closed it once."""
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FleetBusyError(RunError):
    """Another site publishes, or hangs while it does."""


@contextlib.contextmanager
def locked(home: Path, name: str, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of a home's published file, with `name` as the holder.

    Raises FleetBusyError if another process holds it for `wait_seconds`.
    """
    file = home / "fleet.lock"
    with open_private(file) as opened:
        if not lock(opened, wait_seconds):
            raise FleetBusyError(
                f"{file} has been held by {read_holder(opened)} for {wait_seconds:.0f} s;"
                " nothing was published, the next run will publish; if that process hangs, end it"
            )
        write_holder(opened, f"{name} (pid {os.getpid()})\n")
        yield
