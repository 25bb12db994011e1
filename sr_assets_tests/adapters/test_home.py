"""Permissions of a home and of its published files."""

import os
import re
from pathlib import Path

import pytest

from sr_assets.adapters.home import open_home
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.state.site_queue import dequeue_site, enqueue_site
from sr_assets.domain.errors import ConfigurationError
from sr_assets_tests.published import node_row, publish_message, publish_nodes

_DAY = "snapshots/name=a/stream=b/date=2026-01-31"


def modes(home: Path) -> dict[str, int]:
    """Return the permissions of a home, as "." and of everything in it."""
    return {str(path.relative_to(home)): path.stat().st_mode & 0o777 for path in (home, *home.rglob("*"))}


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A home with the permissions of a umask of 002."""
    home = tmp_path / "home"
    for folder in ("sites/london", "dagster", "spark", _DAY):
        (home / folder).mkdir(parents=True)
    for file in ("fleet.duckdb", "fleet.json", "fleet.lock", "up.lock", f"{_DAY}/1-2.parquet"):
        (home / file).touch()
    for path in (home, *home.rglob("*")):
        path.chmod(0o775 if path.is_dir() else 0o664)
    return home


@pytest.mark.parametrize(
    ("published", "entered", "folder"),
    ((0o600, 0o700, 0o700), (0o640, 0o710, 0o750), (0o644, 0o711, 0o755)),
)
def test_home_is_private_except_for_published_files(wide: Path, published: int, entered: int, folder: int) -> None:
    open_home(wide, published)
    permissions = modes(wide)
    assert permissions["."] == entered
    assert {permissions[name] for name in ("fleet.duckdb", f"{_DAY}/1-2.parquet")} == {published}
    assert {mode for name, mode in permissions.items() if name.startswith("snapshots") and "." not in name} == {folder}
    assert {permissions[name] for name in ("sites", "dagster", "spark")} == {0o700}
    assert {permissions[name] for name in ("fleet.json", "fleet.lock", "up.lock")} == {0o600}
    open_home(wide, 0o600)
    assert {mode & 0o077 for name, mode in modes(wide).items() if name.count("/") == 0} == {0}


def test_open_home_opens_all_viewed_folders_but_not_the_queue(tmp_path: Path) -> None:
    home = tmp_path / "home"
    publish_nodes(home, node_row("web1", "up", 0))
    publish_message(home, "web1")
    enqueue_site(home, "london", 10.0)
    open_home(home, 0o640)
    permissions = modes(home)
    assert (permissions["."], permissions["control.db"]) == (0o710, 0o600)
    with open_fleet(home) as fleet:
        views = read_rows(fleet, "SELECT sql FROM duckdb_views() WHERE NOT internal").values
    folders = set(re.findall(r"'/?(\w+)/", repr(views).replace(str(home), "")))
    assert folders >= {"published", "snapshots", "availability", "inventory"}
    assert {permissions[folder] for folder in folders} == {0o750}
    assert permissions["tables.json"] == permissions["fleet.duckdb"] == 0o640
    assert dequeue_site(home, "london")


def test_new_home_is_private(tmp_path: Path) -> None:
    open_home(tmp_path / "new" / "home", 0o600)
    assert set(modes(tmp_path / "new").values()) == {0o700}


def test_home_with_other_content_only_loses_write_access_of_others(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    tmp_path.chmod(0o775)
    open_home(tmp_path, 0o600)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_open_home_keeps_the_setgid_bit(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o2755)
    open_home(home, 0o640)
    assert home.stat().st_mode & 0o7777 == 0o2710
    assert (home / "snapshots").stat().st_mode & 0o7777 == 0o2750


@pytest.mark.parametrize("planted", ("sites", "snapshots", "fleet.duckdb", "fleet.lock", "up.lock"))
def test_symbolic_link_in_a_home_is_refused(tmp_path: Path, planted: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o755)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / planted).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=f"{planted} is a symbolic link"):
        open_home(tmp_path / "home", 0o600)
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755


def test_home_of_another_user_or_everybody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigurationError, match="is a directory that all users share; choose another one"):
        open_home(tmp_path, 0o600)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationError, match=r"belongs to user \S+, but this process runs as user"):
        open_home(tmp_path, 0o600)


def test_home_may_be_a_symbolic_link_of_its_owner(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    open_home(tmp_path / "home", 0o600)
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
