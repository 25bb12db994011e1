"""Private files and folders, and objects that another user planted at their path."""

import os
from pathlib import Path

import pytest

from sr_assets.adapters.locking import living_holder, lock
from sr_assets.adapters.private import open_private, own_folder, write_private
from sr_assets.adapters.state.database import create_database
from sr_assets.adapters.state.lease import Lease
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


@pytest.mark.parametrize("planted", ("lock", "engine.log", ".fleet.json"))
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


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """The calls that reach the disk, in order: the call, the name of the file or folder, and the content of a file."""
    calls: list[tuple[str, str, str]] = []
    sync, replace = os.fsync, Path.replace

    def record_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        calls.append(("fsync", path.name, "" if path.is_dir() else path.read_text(errors="replace")))
        sync(descriptor)

    def record_replace(draft: Path, file: Path) -> Path:
        calls.append(("rename", file.name, draft.name))
        return replace(draft, file)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_replace)
    return calls


def test_written_file_is_on_the_disk_before_its_name(tmp_path: Path, disk: list[tuple[str, str, str]]) -> None:
    write_private(tmp_path / "file", "content")
    draft = disk[0][1]
    assert draft.startswith(".file.")
    assert disk == [("fsync", draft, "content"), ("rename", "file", draft), ("fsync", tmp_path.name, "")]


def test_state_survives_a_power_loss(tmp_path: Path, disk: list[tuple[str, str, str]]) -> None:
    # The second one gets the content of the first.
    for name in ("first.duckdb", "state.duckdb"):
        create_database(tmp_path / name)
    (renamed,) = (number for number, call in enumerate(disk) if call[:2] == ("rename", "state.duckdb"))
    assert disk[renamed + 1][0] == "fsync"
    assert disk[renamed - 1][:2] == ("fsync", disk[renamed][2])


def test_lease_waits_for_no_disk(tmp_path: Path, disk: list[tuple[str, str, str]]) -> None:
    Lease(deadline=1.0).write(tmp_path)
    assert [call[0] for call in disk] == ["rename"]


@pytest.mark.parametrize("content", ("", "{"), ids=("empty", "cut"))
def test_lease_that_a_power_loss_damaged_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "leader.json").write_text(content)
    assert not Lease.read(tmp_path).holds
