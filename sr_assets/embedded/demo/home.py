"""The demo's folder and the redirection of its output."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.embedded.demo.configuration import FILE_NAME


@contextlib.contextmanager
def demo_home(chosen: Path | None) -> Iterator[Path]:
    """Yield the demo's folder: a temporary one that is deleted at the end, or the chosen one.

    Raises ConfigurationError if the chosen folder is neither empty nor a demo, RunError if another demo runs in it.
    """
    if chosen is None:
        folder = Path(tempfile.mkdtemp(prefix="sr-assets-demo-")).resolve()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    folder = chosen.expanduser().resolve()
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / FILE_NAME).exists():
            raise ConfigurationError(f"--home {chosen} is neither empty nor a demo; choose another folder")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open_private(folder / "demo.lock")
    except OSError as error:
        raise ConfigurationError(f"--home {chosen}: {error.strerror}; choose another folder") from None
    with file:
        if not lock(file):
            raise RunError(f"another demo runs in {chosen}; stop it, or choose another --home")
        yield folder


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Redirect stdout of this process and its children to stderr inside the block."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
