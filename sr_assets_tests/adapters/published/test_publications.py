"""Publications of several sites: own files only, files of open readers kept, no leftovers of an interruption."""

import json
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published import manifest
from sr_assets.adapters.published.fleet_file import Run, table_versions
from sr_assets.adapters.published.fleet_reader import count_rows, open_fleet, read_rows
from sr_assets.adapters.published.manifest import is_published
from sr_assets.adapters.published.publication import publication_folder
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.site_queue import dequeue_site, enqueue_site, queued_sites
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import gap_row
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings.names import read_site_name
from sr_assets_tests.published import NOW_NS, STREAM
from sr_assets_tests.published import SITE as LONDON

PARIS = "it's Paris/1"
SITES = (LONDON, PARIS)
#: Number of publications whose files a site keeps: the last one, and those that a concurrent index may still show.
_PUBLICATIONS = 3
#: A reader in another process: it opens the file, fetches the first rows of a result, and the rest on request.
_READER = """
import sys, duckdb
with duckdb.connect(sys.argv[1], read_only=True) as reader:
    # Closing one of two open handles releases the locks of both.
    with duckdb.connect() as another:
        another.execute(f"ATTACH '{sys.argv[1]}' AS other (READ_ONLY)")
    reader.execute("SET threads = 1")
    rows = reader.execute("SELECT r.next_sequence FROM replication AS r, range(200000) WHERE r.name = 'london'")
    seen = set(rows.fetchmany(10))
    print("open", flush=True)
    sys.stdin.readline()
    while batch := rows.fetchmany(10_000):
        seen.update(batch)
    seen.update(reader.execute("SELECT next_sequence FROM replication WHERE name = 'london'").fetchall())
    print(sorted(seen), flush=True)
"""


@contextmanager
def opened_state(home: Path, site: str) -> Iterator[SiteState]:
    with SiteState(home / "sites" / site.replace("/", "_")) as state:
        yield state


def publish(home: Path, site: str, next_sequence: int, sites: tuple[str, ...] = SITES) -> None:
    """Publish a site that has one stream without nodes, read up to a sequence."""
    with opened_state(home, site) as state:
        with state.transaction():
            state.save_stream(StreamState(STREAM, 1, next_sequence, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
        publish_again(home, site, state, sites)


def publish_again(home: Path, site: str, state: SiteState, sites: tuple[str, ...] = SITES) -> None:
    streams = [PublishedStream(STREAM, "T", tracked=True)]
    publish_site(home, site, state, streams, sites=sites, run=Run(NOW_NS, "run"))


def positions(home: Path) -> dict[str, int]:
    with open_fleet(home) as fleet:
        return dict(read_rows(fleet, "SELECT name, next_sequence FROM replication").values)


def save_gaps(state: SiteState, holes: Sequence[tuple[int, int]]) -> None:
    rows = [gap_row(STREAM, SequenceRange(*hole), 1, "deleted", NOW_NS) for hole in holes]
    state.gaps(STREAM).add(rows)


def named(home: Path, table: str) -> set[str]:
    """Return the names of a table's files in London's folder."""
    return {name for name in files(home, LONDON) if name.startswith(f"{table}-")}


def files(home: Path, site: str) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in publication_folder(home, site).glob("*.parquet")}


@pytest.fixture
def without_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a file that no process has open as unread immediately."""
    monkeypatch.setattr(manifest, "_GRACE_SECONDS", 0.0)


def test_site_writes_only_its_own_files(tmp_path: Path, without_grace: None) -> None:
    publish(tmp_path, PARIS, 1)
    before = files(tmp_path, PARIS)
    assert before
    for number in range(2, 12):
        publish(tmp_path, LONDON, number)
    assert positions(tmp_path) == {LONDON: 11, PARIS: 1}
    assert files(tmp_path, PARIS) == before
    assert len(files(tmp_path, LONDON)) <= _PUBLICATIONS * len(before)
    assert len(list((tmp_path / "published/earlier").iterdir())) <= 1


def test_unchanged_table_keeps_its_file(tmp_path: Path, without_grace: None) -> None:
    with opened_state(tmp_path, LONDON) as state:
        with state.transaction():
            state.save_stream(StreamState(STREAM, 1, 1, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
            save_gaps(state, [(5, 6)])
        publish_again(tmp_path, LONDON, state)
        (first,) = named(tmp_path, "gaps")
        # A reader of the first file keeps it although later publications have replaced it.
        with open_fleet(tmp_path) as reader:
            for number in range(2, 5):
                with state.transaction():
                    state.save_stream(StreamState(STREAM, 1, number, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
                publish_again(tmp_path, LONDON, state)
                assert named(tmp_path, "gaps") == {first}
            with state.transaction():
                save_gaps(state, [(8, 9)])
            for _ in range(_PUBLICATIONS):
                publish_again(tmp_path, LONDON, state)
            assert first in named(tmp_path, "gaps")
            assert read_rows(reader, "SELECT count(*) FROM gaps").values == [(1,)]
        for _ in range(_PUBLICATIONS):
            publish_again(tmp_path, LONDON, state)
    assert first not in named(tmp_path, "gaps")
    with open_fleet(tmp_path) as reader:
        assert read_rows(reader, "SELECT count(*) FROM gaps").values == [(2,)]
        assert positions(tmp_path) == {LONDON: 4}


def test_unchanged_table_keeps_its_file_and_version_over_runs(tmp_path: Path) -> None:
    def run(sequence: int, *holes: tuple[int, int], mode: int = 0o600) -> dict[str, str]:
        with opened_state(tmp_path, LONDON) as state:
            with state.transaction():
                state.save_stream(StreamState(STREAM, 1, sequence, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
                save_gaps(state, holes)
            streams = [PublishedStream(STREAM, "T", tracked=True)]
            publish_site(tmp_path, LONDON, state, streams, sites=SITES, run=Run(NOW_NS, "run"), mode=mode)
        return table_versions(tmp_path)

    first = run(1, (5, 6))
    files_of_first = named(tmp_path, "gaps")
    second = run(2)
    assert named(tmp_path, "gaps") == files_of_first
    assert second["gaps"] == first["gaps"]
    assert second["replication"] != first["replication"]
    # As many bytes, but another hole.
    assert run(2, (7, 8))["gaps"] != second["gaps"]
    readable = named(tmp_path, "gaps")
    run(2, mode=0o640)
    (shared,) = named(tmp_path, "gaps") - readable
    assert stat.S_IMODE((publication_folder(tmp_path, LONDON) / shared).stat().st_mode) == 0o640
    assert count_gaps(tmp_path) == 2


def count_gaps(home: Path) -> int:
    with open_fleet(home) as fleet:
        return int(read_rows(fleet, "SELECT count(*) FROM gaps").values[0][0])


def test_damaged_copy_of_unchanged_views_is_built_anew(tmp_path: Path) -> None:
    publish(tmp_path, LONDON, 1)
    fleet = tmp_path / "fleet.duckdb"
    fleet.write_bytes(b"x" * fleet.stat().st_size)
    known = manifest.read_manifest(tmp_path)
    manifest.write_manifest(tmp_path, replace(known, file=manifest.identity(fleet)))
    publish(tmp_path, LONDON, 2)
    assert positions(tmp_path) == {LONDON: 2}


@pytest.mark.process
def test_long_query_reads_one_publication_to_its_end(tmp_path: Path, without_grace: None) -> None:
    publish(tmp_path, PARIS, 1)
    publish(tmp_path, LONDON, 1)
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, str(tmp_path / "fleet.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "open\n"
    opened, changed = files(tmp_path, LONDON), named(tmp_path, "replication")
    for number in range(2, 12):
        publish(tmp_path, LONDON, number)
    assert opened.items() <= files(tmp_path, LONDON).items()
    assert reader.communicate("\n")[0].splitlines()[-1] == "[(1,)]"
    for number in range(12, 12 + _PUBLICATIONS):
        publish(tmp_path, LONDON, number)
    assert not changed & named(tmp_path, "replication")


def test_reader_in_the_publishing_process_keeps_its_files(tmp_path: Path, without_grace: None) -> None:
    publish(tmp_path, LONDON, 1)
    with duckdb.connect(str(tmp_path / "fleet.duckdb"), read_only=True) as reader:
        for number in range(2, 6):
            publish(tmp_path, LONDON, number)
        assert reader.execute("SELECT next_sequence FROM replication").fetchall() == [(1,)]
    assert positions(tmp_path) == {LONDON: 5}


def test_concurrent_publications_lose_no_rows(tmp_path: Path) -> None:
    sites = tuple(f"site{number}" for number in range(4))

    def work(site: str) -> None:
        for number in range(1, 11):
            publish(tmp_path, site, number, sites)
            assert is_published(tmp_path, site)

    with ThreadPoolExecutor(len(sites)) as pool:
        assert [*pool.map(work, sites)] == [None] * len(sites)
    assert positions(tmp_path) == dict.fromkeys(sites, 10)
    assert all(is_published(tmp_path, site) for site in sites)


class Killed(BaseException):
    """The end of a process, as far as the files can tell."""


@pytest.mark.parametrize(
    "point", (Point.WRITTEN_TABLES, Point.NOTED_TABLES, Point.PUBLISHING_TABLES, Point.PUBLISHED_TABLES)
)
def test_interrupted_publication_is_noticed_and_cleaned_up(
    tmp_path: Path, without_grace: None, monkeypatch: pytest.MonkeyPatch, point: Point
) -> None:
    publish(tmp_path, PARIS, 1)
    publish(tmp_path, LONDON, 1)

    def kill(reached: Point) -> None:
        if reached == point:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(crash_points, "hook", kill)
        with pytest.raises(Killed):
            publish(tmp_path, LONDON, 2)
    seen = 2 if point == Point.PUBLISHED_TABLES else 1
    assert positions(tmp_path) == {LONDON: seen, PARIS: 1}
    # Until `publication.json` is replaced, the last publication is shown.
    assert is_published(tmp_path, LONDON) == (point in (Point.WRITTEN_TABLES, Point.PUBLISHED_TABLES))
    assert is_published(tmp_path, PARIS) == (point != Point.PUBLISHING_TABLES)
    for number in range(3, 6):
        publish(tmp_path, LONDON, number)
    assert positions(tmp_path) == {LONDON: 5, PARIS: 1}
    assert len(files(tmp_path, LONDON)) <= _PUBLICATIONS * len(files(tmp_path, PARIS))


def test_publication_that_another_site_indexed_is_not_indexed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, LONDON, 1)

    def publish_meanwhile(reached: Point) -> None:
        if reached == Point.NOTED_TABLES:
            crash_points.hook = None
            publish(tmp_path, PARIS, 1)

    monkeypatch.setattr(crash_points, "hook", publish_meanwhile)
    publish(tmp_path, LONDON, 2)
    assert positions(tmp_path) == {LONDON: 2, PARIS: 1}
    assert len(list((tmp_path / "published/earlier").iterdir())) == 1


@pytest.mark.parametrize("damage", ("truncated", "missing", "unreadable"))
def test_site_with_damaged_files_is_hidden_until_it_publishes(tmp_path: Path, damage: str) -> None:
    publish(tmp_path, PARIS, 1)
    publish(tmp_path, LONDON, 1)
    file = next(publication_folder(tmp_path, PARIS).glob("replication-*.parquet"))
    about = file.with_name("publication.json")
    match damage:
        case "truncated":
            file.write_bytes(b"")
        case "missing":
            file.unlink()
        case _:
            about.write_text("{")
    assert not is_published(tmp_path, PARIS)
    publish(tmp_path, LONDON, 2)
    assert positions(tmp_path) == {LONDON: 2}
    publish(tmp_path, PARIS, 2)
    assert positions(tmp_path) == {LONDON: 2, PARIS: 2}


def test_files_of_a_removed_site_are_deleted_without_readers(tmp_path: Path, without_grace: None) -> None:
    publish(tmp_path, PARIS, 1)
    publish(tmp_path, LONDON, 1)
    with duckdb.connect(str(tmp_path / "fleet.duckdb"), read_only=True) as reader:
        for number in range(2, 5):
            publish(tmp_path, LONDON, number, (LONDON,))
        assert reader.execute("SELECT count(*) FROM replication").fetchall() == [(2,)]
    assert positions(tmp_path) == {LONDON: 4}
    for number in range(5, 7):
        publish(tmp_path, LONDON, number, (LONDON,))
    assert not publication_folder(tmp_path, PARIS).exists()


def test_empty_removal_marker_is_rewritten(tmp_path: Path, without_grace: None) -> None:
    """A power failure may leave the marker empty; it dates the removal of a site."""
    publish(tmp_path, PARIS, 1)
    publish(tmp_path, LONDON, 1, (LONDON,))
    mark = publication_folder(tmp_path, PARIS) / "gone"
    mark.write_text("")
    for number in range(2, 6):
        publish(tmp_path, LONDON, number, (LONDON,))
        assert not mark.exists() or int(mark.read_text())
    assert not mark.parent.exists()
    assert positions(tmp_path) == {LONDON: 5}


@pytest.mark.parametrize("name", ("ü" * 40, "京" * 26, "a" * 200))
def test_longest_site_names_work_as_folders_and_in_the_queue(name: str, tmp_path: Path) -> None:
    assert read_site_name(name) == name
    with SiteState(tmp_path / "sites" / name) as state:
        with state.transaction():
            state.save_stream(StreamState(STREAM, 1, 7, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
        publish_again(tmp_path, name, state, (name,))
    assert positions(tmp_path) == {name: 7}
    enqueue_site(tmp_path, name, 10.0)
    assert queued_sites(tmp_path, 10.0) == [name]
    assert dequeue_site(tmp_path, name)
    # It would be too long as a file name.
    with pytest.raises(ValueError, match="cannot be a name"):
        read_site_name(f"{name}京")


@pytest.mark.parametrize("file_bytes", (1_000, 20_000, 100_000))
def test_publication_on_a_full_disk_keeps_the_previous_one(tmp_path: Path, file_bytes: int) -> None:
    """The disk is full at a table, at the list of history files, or at the published file."""
    publish(tmp_path, LONDON, 1)
    with opened_state(tmp_path, LONDON) as state:
        with state.transaction():
            state.connection.execute("UPDATE streams SET next_sequence = 2")
            state.connection.execute(
                "INSERT INTO snapshots SELECT ?, i, i, 'f' || i FROM range(4000) AS t (i)", [STREAM]
            )
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
        try:
            with pytest.raises(
                RunError, match=r"cannot be written \(.*(?i:file too large).*\); free some space"
            ) as raised:
                publish_again(tmp_path, LONDON, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert "\n" not in str(raised.value)
        assert positions(tmp_path) == {LONDON: 1}
        publish_again(tmp_path, LONDON, state)
    assert positions(tmp_path) == {LONDON: 2}
    assert not list(tmp_path.glob(".*"))
    assert not list(publication_folder(tmp_path, LONDON).glob(".*"))


def test_empty_site_publishes_every_table_without_rows(tmp_path: Path) -> None:
    with opened_state(tmp_path, LONDON) as state:
        publish_site(tmp_path, LONDON, state, [], sites=SITES, run=Run(NOW_NS, "run"))
    counts = count_rows(tmp_path)
    assert (counts.pop("snapshot_info"), counts.pop("site_leaders")) == (1, len(SITES))
    assert set(counts.values()) == {0}
    assert is_published(tmp_path, LONDON)


def edit_version(file: Path, version: int) -> None:
    """Change the schema version in a `publication.json`."""
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": version}))


def test_publication_of_other_schema_is_refused_and_kept(tmp_path: Path) -> None:
    publish(tmp_path, PARIS, 1)
    publish(tmp_path, LONDON, 1)
    record = publication_folder(tmp_path, PARIS) / "publication.json"
    edit_version(record, 5)
    assert not is_published(tmp_path, PARIS)
    publish(tmp_path, LONDON, 2)
    assert positions(tmp_path) == {LONDON: 2}
    before = record.read_bytes()
    with pytest.raises(
        RunError, match=rf"^{record}: schema 5 is of an unreleased version; move the home away, .*recover"
    ):
        publish(tmp_path, PARIS, 2)
    assert record.read_bytes() == before


@pytest.mark.parametrize(("version", "column"), ((5, "generation"), (1, "lineage")))
def test_fleet_file_of_other_schema_is_refused_and_kept(tmp_path: Path, version: int, column: str) -> None:
    file = tmp_path / "fleet.duckdb"
    with duckdb.connect(str(file)) as older:
        older.execute(f"CREATE TABLE snapshot_info (schema_version INTEGER, {column} VARCHAR)")
        older.execute("INSERT INTO snapshot_info VALUES (?, 'x')", [version])
    (tmp_path / "fleet.json").write_text(json.dumps({"generation": "generation", "home": str(tmp_path)}))
    before = file.read_bytes()
    for attempt in (lambda: positions(tmp_path), lambda: publish(tmp_path, LONDON, 1)):
        with pytest.raises(
            RunError, match=rf"^{file}: schema {version} is of an unreleased version; move the home away"
        ):
            attempt()
    assert not is_published(tmp_path, LONDON)
    assert file.read_bytes() == before


def test_missing_file_of_a_table_is_an_error_of_one_line(tmp_path: Path) -> None:
    publish(tmp_path, SITES[0], 2)
    for file in (tmp_path / "published").rglob("*.parquet"):
        file.unlink()
    line = r"fleet.duckdb cannot be read: IO Error: .*; the site's next run writes it again"
    with pytest.raises(RunError, match=line), open_fleet(tmp_path) as connection:
        connection.execute("FROM replication").fetchall()
