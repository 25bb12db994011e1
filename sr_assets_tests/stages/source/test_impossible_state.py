"""Inconsistent or unreadable states: refused with a remedy, and left unchanged."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from sr_assets.adapters.state.schema import SCHEMA_VERSION
from sr_assets.automation.observing import find_work
from sr_assets.domain.advisories import PROTOCOL
from sr_assets.domain.errors import RunError
from sr_assets.stages.replication.recover import recover_stream
from sr_assets_tests.rig import SITE, Rig, Sent

SAMPLED = {"inspect_field": "sender", "inspect_duration": "10h"}


def state_file(rig: Rig) -> Path:
    return rig.home / "sites" / SITE / "state.duckdb"


def edit(file: Path, statement: str) -> None:
    with duckdb.connect(str(file)) as opened:
        opened.execute(statement)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def stream(rig: Rig) -> str:
    """A fully copied stream: three messages of three senders."""
    name = rig.make()
    rig.publish(name, [Sent(json.dumps({"sender": f"n{n}"}).encode()) for n in range(3)])
    rig.add(name, **SAMPLED)
    rig.drain()
    return name


def test_position_ahead_of_the_source_is_refused_until_recovery(rig: Rig, stream: str) -> None:
    edit(state_file(rig), "UPDATE streams SET next_sequence = 100")
    failure = rig.failure()
    assert "ends at 3, before 99, the last message read" in failure
    assert (
        f"the state was edited (then set the state aside and run `sr-assets recover --stream {SITE}/{stream}`"
        in failure
    )
    with duckdb.connect(str(state_file(rig)), read_only=True) as opened:
        columns = "next_sequence, copied_messages"
        rows = opened.execute(f"SELECT {columns} FROM streams JOIN copying USING (stream)").fetchall()
    assert rows == [(100, 3)]
    # The sensor does not report it as caught up: it requests runs at growing intervals, and each error is in the table.
    assert "ends at 3, before 99" in find_work(rig.settings(), SITE)[1]
    state_file(rig).rename(state_file(rig).with_suffix(".aside"))
    recover_stream(rig.settings(), rig.settings().streams[0])
    rig.publish(stream, [Sent(b'{"sender": "n3"}')])
    rig.drain()
    assert len(rig.copies(stream)) == 4


def test_recovered_transitions_continue_from_the_highest_announced(rig: Rig, stream: str) -> None:
    advisories = rig.make("ADVISORIES")
    rig.entries[0]["advisory"] = {"subject": f"{advisories}.%s.%v"}
    common = {"protocol": PROTOCOL, "replicator": SITE, "stream": stream, "timestamp": 1, "event": "timeout"}
    bodies = [
        common | {"name": name, "value": node, "transition": transition}
        for name, node, transition in ((SITE, "n0", 42), (SITE, "n0", 41), ("PARIS", "n1", 90), (SITE, "gone", 7))
    ]
    rig.publish(advisories, [Sent(json.dumps(body).encode(), "timeout.node") for body in bodies])
    state_file(rig).unlink()
    assert "which transitions were announced" not in recover_stream(rig.settings(), rig.settings().streams[0])
    with rig.open() as site:
        counters = site.state.connection.execute("SELECT node, transition FROM nodes ORDER BY node").fetchall()
    assert counters == [("gone", 7), ("n0", 42), ("n1", 1), ("n2", 1)]


def test_state_of_an_unknown_schema_is_refused_and_unchanged(rig: Rig, stream: str) -> None:
    later = SCHEMA_VERSION + 1
    edit(state_file(rig), f"UPDATE about SET schema_version = {later}; DROP TABLE gaps")
    before = digest(state_file(rig))
    with pytest.raises(RunError, match=rf"schema {later} is of an unreleased version; move the home away"):
        rig.run()
    with pytest.raises(RunError, match=f"schema {later} is of"):
        recover_stream(rig.settings(), rig.settings().streams[0])
    assert digest(state_file(rig)) == before


@pytest.mark.parametrize(
    "damaged",
    (
        lambda content: content[:5_000],
        lambda _: b"not a database" * 1_000,
        lambda _: b"",
        lambda content: content[:8_192] + bytes(len(content) - 8_192),
    ),
    ids=("truncated", "overwritten", "empty", "zero_filled"),
)
def test_corrupt_state_is_set_aside_only_by_recover(rig: Rig, stream: str, damaged: Callable[[bytes], bytes]) -> None:
    file = state_file(rig)
    file.write_bytes(damaged(file.read_bytes()))
    before = digest(file)
    for _ in range(2):
        with pytest.raises(RunError, match=r"cannot be read .*recover"):
            rig.run()
        assert digest(file) == before
    report = recover_stream(rig.settings(), rig.settings().streams[0])
    (aside,) = file.parent.glob("state.duckdb.broken-*")
    assert str(aside) in report
    assert digest(aside) == before
    rig.publish(stream, [Sent(b'{"sender": "n3"}')])
    rig.drain()
    assert len(rig.copies(stream)) == 4


def test_state_open_in_another_process_is_not_set_aside(rig: Rig, stream: str) -> None:
    script = f"import duckdb, sys; c = duckdb.connect({str(state_file(rig))!r}); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        with pytest.raises(RunError, match="cannot be opened"):
            rig.run()
        with pytest.raises(RunError, match="cannot be opened"):
            recover_stream(rig.settings(), rig.settings().streams[0])
    rig.drain()
    assert not list(state_file(rig).parent.glob("*broken*"))
