"""The errors of a `state.duckdb` that cannot be opened: whether it is broken, or something around it fails.

Not here: opening it (`store`).
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

    import duckdb

#: Parts of DuckDB's errors about a file that may be intact.
_OUTER_TROUBLE: Final = (
    "Could not set lock",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE)),
)


class BrokenStateError(RunError):
    """A site's state exists but cannot be read any more."""


def first_line(error: duckdb.Error) -> str:
    """Return DuckDB's message without its hints."""
    return str(error).splitlines()[0]


def opening_error(file: Path, error: duckdb.Error) -> RunError:
    """Return the error about a file: that it is broken, or only that it cannot be opened."""
    reason = first_line(error)
    if any(sign in reason for sign in _OUTER_TROUBLE):
        return RunError(f"the state {file} cannot be opened ({reason}); nothing in it was changed")
    return BrokenStateError(
        f"the state {file} cannot be read ({reason}); set it aside and run `sr-assets recover` for each stream of the site"
    )
