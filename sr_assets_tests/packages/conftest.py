"""A bare Debian, installed once; each module of tests changes its own copy."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sr_assets_tests.packages.chroot import MIRROR, Chroot, bootstrap, missing


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a minimal Debian: its base system and package manager."""
    if reason := missing():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("bare") / "root"
    if problem := bootstrap(root):
        pytest.skip(f"Debian cannot be installed from {MIRROR}: {problem}")
    yield root
    # Nothing is mounted below it, see chroot.py.
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def debian(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chroot]:
    """A bare Debian of this module."""
    copied = copy_of(bare, tmp_path_factory.mktemp("debian") / "root")
    yield copied
    shutil.rmtree(copied.root)


def copy_of(root: Path, copied: Path) -> Chroot:
    """Return a copy of a Debian."""
    subprocess.run(["cp", "--archive", root, copied], check=True)
    return Chroot(copied)
