"""Private folders and files: no other user can read or lock them, or redirect them by a link."""

import contextlib
import errno
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, TextIO

from sr_assets.domain.errors import ConfigurationError

OWNERS_ALONE: Final = 0o077


def own_folder(folder: Path) -> None:
    """Create a folder that only its owner may enter, or make an existing one private with everything in it.

    From then on this process and its children create files for their owner alone. Raises ConfigurationError if the
    folder, or any of its content, belongs to another user or is a symbolic link.
    """
    os.umask(OWNERS_ALONE)
    folder.mkdir(parents=True, exist_ok=True)
    tighten(folder, 0o700)
    for path in _entries(folder):
        tighten(path, 0o700)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder, except content that disappears during the iteration."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


def tighten(path: Path, most: int) -> None:
    """Remove all permissions outside `most` from an existing file or folder.

    Raises ConfigurationError if it belongs to another user or is a symbolic link.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        refuse_foreign(path, status)
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o777 & ~most:
                path.chmod(mode & (most | ~0o777))


def refuse_foreign(path: Path, status: os.stat_result) -> None:
    """Raise ConfigurationError if `path` belongs to another user or is a symbolic link."""
    if status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to {_user(status.st_uid)}, but this process runs as {_user(os.geteuid())}; run as its owner,"
            " remove it, or choose another home with SR_ASSETS_HOME"
        )
    if stat.S_ISLNK(status.st_mode):
        raise ConfigurationError(f"{path} is a symbolic link, which may lead anywhere; remove it")


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def open_private(file: Path) -> TextIO:
    """Open a file for reading and writing, creating it for its owner alone; a link is never followed.

    Raises ConfigurationError if it belongs to another user or is not a regular file.
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
            raise ConfigurationError(f"{file} is not a regular file; remove it")
        if status.st_mode & OWNERS_ALONE:
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
    except BaseException:
        os.close(descriptor)
        raise


def open_to_append(file: Path) -> int:
    """Return a descriptor that appends to a file outside the home, which is created if need be.

    In a folder in which everybody may create files, raises ConfigurationError for another user's file or link.
    """
    flags, shared = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, file.parent.stat().st_mode & stat.S_IWOTH
    if shared:
        with contextlib.suppress(FileNotFoundError):
            _refuse_planted(file, file.lstat())
        if not file.is_symlink():
            flags |= os.O_NOFOLLOW  # somebody may make one now
    descriptor = os.open(file, flags, 0o666)
    try:
        if shared:
            _refuse_planted(file, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_planted(file: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"{file} belongs to {_user(status.st_uid)}, in a folder in which everybody can create files; choose another"
            " folder, or remove it"
        )


def write_private(file: Path, text: str, mode: int = 0o600, *, durable: bool = True) -> None:
    """Replace a file atomically, by default by one of its owner alone; concurrent threads and processes may do so.

    It survives a power loss. Unless `durable`, the file may then be old, empty or missing: for files that are written often,
    or that mean nothing after a restart of the machine.
    """
    descriptor, draft = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as output:
            output.write(text)
            if durable:
                output.flush()
                os.fsync(output.fileno())
        Path(draft).chmod(mode)
        Path(draft).replace(file)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Let the names of a folder's files survive a power loss; call it after a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_files(folder: Path, *patterns: str) -> None:
    """Delete the files below a folder whose names match a pattern, and then each empty folder; others' files remain."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif any(fnmatch(path.name, pattern) for pattern in patterns):
                path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def make_shared_folder(folder: Path) -> None:
    """Create a folder and its parents, each with the permissions of its parent."""
    if not folder.is_dir():
        make_shared_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


def share_as_folder(file: Path) -> None:
    """Give a file the permissions of its folder, without execution."""
    file.chmod(stat.S_IMODE(file.parent.stat().st_mode) & 0o666)
