"""Folders and files that are their owner's alone: no other user reads them, locks them, or leads us elsewhere by a link.

Here: creating, opening and tightening them, and refusing what another user or a link has put in their place. Not here:
which folders and files there are (`home`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from sr_assets.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

OWNERS_ALONE: Final = 0o077


def own_folder(folder: Path) -> None:
    """Create a folder that only its owner may enter, or make an existing one so, with everything in it.

    From then on this process and its children create files for their owner alone. Raises ConfigurationError when the folder,
    or anything in it, belongs to another user or is a symbolic link.
    """
    os.umask(OWNERS_ALONE)
    folder.mkdir(parents=True, exist_ok=True)
    tighten(folder, 0o700)
    for path in _entries(folder):
        tighten(path, 0o700)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder; what disappears meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


def tighten(path: Path, most: int) -> None:
    """Take from a file or folder the permissions that are not among `most`.

    Raises ConfigurationError when it belongs to another user or is a symbolic link; one that is not there is left alone.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        refuse_foreign(path, status)
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o777 & ~most:
                path.chmod(mode & (most | ~0o777))


def refuse_foreign(path: Path, status: os.stat_result) -> None:
    """Raise ConfigurationError when what lies at `path` belongs to another user or is a symbolic link."""
    if status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to {_user(status.st_uid)} and we run as {_user(os.geteuid())}: run as its owner,"
            " remove it, or name another home with SR_ASSETS_HOME"
        )
    if stat.S_ISLNK(status.st_mode):
        raise ConfigurationError(f"{path} is a symbolic link, which may lead anywhere: remove it")


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def open_private(file: Path) -> TextIO:
    """Open a file for reading and writing, creating it for its owner alone; a link is never followed.

    Raises ConfigurationError when it belongs to another user, or is a link or anything else than a file.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES):
            refuse_foreign(file, file.lstat())
        raise
    try:
        status = os.fstat(descriptor)
        refuse_foreign(file, status)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{file} is no regular file: remove it")
        if status.st_mode & OWNERS_ALONE:
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
    except BaseException:
        os.close(descriptor)
        raise


def write_private(file: Path, text: str) -> None:
    """Replace a file, atomically, by one of its owner alone; threads and processes may do so at once."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as output:
            output.write(text)
        Path(draft).replace(file)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def make_shared_folder(folder: Path) -> None:
    """Create a folder, and those above it, each with the permissions of the one that it is in."""
    if not folder.is_dir():
        make_shared_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


def share_as_folder(file: Path) -> None:
    """Let those read a file who may read the folder at `file`'s side; our own files are not executable."""
    file.chmod(stat.S_IMODE(file.parent.stat().st_mode) & 0o666)
