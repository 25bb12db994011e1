"""The home: permissions of its folders and files, and of the published ones.

Only its owner can read the home, except `fleet.duckdb` and the Parquet files of its views, which have the permissions
of `published_mode`.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.private import OWNERS_ALONE, refuse_foreign, tighten
from sr_assets.domain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: DuckDB spills into the last one.
_PRIVATE_FOLDERS: Final = ("sites", "spark", "dagster", "fleet.duckdb.tmp")
_PRIVATE_FILES: Final = (
    "fleet.json",
    "fleet.lock",
    "up.lock",
    "up.tmp",
    "data.json",
    "control.db",
    ".fleet.duckdb.new",
)
#: The folders of the files that `fleet.duckdb` views.
_VIEWED: Final = ("published", "snapshots", "availability", "inventory", "actions")
#: All folders of a home, with the demo's `nats`: a folder with another one in it is not only a home.
_HOME_FOLDERS: Final = frozenset({*_PRIVATE_FOLDERS, *_VIEWED, "nats"})


class OtherSchemaError(RunError):
    """Another version of sr-assets wrote a file of the home, in a schema that this version does not read."""

    def __init__(self, file: Path, version: int | None) -> None:
        super().__init__(
            f"{file}: schema {version} is of an unreleased version; move the home away, start with an empty one and run"
            " `sr-assets recover --stream NAME` for each stream"
        )


def open_home(home: Path, published_mode: int) -> None:
    """Create the home, or set the permissions of an existing one for this `published_mode`.

    From then on this process and its children create files for their owner alone. Raises ConfigurationError if the
    home, or one of its folders and files, belongs to another user or is a symbolic link.
    """
    os.umask(OWNERS_ALONE)
    refuse_foreign_home(home)
    home.mkdir(parents=True, exist_ok=True)
    home = home.resolve()
    readers = published_mode & 0o044
    # A reader of the published files must traverse the home, but need not list it.
    _set_mode(home, 0o700 | readers >> 2 if _holds_nothing_else(home) else stat.S_IMODE(home.stat().st_mode) & ~0o022)
    for name in _PRIVATE_FOLDERS:
        tighten(home / name, 0o700)
    for name in _PRIVATE_FILES:
        tighten(home / name, 0o600)
    for name in ("fleet.duckdb", "tables.json"):
        _set_mode(home / name, published_mode)
    for name in _VIEWED:
        _open_viewed(home / name, 0o700 | readers | readers >> 2, published_mode)


def place_of(home: Path) -> str:
    """Return what identifies a home on this host: processes with the same place share its locks; empty if it is missing."""
    try:
        status = home.stat()
    except FileNotFoundError:
        return ""
    return f"{times.boot_id()}/{status.st_dev}/{status.st_ino}"


def refuse_foreign_home(home: Path) -> None:
    """Raise ConfigurationError if the home belongs to another user, is another user's link, or is shared by all users."""
    if not home.exists():
        return
    if home.lstat().st_uid not in (0, os.geteuid()):
        refuse_foreign(home, home.lstat())
    status = home.stat()
    refuse_foreign(home, status)
    if status.st_mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"{home} is a directory that all users share; choose another one with SR_ASSETS_HOME or state_store"
        )


def _holds_nothing_else(home: Path) -> bool:
    """Return whether a folder holds only a home; the mode of any other folder, such as a user's home directory, stays."""
    with os.scandir(home) as entries:
        return _HOME_FOLDERS.issuperset(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _open_viewed(folder: Path, folder_mode: int, file_mode: int) -> None:
    """Create a folder of viewed files; new files inherit their permissions from it, and existing files get them here."""
    folder.mkdir(exist_ok=True)
    refuse_foreign(folder, folder.lstat())
    if stat.S_IMODE(folder.stat().st_mode) & 0o777 == folder_mode:
        return
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            _set_mode(path, folder_mode if path.is_dir() else file_mode)
    # Last, so that an interrupted call is repeated.
    _set_mode(folder, folder_mode)


def _set_mode(path: Path, mode: int) -> None:
    """Set the permissions of an existing file or folder, keeping a folder's setgid bit."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        refuse_foreign(path, status)
        now = stat.S_IMODE(status.st_mode)
        if now & 0o777 != mode & 0o777:
            path.chmod(now & ~0o777 | mode)


def kept_sites(settings: "Settings") -> list[str]:
    """Return the sites whose rows stay published: configured sites, and sites with a state in this home until `forget`."""
    states = (settings.home / "sites").glob("*/state.duckdb")
    return [*settings.sites, *sorted({file.parent.name for file in states} - set(settings.sites))]
