"""What is known of `fleet.duckdb`, in `fleet.json`: which publications it shows, and which earlier ones are still read.

An earlier `fleet.duckdb` that may still be open keeps a hard link in `published/earlier`. By that link the system
is asked whether a process has the file open: as long as one has, the Parquet files of its views are kept. Not here: making
`fleet.duckdb` (`index`), removing Parquet files (`publication`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.locking import lock, read_holder, write_holder
from sr_assets.adapters.private import make_shared_folder, open_private, write_private
from sr_assets.adapters.published.publication import FOLDER, publication_folder, read_publication
from sr_assets.adapters.published.schema import SCHEMA_VERSION
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Counted as open in any case: where only locks tell, nobody is seen who has not locked the file yet.
_GRACE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_EARLIER: Final = f"{FOLDER}/earlier"
#: How long a run waits for another site that publishes: one that stands still must not stop all the others.
LOCK_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A `fleet.duckdb` that somebody may have open: its number, and when it was replaced, in monotonic seconds."""

    number: int
    replaced_at: float | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `fleet.json`: which file it is, the home as its views name it, and the publications that they show.

    Each `fleet.duckdb` has a number, higher than those before it. `opened` are those that may be open, this one included.
    """

    home: str = ""
    number: int = 0
    file: list[int] = field(default_factory=list)
    sites: dict[str, str] = field(default_factory=dict)
    opened: list[Opened] = field(default_factory=list)

    @property
    def numbers(self) -> list[int]:
        """The numbers of those that may be open."""
        return [file.number for file in self.opened]


def read_manifest(home: Path) -> Manifest:
    """Return what is known of the published file of a home; nothing when there is none, or it is another version's."""
    try:
        known = json.loads((home / "fleet.json").read_text())
        if known.pop("schema_version") != SCHEMA_VERSION:
            return Manifest()
        return Manifest(**{**known, "opened": [Opened(**file) for file in known["opened"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return Manifest()


def write_manifest(home: Path, shown: Manifest) -> None:
    """Replace what is known of the published file."""
    write_private(home / "fleet.json", json.dumps({"schema_version": SCHEMA_VERSION, **asdict(shown)}))


def identity(file: Path) -> list[int]:
    """Return what a file is known by; nothing when it is missing."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def shows(home: Path, site: str, token: str, shown: Manifest | None = None) -> bool:
    """Return whether `fleet.duckdb` is the one we made, in this place, and shows this publication of a site."""
    shown = shown or read_manifest(home)
    return (
        shown.sites.get(site) == token
        and shown.home == str(home.resolve())
        and bool(shown.file)
        and shown.file == identity(home / "fleet.duckdb")
    )


def was_moved(home: Path, shown: Manifest) -> bool:
    """Return whether the views name their files in another folder than this home; one of two names of it is the same."""
    return bool(shown.home) and not (Path(shown.home).exists() and Path(shown.home).samefile(home))


def is_published(home: Path, site: str) -> bool:
    """Return whether `fleet.duckdb` shows the last publication of a site, and all of its files are there."""

    def look() -> bool:
        try:
            publication = read_publication(publication_folder(home, site))
        except OtherSchemaError:
            return False
        return publication is not None and shows(home, site, publication.token)

    if look():
        return True
    # Just now somebody may be about to put another file in its place.
    try:
        with locked(home, "a look", _LOOK_SECONDS):
            return look()
    except FleetBusyError:
        return True


def retain_open_files(home: Path, shown: Manifest, number: int) -> list[Opened]:
    """Return which files may be open once that of a number has taken the place of `fleet.duckdb`.

    Called before that, inside the lock. `fleet.duckdb` gets its second name; what nobody has open any more is removed.
    """
    folder = home / _EARLIER
    make_shared_folder(folder)
    now, kept = time.monotonic(), [Opened(number)]
    for earlier in shown.opened:
        file, replaced_at = folder / str(earlier.number), earlier.replaced_at
        if replaced_at is None:
            replaced_at = now
            # It may be missing, or on a disk where no file has two names.
            with contextlib.suppress(OSError):
                file.hardlink_to(home / "fleet.duckdb")
        if 0 <= now - replaced_at < _GRACE_SECONDS or (file.exists() and is_open(file)):
            kept.append(Opened(earlier.number, replaced_at))
    names = {str(earlier.number) for earlier in kept}
    for file in folder.iterdir():
        if file.name not in names:
            file.unlink()
    return kept


def is_open(file: Path) -> bool:
    """Return whether a process, this one included, has a file open."""
    with file.open("r+b") as handle:
        for ask in (_take_lease, _take_lock):
            try:
                ask(handle)
            except BlockingIOError:
                return True
            except (AttributeError, OSError):
                continue
            return False
    return True


def _take_lease(handle: BinaryIO) -> None:
    """Ask Linux, which gives a lease for writing on a file that nobody else has open."""
    # Whoever opens the file meanwhile waits for microseconds, and must not end us by the usual signal.
    fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def _take_lock(handle: BinaryIO) -> None:
    """Ask for DuckDB's lock: not that of this process, nor of one that opened the file twice and closed it once."""
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FleetBusyError(RunError):
    """Another site publishes, or stands still while it does."""


@contextlib.contextmanager
def locked(home: Path, name: str, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of a home's published file, whose text says who does.

    Raises FleetBusyError when another one holds it for `wait_seconds` on.
    """
    file = home / "fleet.lock"
    with open_private(file) as opened:
        if not lock(opened, wait_seconds):
            raise FleetBusyError(
                f"{file} has been held by {read_holder(opened)} for {wait_seconds:.0f} s;"
                " nothing was published, the next run does it; if that process stands still, end it"
            )
        write_holder(opened, f"{name} (pid {os.getpid()})\n")
        yield
