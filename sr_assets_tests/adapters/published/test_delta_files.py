"""Incremental tables: base file and delta files together hold the rows of the state."""

import random
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from sr_assets.adapters.published import manifest, site_publishing
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.publication import publication_folder, read_publication
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets_tests.published import NOW_NS

SITE = "centre"
STREAMS = [PublishedStream("FEED", None, tracked=False), PublishedStream("S", "T", tracked=True)]
#: Table → queries of its rows, published and in the state.
_ROWS = {
    "global_availability": (
        "SELECT node, epoch_us(received_at) * 1000 FROM global_availability",
        "SELECT node, received_ns FROM global_nodes",
    ),
    "global_advisories": ("SELECT event_id FROM global_advisories", "SELECT event_id FROM global_history"),
    "node_advisories": (
        "SELECT event_id, epoch_us(published_at) * 1000 FROM node_advisories",
        "SELECT event_id, published_ns FROM transitions",
    ),
    "last_seen_nodes": (
        """
        SELECT node, status, epoch_us(last_seen) * 1000, last_sequence, class FROM last_seen_nodes
        UNION ALL SELECT node, 'retired', epoch_us(last_seen) * 1000, NULL, class FROM retired_nodes
        """,
        "SELECT node, status, seen_ns, CASE WHEN status <> 'retired' THEN sequence END, class FROM nodes",
    ),
}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[SiteState]:
    with SiteState(tmp_path / "sites" / SITE) as opened:
        with opened.transaction():
            opened.save_stream(StreamState("FEED", 1, 1, watermark_ns=NOW_NS))
            opened.save_stream(StreamState("S", 1, 1, watermark_ns=NOW_NS))
        yield opened


class Centre:
    """A centre whose feed receives advisories, with its own transitions too; a step is a microsecond."""

    def __init__(self, home: Path, state: SiteState) -> None:
        self.home, self.state, self.now_ns, self.events = home, state, NOW_NS, 0

    def receive(self, first: int, after: int, *, late: bool = False) -> None:
        """Receive an advisory and a message of each numbered node; a `late` one has the time of earlier ones."""
        self.now_ns += 0 if late else 1000
        execute = self.state.connection.execute
        execute("DELETE FROM global_nodes WHERE node[2:]::INTEGER BETWEEN ? AND ? - 1", [first, after])
        execute(
            "INSERT INTO global_nodes BY NAME SELECT 'FEED' AS feed, 'EAST' AS replicator, '' AS name, 'S' AS stream,"
            " 'n' || i AS node, 1 AS transition, ? AS event_ns, 0 AS event_code, ? AS received_ns FROM range(?, ?) AS r (i)",
            [self.now_ns, self.now_ns, first, after],
        )
        for table, columns in (
            ("global_history", "'FEED' AS feed, 'EAST' AS replicator, '' AS name, 0 AS event_code, ? AS received_ns"),
            ("transitions", "true AS outbox, ? AS detected_ns"),
        ):
            execute(
                f"INSERT INTO {table} BY NAME SELECT {columns}, 'e' || (? + i) AS event_id, 'S' AS stream, 'n' AS node,"
                " ? AS event_ns FROM range(?) AS r (i)",
                [self.now_ns, self.events, self.now_ns, after - first],
            )
        self.events += after - first
        execute("DELETE FROM nodes WHERE node[2:]::INTEGER BETWEEN ? AND ? - 1", [first, after])
        execute(
            "INSERT INTO nodes BY NAME SELECT 'S' AS stream, 'n' || i AS node, $now AS first_seen_ns, $now AS seen_ns,"
            " $events AS sequence, 'up' AS status, $now AS status_since_ns, 0 AS times_retired, 1 AS transition"
            " FROM range($first, $after) AS r (i)",
            {"now": self.now_ns, "events": self.events, "first": first, "after": after},
        )

    def change(self, statement: str) -> None:
        """Execute a statement on the state."""
        self.state.connection.execute(statement.replace("$now_ns", str(self.now_ns)))

    def publish(self) -> dict[str, str]:
        """Publish, compare every table with the state, and return the base file of each table."""
        publish_site(self.home, SITE, self.state, STREAMS, sites=[SITE], run=Run(NOW_NS, "run"))
        with open_fleet(self.home) as fleet:
            for table, (published, stored) in _ROWS.items():
                assert sorted(fleet.execute(published).fetchall(), key=str) == sorted(
                    self.state.connection.execute(stored).fetchall(), key=str
                ), table
        publication = read_publication(publication_folder(self.home, SITE))
        assert publication is not None
        return {table: base.file for table, base in publication.earlier.items()}


@pytest.fixture
def centre(tmp_path: Path, state: SiteState, monkeypatch: pytest.MonkeyPatch) -> Centre:
    monkeypatch.setattr(site_publishing, "LARGE", 100)
    return Centre(tmp_path, state)


def test_few_changes_keep_the_base_file(centre: Centre) -> None:
    centre.receive(0, 99)
    assert centre.publish() == {}
    centre.receive(99, 200)
    earlier = centre.publish()
    assert earlier.keys() == _ROWS.keys()
    for first in (0, 50, 195):
        centre.receive(first, first + 10)
        assert centre.publish() == earlier
    assert centre.publish() == earlier


def test_base_file_is_rewritten_when_deltas_reach_its_size(centre: Centre) -> None:
    centre.receive(0, 200)
    files = [centre.publish()["global_availability"]]
    for number in range(12):
        centre.receive(10 * number, 10 * number + 10)
        files.append(centre.publish()["global_availability"])
    # The deltas wrote 10 + 20 + 30 + 40 + 50 rows; another 60 would reach the 200 of the base file.
    assert [files.count(file) for file in dict.fromkeys(files)] == [6, 6, 1]


@pytest.mark.parametrize(
    "change",
    (
        "DELETE FROM global_nodes WHERE node = 'n3'",
        "DELETE FROM global_nodes",
        "UPDATE global_nodes SET received_ns = received_ns - 1000 WHERE node = 'n3'",
        "DELETE FROM global_history WHERE event_id = 'e5'",
        "DELETE FROM transitions WHERE event_id IN ('e5', 'e150')",
        "UPDATE transitions SET published_ns = $now_ns WHERE event_id = 'e5'",
        "UPDATE transitions SET published_ns = $now_ns",
        "DELETE FROM nodes WHERE node = 'n3'",
        "UPDATE nodes SET class = 'web' WHERE node = 'n3'",
        "UPDATE nodes SET status = 'retired' WHERE node = 'n3'",
        "UPDATE nodes SET status = 'timeout', status_since_ns = seen_ns - 1 WHERE node = 'n3'",
    ),
)
def test_changed_or_deleted_base_row_rewrites_the_base_file(centre: Centre, change: str) -> None:
    centre.receive(0, 200)
    before = centre.publish()
    centre.receive(7, 9)
    assert centre.publish() == before
    centre.change(change)
    after = centre.publish()
    table = {"global_nodes": "global_availability", "global_history": "global_advisories", "nodes": "last_seen_nodes"}
    changed = next(name for name in ("global_nodes", "global_history", "transitions", "nodes") if name in change)
    of = table.get(changed, "node_advisories")
    assert after.get(of) != before[of]
    assert {name: file for name, file in after.items() if name != of} == {
        name: file for name, file in before.items() if name != of
    }


def test_retired_node_leaves_its_table_without_another_base_file(centre: Centre) -> None:
    centre.receive(0, 200)
    before = centre.publish()
    for node in ("n3", "n150", "n3"):
        centre.now_ns += 1000
        retired = "status = 'retired', retired_at_ns = $now_ns, status_since_ns = $now_ns"
        centre.change(f"UPDATE nodes SET {retired} WHERE node = '{node}'")
        assert centre.publish() == before
        # It returns, and another one that the base file does not have retires.
        centre.receive(3, 4)
        centre.receive(200, 201)
        centre.change(f"UPDATE nodes SET {retired} WHERE node = 'n200'")
        assert centre.publish() == before


def test_change_of_the_last_seconds_keeps_the_base_file(centre: Centre) -> None:
    """Of two streams, one may be read later; so the base file ends ten seconds before its newest row."""
    centre.receive(0, 200)
    centre.now_ns += 60_000_000_000
    centre.receive(200, 220)
    before = centre.publish()["last_seen_nodes"]
    centre.now_ns -= 9_000_000_000
    centre.receive(3, 5)
    assert centre.publish()["last_seen_nodes"] == before
    centre.now_ns -= 2_000_000_000
    centre.receive(5, 6)
    assert centre.publish()["last_seen_nodes"] != before


@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))))
def test_published_rows_equal_the_state_after_random_changes(centre: Centre, seed: int) -> None:
    chance = random.Random(seed)
    centre.receive(0, 150)
    for _ in range(25):
        for _ in range(chance.randrange(3)):
            first = chance.randrange(300)
            match chance.randrange(11):
                case 6:
                    centre.change(f"UPDATE global_nodes SET received_ns = $now_ns WHERE node < 'n{first}'")
                case 0:
                    centre.change(f"DELETE FROM global_nodes WHERE node = 'n{first}'")
                case 1:
                    centre.change(f"DELETE FROM global_history WHERE event_id = 'e{first}'")
                case 2:
                    centre.change(f"UPDATE transitions SET published_ns = $now_ns WHERE event_id = 'e{first}'")
                case 7 | 8:
                    centre.change(
                        f"UPDATE nodes SET status = 'retired', retired_at_ns = $now_ns, status_since_ns = $now_ns"
                        f" WHERE node = 'n{first}'"
                    )
                case 9:
                    centre.change(
                        f"UPDATE nodes SET status = 'timeout', status_since_ns = $now_ns - 500 WHERE node = 'n{first}'"
                    )
                case 10:
                    centre.change(f"DELETE FROM nodes WHERE status = 'retired' AND node > 'n{first}'")
                case kind:
                    centre.receive(first, first + chance.randrange(1, 30), late=kind == 5)
        centre.publish()


def test_damaged_base_file_is_rewritten(centre: Centre) -> None:
    centre.receive(0, 200)
    earlier = centre.publish()
    (publication_folder(centre.home, SITE) / earlier["global_availability"]).write_bytes(b"")
    assert centre.publish().items().isdisjoint(earlier.items())


def test_reader_keeps_its_base_file_over_many_publications(centre: Centre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_GRACE_SECONDS", 0.0)
    centre.receive(0, 200)
    earlier = centre.publish()
    with duckdb.connect() as reader:
        reader.execute(f"ATTACH '{centre.home / 'fleet.duckdb'}' AS fleet (READ_ONLY)")
        for number in range(4):
            centre.receive(number, number + 1)
            assert centre.publish() == earlier
        centre.change("DELETE FROM global_nodes WHERE node = 'n99'")
        for _ in range(4):
            assert centre.publish() != earlier
        assert reader.execute("SELECT count(*) FROM fleet.global_availability").fetchall() == [(200,)]
    for _ in range(2):
        centre.publish()
    assert not (publication_folder(centre.home, SITE) / earlier["global_availability"]).exists()
