"""Private files and folders, and objects that another user planted at their path."""

import os
from pathlib import Path

import pytest

from sr_assets.adapters.locking import living_holder, lock
from sr_assets.adapters.private import open_private, own_folder, write_private
from sr_assets.adapters.state.lock import SiteLock, lock_owner
from sr_assets.domain.errors import ConfigurationError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_own_folder_tightens_everything_inside(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    (folder / "staging").mkdir(parents=True)
    file, program = folder / "staging" / "0.parquet", folder / "java"
    for path, wide in ((file, 0o664), (program, 0o755)):
        path.touch()
        path.chmod(wide)
    for path in (folder, folder / "staging"):
        path.chmod(0o777)
    own_folder(folder)
    assert [mode(path) for path in (folder, folder / "staging", file, program)] == [0o700, 0o700, 0o600, 0o700]


@pytest.mark.parametrize("planted", ("lock", "engine.log", ".status.json"))
def test_symbolic_link_is_refused_and_its_target_unchanged(tmp_path: Path, planted: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    precious.chmod(0o644)
    link = tmp_path / "site" / planted
    link.parent.mkdir()
    link.symlink_to(precious)
    for path, attempt in ((link.parent, own_folder), (link, open_private)):
        with pytest.raises(
            ConfigurationError, match=rf"{planted} is a symbolic link, which may lead anywhere; remove it"
        ):
            attempt(path)
    assert (precious.read_text(), mode(precious)) == ("mine", 0o644)
    write_private(link, "replaced")
    assert (precious.read_text(), link.is_symlink(), mode(link)) == ("mine", False, 0o600)


def test_path_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "site" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for path, attempt in ((lock.parent, own_folder), (lock, open_private)):
        with pytest.raises(
            ConfigurationError, match=r"belongs to user \S+, but this process runs as user \S+; run as its owner"
        ):
            attempt(path)


def test_pipe_instead_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ConfigurationError, match="lock is not a regular file; remove it"):
        open_private(tmp_path / "lock")


def test_dead_process_is_not_named_as_the_holder_of_a_lock(tmp_path: Path) -> None:
    dead = 2**22 + 1  # beyond the largest process id
    assert living_holder(f"run 1 (pid {dead}) since 2026") is None
    assert living_holder(f"run 2 (pid {os.getpid()}) since 2026\n") == f"run 2 (pid {os.getpid()}) since 2026"
    with SiteLock(tmp_path, "run 3", 0):
        assert str(lock_owner(tmp_path)).startswith("run 3 (pid ")
    assert (tmp_path / "lock").read_text() == ""
    (tmp_path / "lock").write_text(f"run 1 (pid {dead}) since 2026")
    with (tmp_path / "lock").open() as held:
        assert lock(held)
        assert lock_owner(tmp_path) == "an unknown process"
    assert lock_owner(tmp_path) is None
