"""The `sr-assets` command on published tables and real servers: commands, formats, errors."""

import contextlib
import csv
import fcntl
import io
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from click.shell_completion import BashComplete
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published import history
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import CopyState, StreamState
from sr_assets.adapters.state.status_file import SiteStatus, StreamStatus, write_status
from sr_assets.adapters.state.store import SiteState
from sr_assets.cli.base import SECTIONS, cli, echo
from sr_assets.cli.render import json_line
from sr_assets.cli.warnings import _in_clear_text
from sr_assets.domain.durations import duration
from sr_assets.settings import parse_cluster
from sr_assets_tests.exposed import configured
from sr_assets_tests.forks import Forked, run_forked
from sr_assets_tests.rig import PATIENCE_SECONDS, Command
from sr_assets_tests.servers import NatsServer

SECOND_NS = 1_000_000_000
#: The source's clock in all these tables: 2026-01-31T12:00:00Z.
NOW_NS = 1_769_860_800 * SECOND_NS
MINUTE_NS = 60 * SECOND_NS


def configuration(home: Path, source: str = "nats://127.0.0.1:1", target: str = "nats://127.0.0.1:2") -> str:
    return f"""
name: US-EAST
state_store: {home}
streams:
  - name: london
    stream: REG
    source_url: {source}
    target_url: {target}
    target_stream: LONDON_REG
    target_subject_prefix: london
    inspect_field: sender
    inspect_duration: 1h
    advisory: {{subject: adv.%s.%v, reliable: true}}
  - name: paris
    stream: PLAIN
    source_url: {source}
    target_url: {target}
    target_subject_prefix: paris
"""


def write_configuration(folder: Path, text: str) -> Path:
    file = folder / "replication.yaml"
    file.write_text(text)
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configured, empty home."""
    home = tmp_path / "home"
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(write_configuration(tmp_path, configuration(home))))
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "250")
    return home


def node_row(node: str, status: str, silent_ns: int) -> dict[str, Any]:
    seen_ns, retired = NOW_NS - silent_ns, status == "retired"
    return {
        "node": node,
        "first_seen_ns": NOW_NS - 90 * MINUTE_NS,
        "seen_ns": seen_ns,
        "sequence": 7,
        "copied_ns": None if retired else seen_ns,
        "copied_bytes": None if retired else 900,
        "status": status,
        "status_since_ns": seen_ns,
        "retired_at_ns": seen_ns + 60 * MINUTE_NS if retired else None,
        "times_retired": int(retired),
        "transition": 1,
        "deadline_ns": None,
    }


def transition_row(node: str, event: str, event_ns: int, number: int) -> dict[str, Any]:
    return {
        "event_id": f"{node}-{number}",
        "stream": "REG",
        "node": node,
        "event": event,
        "event_ns": event_ns,
        "detected_ns": event_ns + SECOND_NS,
        "seen_ns": event_ns,
        "age_ns": 0,
        "sequence": 7,
        "previous": None,
        "transition": number,
        "late": False,
        "returned": False,
        "outage_ns": None,
        "published_ns": None,
        "outbox": True,
    }


def publish(
    home: Path, nodes: list[dict[str, Any]], transitions: list[dict[str, Any]], files: tuple[Path, ...] = ()
) -> None:
    with SiteState(home / "sites" / "london") as state:
        with state.transaction():
            state.save_stream(StreamState("REG", 1, 8, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
            state.save_copying(CopyState("REG", copied_messages=3))
            state.nodes("REG").merge(pa.Table.from_pylist(nodes))
            if transitions:
                state.add_rows("transitions", pa.Table.from_pylist(transitions))
        if files:
            state.snapshot_index("REG").add(1, 8, [*map(describe, files)])
        streams = [PublishedStream("REG", "LONDON_REG", tracked=True)]
        publish_site(home, "london", state, streams, sites=["london", "paris"], run=Run(NOW_NS, "run"))


@pytest.fixture(scope="module")
def published_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A home with published tables, and a copy that a test cannot change."""
    home = tmp_path_factory.mktemp("published") / "home"
    day = history.stream_folder(home, "london", "REG") / "date=2026-01-31"
    day.mkdir(parents=True)
    message = {
        "node": "web1.example.net",
        "sequence": 7,
        "stored_at": datetime(2026, 1, 31, 11, 59, tzinfo=UTC),
        "subject": "reg.web1.example.net",
        "payload_bytes": 900,
        "payload": '{"sender":"web1.example.net"}',
        "metadata": '{"facts":{"os":"debian"}}',
    }
    parquet.write_table(pa.Table.from_pylist([message], schema=history.SCHEMA), day / "1-8.parquet")
    nodes = [
        node_row("web1.example.net", "up", MINUTE_NS),
        node_row("web2.example.net", "timeout", 40 * MINUTE_NS),
        node_row("db1.example.net", "up", 0),
        node_row("old1.example.net", "retired", 80 * MINUTE_NS),
    ]
    transitions = [
        transition_row("web1.example.net", "new", NOW_NS - 90 * MINUTE_NS, 1),
        transition_row("web2.example.net", "timeout", NOW_NS - 10 * MINUTE_NS, 2),
        transition_row("web1.example.net", "recover", NOW_NS - MINUTE_NS, 3),
    ]
    publish(home, nodes, transitions, (day / "1-8.parquet",))
    kept = shutil.copytree(home, home.with_name("kept"), symlinks=True)
    return home, kept


@pytest.fixture
def published(home: Path, published_once: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four nodes: two up, one timed out, one retired; three transitions; one message."""
    home, kept = published_once
    shutil.rmtree(home)
    shutil.copytree(kept, home, symlinks=True)
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(write_configuration(home.parent, configuration(home))))
    return home


def names(output: str) -> list[str]:
    return [row["node"] for row in json.loads(output)]


# ---------------------------------------------------------------------------------------------------------- the shell


@pytest.mark.process
def test_help_lists_every_command_without_heavy_imports() -> None:
    shown = subprocess.run([sys.executable, "-m", "sr_assets", "--help"], capture_output=True, text=True, check=True)
    for name in (
        "demo",
        "up",
        "run",
        "check",
        "nodes",
        "node",
        "advisories",
        "lag",
        "pause",
        "resume",
        "recover",
        "forget",
        "export",
        "query",
        "emulate",
        "spark",
    ):
        assert re.search(rf"^  {name} ", shown.stdout, re.MULTILINE)
    heavy = "{'dagster', 'pyspark', 'duckdb', 'pydantic', 'nats', 'numpy', 'pyarrow'}"
    loaded = f"import sys, sr_assets.cli; print(*{heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.process
def test_output_that_cannot_be_written_fails() -> None:
    """The last part of a long output is written when the command ends."""
    program = (
        "import sys; from sr_assets.cli import base; base.run_command = lambda _: sys.stdout.write('row'); base.main()"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], check=False, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered
        )
    assert (ended.returncode, ended.stderr) == (1, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    (
        ("nonsense",),
        ("nodes", "--status", "dead"),
        ("nodes", "--silent-for", "soon"),
        ("availability", "--since", "9999999999999999999"),
        ("nodes", "--site", "lundon"),
        ("nodes", "--stream", "NOPE"),
        ("run", "--once", "--follow"),
        ("run", "--stream", "NOPE"),
        ("recover", "--stream", "NOPE"),
        ("recover", "--stream", "NOPE", "--force"),
        ("forget",),
        ("forget", "--site", "lundon"),
        ("forget", "--stream", "REG"),
        ("pause", "--stream", "NOPE"),
        ("resume", "--stream", "NOPE"),
        ("pause",),
        ("emulate", "--url", "nats://127.0.0.1:1", "--nodes", "1", "--churn", "much"),
        ("query", "SELEC 1"),
        ("up", "--port", "0"),
    ),
)
def test_usage_error_is_one_line_with_exit_code_2(
    published: Path, command: Command, arguments: tuple[str, ...]
) -> None:
    code, output, errors = command(*arguments)
    assert code == 2
    assert not output
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


@pytest.mark.process
def test_invalid_configuration_ends_process_with_exit_code_2(tmp_path: Path) -> None:
    file = write_configuration(
        tmp_path, "name: A\nstreams: [{stream: S, source_url: 'nats://u:secret@h', nonsense: 1}]\n"
    )
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(file)}
    ended = run_forked([sys.executable, "-m", "sr_assets", "run", "--once"], env=environ)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {file}: stream 'S': unknown key 'nonsense'")
    assert ended.stderr.count("\n") == 1
    assert "secret" not in ended.stdout + ended.stderr


@pytest.mark.parametrize("position", (0, 1, 2, 3))
def test_config_option_overrides_environment_anywhere(
    tmp_path: Path, home: Path, command: Command, position: int
) -> None:
    words = ["data", "get", "SOURCE/KEY"]
    words[position:position] = ["--config", str(tmp_path / "other.yaml")]
    code, _, errors = command(*words)
    assert code == 2
    assert "other.yaml: cannot be read" in errors


@pytest.mark.parametrize("group", ((), ("data",), ("topology",), ("maintenance",), ("spark",)))
def test_group_without_arguments_prints_its_help(command: Command, group: tuple[str, ...]) -> None:
    code, output, errors = command(*group)
    assert (code, errors) == (0, "")
    assert output.startswith("Usage: ")
    assert re.search(r"^(Commands|Nodes):$", output, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments", (("nodes",), ("node", "a"), ("advisories",), ("query", "SELECT 1"), ("export", "x.duckdb"))
)
def test_reading_command_fails_before_first_publication(
    home: Path, command: Command, arguments: tuple[str, ...]
) -> None:
    code, _, errors = command(*arguments)
    assert code == 1
    assert errors.startswith("error: nothing is published yet")


def test_damaged_fleet_file_is_one_error_line(home: Path, command: Command) -> None:
    home.mkdir()
    (home / "fleet.duckdb").write_text("not a database " * 1000)
    code, _, errors = command("nodes")
    assert code == 1
    assert errors.count("\n") == 1
    assert "cannot be opened" in errors


@pytest.mark.process
def test_fleet_file_open_for_writing_names_the_process(published: Path, command: Command) -> None:
    hold = "import duckdb, sys; held = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    holding = [sys.executable, "-c", hold, str(published / "fleet.duckdb")]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        code, _, errors = command("nodes")
        process.communicate()
    assert code == 1
    assert errors.count("\n") == 1
    assert f"(PID {process.pid}) has it open for writing" in errors
    assert "-readonly" in errors
    assert "delete" not in errors


# ---------------------------------------------------------------------------------------------------------- the nodes


def test_nodes_lists_all_with_age_by_watermark(published: Path, command: Command) -> None:
    code, output, _ = command("nodes", "--format", "json")
    assert code == 0
    rows = {row["node"]: row for row in json.loads(output)}
    assert list(rows) == sorted(rows)
    assert {node: row["status"] for node, row in rows.items()} == {
        "web1.example.net": "up",
        "web2.example.net": "timeout",
        "db1.example.net": "up",
        "old1.example.net": "retired",
    }
    web = rows["web1.example.net"]
    assert (web["name"], web["stream"], web["age_seconds"], web["last_seen"]) == (
        "london",
        "REG",
        60.0,
        "2026-01-31T11:59:00Z",
    )
    assert rows["old1.example.net"]["last_copied"] is None


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        (("--status", "timeout"), ["web2.example.net"]),
        (("--silent-for", "30m"), ["old1.example.net", "web2.example.net"]),
        (("--silent-for", "60"), ["old1.example.net", "web1.example.net", "web2.example.net"]),
        (("--like", "web*"), ["web1.example.net", "web2.example.net"]),
        (("--site", "paris"), []),
        (("--site", "london", "--stream", "REG", "--like", "db*"), ["db1.example.net"]),
        (("--stream", "london/REG", "--status", "retired"), ["old1.example.net"]),
        (("--like", "' OR 1=1"), []),
    ),
)
def test_nodes_filters(published: Path, command: Command, options: tuple[str, ...], expected: list[str]) -> None:
    assert names(command("nodes", "--format", "json", *options)[1]) == expected


def test_nodes_prints_csv_header_and_uncut_table_in_pipe(published: Path, command: Command) -> None:
    rows = list(csv.DictReader(io.StringIO(command("nodes", "--format", "csv")[1])))
    assert [row["node"] for row in rows][:1] == ["db1.example.net"]
    assert rows[0]["last_seen"] == "2026-01-31T12:00:00Z"
    table = command("nodes")[1]
    assert "\x1b" not in table
    line = next(line for line in table.splitlines() if "web2.example.net" in line)
    assert "timeout" in line
    assert "40m" in line


@pytest.mark.parametrize("arguments", (("nodes",), ("advisories",), ("node", "web1.example.net")))
def test_table_prints_age_and_warns_of_old_watermark(
    published: Path, command: Command, arguments: tuple[str, ...]
) -> None:
    code, output, errors = command(*arguments)
    assert code == 0
    assert re.search(r"^as of 2026-01-31 12:00:00 UTC, \d+d(\d+[hms])? old$", output, re.MULTILINE)
    assert errors.startswith("warning: london/REG: its watermark is 2026-01-31 12:00:00 UTC, ")
    assert errors.count("\n") == 1
    assert command(*arguments, "--format", "json")[2] == ""


def test_check_warns_for_a_day_if_most_nodes_recover(home: Path, command: Command) -> None:
    def warned(ago_ns: int) -> bool:
        number = ago_ns // SECOND_NS + 2
        publish(home, [node_row("web1", "up", 0)], [transition_row("web1", "recover", NOW_NS - ago_ns, number)])
        return "most nodes time out and recover" in command("check")[2]

    assert not warned(25 * 60 * MINUTE_NS)
    assert warned(60 * MINUTE_NS)


def test_table_escapes_terminal_control_characters(home: Path, command: Command) -> None:
    publish(home, [node_row("evil\x1b[2J[red]\n", "up", 0)], [])
    table = command("nodes")[1]
    assert "\x1b" not in table
    assert r"evil\x1b[2J[red]\n" in table
    assert names(command("nodes", "--format", "json")[1]) == ["evil\x1b[2J[red]\n"]


def test_node_shows_state_history_and_metadata(published: Path, command: Command) -> None:
    code, output, _ = command("node", "web1.example.net", "--format", "json")
    (node,) = json.loads(output)
    assert code == 0
    assert (node["name"], node["status"], node["age_seconds"]) == ("london", "up", 60.0)
    assert [event["event"] for event in node["history"]] == ["new", "recover"]
    assert node["metadata"] == {"facts": {"os": "debian"}}
    table = command("node", "web1.example.net")[1]
    assert "recover" in table
    assert '"os": "debian"' in table


def test_unknown_node_fails_with_similar_names(published: Path, command: Command) -> None:
    code, output, errors = command("node", "web1.exmaple.net")
    assert (code, output) == (3, "")
    assert errors.startswith("error: node 'web1.exmaple.net' is unknown; did you mean 'web1.example.net'")
    assert command("node", "zzz")[2] == "error: node 'zzz' is unknown\n"


def test_nodes_fails_if_no_node_matches_and_a_script_wants_that(published: Path, command: Command) -> None:
    for form in ("table", "csv"):
        assert command("nodes", "--like", "zzz*", "-o", form)[0] == 0
        assert command("nodes", "--like", "zzz*", "-o", form, "--fail-empty")[0] == 3
        assert command("nodes", "--fail-empty", "-o", form)[0] == 0


def test_repeated_export_since_a_duration_writes_nothing(published: Path, command: Command, tmp_path: Path) -> None:
    words = ("export", str(tmp_path / "copies"), "--format", "parquet", "--since", "30d")
    assert " 0 unchanged" in command(*words)[1]
    assert " 0 files written, " in command(*words)[1]
    assert "use RFC 3339" in command(*words[:-1], "30x")[2]


def test_help_lists_every_command_once_with_a_whole_sentence(command: Command) -> None:
    listed = [name for names in SECTIONS.values() for name in names.split()]
    assert sorted(listed) == sorted(cli.commands)
    assert "..." not in command("--help")[1].partition("Options:")[2]


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    (
        (["pause", "--stream"], "R", ["REG"]),
        (["pause", "--stream"], "lon", ["london/REG"]),
        (["nodes", "--site"], "", ["london", "paris"]),
        (["node"], "web1", ["web1.example.net"]),
        (["export", "x", "--tables"], "gaps,retired", ["gaps,retired_nodes"]),
        (["--config", "none.yaml", "nodes", "--site"], "", []),
    ),
)
def test_shell_completes_the_names_of_this_installation(
    published: Path, words: list[str], incomplete: str, expected: list[str]
) -> None:
    shell = BashComplete(cli, {}, "sr-assets", "_SR_ASSETS_COMPLETE")
    assert [item.value for item in shell.get_completions(words, incomplete)] == expected


def test_node_without_parquet_file_is_shown_without_metadata(published: Path, command: Command) -> None:
    next(published.rglob("1-8.parquet")).unlink()
    code, output, errors = command("node", "web1.example.net", "--format", "json")
    assert code == 0
    assert json.loads(output)[0]["metadata"] is None
    assert errors.startswith("warning: no metadata")


# ----------------------------------------------------------------------------------------------------- the advisories


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        ((), ["new", "timeout", "recover"]),
        (("--since", "1h"), ["timeout", "recover"]),
        (("--node", "web2.example.net"), ["timeout"]),
        (("--event", "recover"), ["recover"]),
    ),
)
def test_advisories_are_ordered_by_time(
    published: Path, command: Command, options: tuple[str, ...], expected: list[str]
) -> None:
    code, output, _ = command("advisories", "--format", "json", *options)
    assert code == 0
    assert [row["event"] for row in json.loads(output)] == expected


@pytest.mark.process
def test_follow_prints_each_row_once_across_publications(published: Path) -> None:
    following = Forked(
        [sys.executable, "-m", "sr_assets", "advisories", "--follow", "--since", "1d", "--format", "json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert following.stdout is not None
        first = [json.loads(following.stdout.readline())["event_id"] for _ in range(3)]
        assert first == ["web1.example.net-1", "web2.example.net-2", "web1.example.net-3"]
        publish(published, [node_row("new1", "up", 0)], [transition_row("new1", "new", NOW_NS, 4)])
        assert json.loads(following.stdout.readline())["event_id"] == "new1-4"
    finally:
        following.kill()
        following.communicate()


@pytest.mark.process
@pytest.mark.parametrize("form", ("table", "csv"))
def test_follow_starts_now_with_header(published: Path, form: str) -> None:
    following = Forked(
        [sys.executable, "-m", "sr_assets", "advisories", "--follow", "--format", form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    assert re.split(r"[ ,_]+", following.stdout.readline())[:3] == ["event", "time", "name"]
    publish(published, [node_row("new1", "up", 0)], [transition_row("new1", "new", NOW_NS, 4)])
    assert "new1" in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    assert following.communicate() == ("", "")
    assert following.returncode == 130


# ---------------------------------------------------------------------------------------------------------- the window


def in_a_window(columns: int, *arguments: str, **environ: str) -> list[str]:
    """Return a command's output lines on a terminal with this many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    with Forked(
        [sys.executable, "-m", "sr_assets", *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**inherited, "TERM": "xterm", **environ},
    ):
        os.close(theirs)
        shown = b""
        # Reading an empty terminal whose other end is closed raises OSError.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                shown += part
    os.close(ours)
    return shown.decode().splitlines()


@pytest.mark.process
def test_row_is_one_line_within_window_width(published: Path) -> None:
    long = "db1." + "very-long-label." * 8 + "example.net"
    publish(published, [node_row(long, "up", 0)], [transition_row(long, "new", NOW_NS, 1)])
    for columns in (120, 60, 25):
        for command, rows in (("nodes", 5), ("advisories", 4)):
            lines = in_a_window(columns, command, NO_COLOR="1")
            assert max(map(len, lines)) <= columns, lines
            assert sum(".ex" in line or "very" in line for line in lines) == rows
            assert "--wide" in " ".join(lines)
    wide = in_a_window(60, "nodes", "--wide", NO_COLOR="1")
    assert max(map(len, wide)) <= 60
    assert sum(line.startswith("last copied ") for line in wide) == 5
    assert not any("\x1b" in line for line in wide)
    assert any("\x1b[32mup" in line for line in in_a_window(120, "nodes"))


@pytest.mark.process
def test_pipe_receives_every_column_at_full_width(published: Path) -> None:
    environ = {**os.environ, "COLUMNS": "40"}
    piped = run_forked([sys.executable, "-m", "sr_assets", "nodes"], env=environ).stdout
    assert "last sequence" in piped
    assert "web2.example.net" in piped
    assert "\x1b" not in piped


# ----------------------------------------------------------------------------------------------------------------- SQL


def test_query_prints_each_format_with_decoded_json(published: Path, command: Command) -> None:
    sql = "SELECT node, metadata, stored_at, payload_bytes FROM node_snapshots"
    (row,) = json.loads(command("query", sql, "--format", "json")[1])
    assert row == {
        "node": "web1.example.net",
        "metadata": {"facts": {"os": "debian"}},
        "stored_at": "2026-01-31T11:59:00Z",
        "payload_bytes": 900,
    }
    assert command("query", "SELECT 1 AS a, NULL AS b, true AS c", "--format", "csv")[1] == "a,b,c\n1,,true\n"
    assert "last_seen_nodes" in command("query", "SHOW TABLES")[1]
    assert json.loads(command("query", "SELECT 1 AS a, 2 AS a", "--format", "json")[1]) == [{"a": 1, "a_1": 2}]
    plain = "SELECT 'NaN'::DOUBLE AS n, 'x'::BLOB AS b, 1.5::DECIMAL(4, 2) AS d, [DATE '2026-01-31'] AS l"
    assert json.loads(command("query", plain, "--format", "json")[1]) == [
        {"n": None, "b": "eA==", "d": 1.5, "l": ["2026-01-31"]}
    ]
    # DuckDB would draw its progress bar among the rows of a query that takes two seconds.
    assert (
        command("query", "SELECT current_setting('enable_progress_bar') AS bar", "--format", "csv")[1] == "bar\nfalse\n"
    )


@pytest.mark.parametrize(
    "sql",
    (
        "COPY (SELECT 1) TO '{home}/snapshots/x.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{home}/snapshots/x.csv'",
        "COPY (PIVOT gaps ON reason USING count(*)) TO '{home}/snapshots/x.csv'",
        "EXPORT DATABASE '{home}/snapshots/x'",
        "ATTACH '{home}/snapshots/x.duckdb'",
        "ATTACH '{home}/sites/london/state.duckdb'",
        "SELECT * FROM read_text('{home}/snapshots/../sites/london/lock')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_csv('http://127.0.0.1:1/x')",
        "SELECT 1; SELECT 2",
        "SET memory_limit = '1GB'",
        "CREATE TEMP TABLE x AS SELECT 1",
        "DELETE FROM gaps",
        "INSTALL httpfs",
        "SELECT * FROM settings",
        "",
    ),
)
def test_query_refuses_access_beyond_published_tables(published: Path, command: Command, sql: str) -> None:
    files = sorted(published.rglob("*"))
    code, output, errors = command("query", sql.format(home=published))
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert sorted(published.rglob("*")) == files


#: Yields 20,000 rows, then none for hours. A single pipeline, because DuckDB may start with either of two.
ENDLESS = "SELECT i FROM range(100_000_000_000_000) AS t(i) WHERE i < 20_000"


def test_query_stops_at_timeout_while_printing_rows(published: Path, command: Command) -> None:
    code, output, errors = command("query", ENDLESS, "--timeout", "8s", "--format", "csv")
    assert code == 1
    assert output.startswith("i\n0\n1\n")
    assert errors == "error: the query took longer than 8 s; narrow it, or allow more with --timeout\n"


@pytest.mark.parametrize("sql", ("SELECT list(i) FROM range(100_000_000) AS t(i)", "SELECT range(1_000_000_000)"))
def test_query_fails_above_memory_limit(published: Path, command: Command, sql: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    code, output, errors = command("query", sql)
    assert (code, output) == (1, "")
    assert errors.startswith("error: the query needs more than 1GiB of memory; ")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert not list(published.glob("*.tmp"))


@pytest.mark.process
def test_ctrl_c_ends_query_with_one_line(published: Path) -> None:
    arguments = Forked(
        [sys.executable, "-m", "sr_assets", "query", ENDLESS, "--format", "csv"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert arguments.stdout is not None
    assert arguments.stdout.readline() == "i\n"
    arguments.send_signal(signal.SIGINT)
    assert arguments.communicate(timeout=PATIENCE_SECONDS)[1] == "error: interrupted\n"
    assert arguments.returncode == 130


def test_long_table_is_printed_in_blocks(published: Path, command: Command) -> None:
    lines = command("query", "SELECT i FROM range(10_001) AS t(i)")[1].split()
    assert [line for line in lines if line.isalnum()] == ["i", *map(str, range(10_000)), "i", "10000"]


def test_csv_neutralises_formulas_and_keeps_rows(home: Path, command: Command) -> None:
    nodes = (
        "=1+1",
        "+1",
        "-1",
        "@SUM(1)",
        "\uff1d1",
        "\r\n=1",
        "\tx",
        "a\rb",
        "a\nb",
        "\x1b[2J\x00\x9b",
        "o'k=1",
        "\u202egnp",
    )
    publish(home, [node_row(node, "up", 0) for node in nodes], [])
    shown = (
        "'=1+1",
        "'+1",
        "'-1",
        "'@SUM(1)",
        "'\uff1d1",
        "'\r\n=1",
        r"\tx",
        "a\rb",
        "a\nb",
        r"\x1b[2J\x00\x9b",
        "o'k=1",
        r"\u202egnp",
    )
    output = command("nodes", "--format", "csv")[1]
    rows = list(csv.DictReader(io.StringIO(output, newline="")))
    assert sorted(row["node"] for row in rows) == sorted(shown)
    assert '"a\rb"' in output
    assert command("query", 'SELECT -1 AS "=a", -0.5 AS b', "--format", "csv")[1] == "'=a,b\n-1,-0.5\n"


@given(st.text())
def test_json_line_has_any_text_unchanged_and_controls_no_terminal(text: str) -> None:
    line = json_line({"node": text})
    assert json.loads(line) == {"node": text}
    assert not set(line) & {chr(letter) for letter in (*range(32), *range(0x7F, 0xA0), 0x200E, *range(0x2028, 0x202F))}


@given(st.text(st.characters(categories=("Cc", "Cf", "Zl", "Zp", "L")), min_size=1))
def test_line_of_a_command_is_one_line_and_controls_no_terminal(text: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        echo(f"ops/key: {text}")
    (line,) = shown.getvalue().split("\n")[:-1]
    assert line.isprintable()


def test_query_works_with_symlinked_home(
    published: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(published)
    monkeypatch.setenv("SR_ASSETS_HOME", str(tmp_path / "link"))
    assert json.loads(command("query", "SELECT count(*) AS n FROM node_snapshots", "--format", "json")[1]) == [{"n": 1}]


def test_export_is_self_contained_and_refuses_overwrite(published: Path, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "copy.duckdb"
    assert command("export", str(file))[0] == 0
    next(published.rglob("1-8.parquet")).unlink()
    with duckdb.connect(str(file), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM node_snapshots").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM node_availability").fetchone() == (4,)
    again = command("export", str(file))
    assert again[0] == 1
    assert "exists" in again[2]
    assert command("export", str(tmp_path / "none" / "copy.duckdb"))[0] == 1
    assert [path.name for path in tmp_path.glob("*copy*")] == ["copy.duckdb"]


# --------------------------------------------------------------------------------------------------------- the servers


@pytest.fixture
def connected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nats_pair: tuple[NatsServer, NatsServer],
    unique: Callable[[str], str],
) -> Iterator[tuple[str, Cluster, Cluster]]:
    """A configuration between two real servers, with two source messages; yields (stream, source, target)."""
    source, target = nats_pair
    stream = unique("REG")
    text = (
        configuration(tmp_path / "home", source.url, target.url).replace("REG", stream).replace("adv.", f"adv{stream}.")
    )
    text = text[: text.index("  - name: paris")]
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(write_configuration(tmp_path, text)))
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    with Cluster(parse_cluster(source.url)) as here, Cluster(parse_cluster(target.url)) as there:
        here.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
        here.publish_many([(f"{stream}.a", b"{}", "1"), (f"{stream}.b", b"{}", "2")])
        yield stream, here, there


def test_check_prints_planned_work(home: Path, command: Command) -> None:
    code, output, _ = command("check", "--format", "json")
    assert code == 0
    london, paris = json.loads(output)
    assert london["to"] == "127.0.0.1:2 LONDON_REG"
    assert london["sampling"] == "by sender every 1h, silent after 30m"
    assert paris["sampling"] is None
    assert not home.exists()


def test_login_that_leaves_the_machine_unencrypted_is_a_warning(tmp_path: Path) -> None:
    entry = {"name": "london", "stream": "REG", "target_url": "nats://u:s3cret@127.0.0.1:4222"}
    sources = (
        "nats://u:s3cret@10.0.0.1",
        "tok3n@hub.example.net",
        "tls://u:s3cret@10.0.0.2",
        "nats://10.0.0.3?nkey=/etc/key",
        "nats://u:s3cret@nats.internal",
    )
    settings = configured(
        tmp_path,
        data={"ops": {"type": "consul", "url": "http://10.0.0.4:8500", "token": "tok3n", "prefix": "x"}},
        notify=[{"webhook": "http://chat.example.net/s3cret"}, {"webhook": "https://chat.example.net/s3cret"}],
        streams=[{**entry, "stream": f"REG{n}", "source_url": url} for n, url in enumerate(sources)],
        clear_text_hosts=["*.internal"],
    )
    lines = list(_in_clear_text(settings))
    assert [line.partition(": its")[0] for line in lines] == [
        "10.0.0.1:4222",
        "hub.example.net:4222",
        "data source ops",
        "notify 1 (webhook chat.example.net)",
    ]
    assert not any(secret in line for line in lines for secret in ("s3cret", "tok3n"))


def test_check_connect_tests_all_connections_without_changes(
    connected: tuple[str, Cluster, Cluster], command: Command
) -> None:
    stream, source, target = connected
    source.create_stream({"name": f"ADV_{stream}", "subjects": [f"adv{stream}.>"]})
    source.publish_many([(f"{stream}.{number}", b'{"sender": "web1"}', f"s{number}") for number in range(2)])
    before = source.stream_info(stream)
    code, output, errors = command("check", "--connect", "--format", "json")
    probes = json.loads(output)
    assert (code, errors) == (0, "")
    assert {probe["result"] for probe in probes} == {"ok"}
    tried = " ".join(probe["tried"] for probe in probes)
    for permission in (
        "STREAM.INFO",
        "MSG.GET",
        "DIRECT.GET",
        "CONSUMER.CREATE",
        "STREAM.CREATE",
        "STREAM.NAMES",
        f"publish adv{stream}",
    ):
        assert permission in tried
    assert not target.stream_exists(f"LONDON_{stream}")
    after = source.stream_info(stream)
    assert (after.config, after.messages, after.last_sequence) == (before.config, before.messages, before.last_sequence)
    assert source.stream_info(f"ADV_{stream}").messages == 0
    target.create_stream({"name": f"LONDON_{stream}", "subjects": [f"london.{stream}.>"]})
    assert command("check", "--connect")[0] == 0
    assert target.stream_info(f"LONDON_{stream}").messages == 0


def test_check_connect_reports_failures(connected: tuple[str, Cluster, Cluster], command: Command) -> None:
    stream, _, target = connected
    target.create_stream({"name": f"LONDON_{stream}", "subjects": [f"elsewhere.{stream}.>"]})
    code, _, errors = command("check", "--connect")
    assert code == 1
    assert f"target stream LONDON_{stream} takes elsewhere.{stream}.>" in errors
    assert f"no stream takes adv{stream}.new.sr-assets-check" in errors
    assert all(line.startswith(f"error: london/{stream}: ") for line in errors.splitlines())


def test_check_connect_counts_messages_with_sender(connected: tuple[str, Cluster, Cluster], command: Command) -> None:
    stream, source, _ = connected

    def sender_probe() -> tuple[str, str]:
        probes = json.loads(command("check", "--connect", "--format", "json")[1])
        (probe,) = (probe for probe in probes if probe["tried"] == "a sender in each message")
        return probe["result"], probe["learned"]

    result, learned = sender_probe()
    assert result == "failed"
    assert learned.startswith("0 of the newest 2 messages have one; correct inspect_field (sender), ")
    source.publish_many([(f"{stream}.{number}", b'{"sender": "web1"}', f"s{number}") for number in range(3)])
    assert sender_probe() == ("ok", "3 of the newest 5 messages have one, such as web1")


@pytest.mark.process
def test_check_connect_names_missing_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    permissions = '{publish: {deny: ["$JS.API.CONSUMER.>", "london.>"]}}'
    users = f"{{user: u, password: secret, permissions: {permissions}}}, {{user: a, password: a}}"
    denied = f"authorization {{ users = [{users}] }}"
    with NatsServer(tmp_path / "nats", "guarded", config=denied) as server:
        with Cluster(parse_cluster(f"nats://a:a@{server.address}")) as cluster:
            cluster.create_stream({"name": "REG", "subjects": ["reg.>"], "allow_direct": True})
            cluster.create_stream({"name": "LONDON_REG", "subjects": ["london.reg.>"], "allow_direct": True})
            cluster.create_stream({"name": "ADV", "subjects": ["adv.>"]})
        url = f"nats://u:secret@{server.address}"
        text = configuration(tmp_path / "home", url, url)
        file = write_configuration(tmp_path, text[: text.index("  - name: paris")])
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
        code, output, errors = command("check", "--connect", "--format", "json")
    failed = [probe["tried"] for probe in json.loads(output) if probe["result"] == "failed"]
    assert code == 1
    operations = ("CREATE.{}.>", "MSG.NEXT.{}.*", "DELETE.{}.*")
    streams = ("REG", "ADV", "LONDON_REG")
    assert sorted(failed) == sorted(
        [
            "$JS.API.CONSUMER.CREATE.REG",
            "$JS.API.CONSUMER.CREATE.LONDON_REG",
            "publish london.reg.sr-assets-check",
            "publish london.>",
            *(f"publish $JS.API.CONSUMER.{each.format(stream)}" for stream in streams for each in operations),
        ]
    )
    assert "ermission" in errors
    assert "secret" not in output + errors


def test_lag_queries_servers(connected: tuple[str, Cluster, Cluster], command: Command, tmp_path: Path) -> None:
    stream, source, _ = connected
    (row,) = json.loads(command("lag", "--format", "json")[1])
    assert (row["position"], row["source_last_sequence"], row["lag_messages"]) == (None, 2, 2)
    assert row["lag_seconds"] >= 0
    folder = tmp_path / "home" / "sites" / "london"
    folder.mkdir(parents=True)
    status = StreamStatus(created_ns=source.stream_info(stream).created_ns, next_sequence=3)
    write_status(folder, SiteStatus({stream: status}))
    (row,) = json.loads(command("lag", "--format", "json")[1])
    assert (row["position"], row["lag_messages"], row["lag_seconds"], row["problem"]) == (2, 0, 0.0, None)
    source.publish_many([(f"{stream}.c", b"{}", "3")])
    (row,) = json.loads(command("lag", "--format", "json")[1])
    assert row["lag_messages"] == 1
    write_status(folder, SiteStatus({stream: replace(status, created_ns=1)}))
    (row,) = json.loads(command("lag", "--format", "json")[1])
    assert "recreated" in row["problem"]


def test_check_shows_paused_streams_until_resume(home: Path, command: Command) -> None:
    def paused() -> list[bool]:
        return [row["paused"] for row in json.loads(command("check", "--format", "json")[1])]

    assert paused() == [False, False]
    assert command("pause", "--stream", "REG") == (0, "london/REG: paused; its nodes are still tracked\n", "")
    assert command("pause", "--stream", "paris/PLAIN") == (
        0,
        "paris/PLAIN: paused; no messages are read\n",
        "",
    )
    assert paused() == [True, True]
    assert command("pause", "--stream", "REG")[:2] == (
        0,
        "london/REG: already paused; its nodes are still tracked\n",
    )
    assert command("resume", "--stream", "REG")[:2] == (0, "london/REG: resumed; the next run copies\n")
    assert command("resume", "--stream", "REG")[:2] == (0, "london/REG: not paused\n")
    assert paused() == [False, True]
    # A command without effect is no action.
    lines = [json.loads(line) for line in (home / "actions" / "actions.jsonl").read_text().splitlines()]
    assert [(line["action"], line["subject"]) for line in lines] == [
        ("pause", "london/REG"),
        ("pause", "paris/PLAIN"),
        ("resume", "london/REG"),
    ]


def test_pause_requires_site_for_ambiguous_stream(
    home: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_configuration(tmp_path, configuration(home).replace("PLAIN", "REG"))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    code, output, errors = command("pause", "--stream", "REG")
    assert (code, output) == (2, "")
    assert errors == "error: --stream REG is ambiguous; choose one of: london/REG, paris/REG\n"
    assert command("pause", "--stream", "paris/REG")[0] == 0


def test_lag_shows_paused_streams(connected: tuple[str, Cluster, Cluster], command: Command) -> None:
    stream, _, _ = connected
    assert command("pause", "--stream", stream)[0] == 0
    (row,) = json.loads(command("lag", "--format", "json")[1])
    assert (row["stream"], row["paused"], row["lag_messages"]) == (stream, True, 2)


def test_lag_of_unreachable_server_is_one_line_per_stream(home: Path, command: Command) -> None:
    code, output, errors = command("lag", "--format", "json")
    assert code == 1
    assert [row["lag_messages"] for row in json.loads(output)] == [None, None]
    assert len(errors.splitlines()) == 2
    assert errors.startswith("error: london/REG: cannot connect to NATS: 127.0.0.1:1: ")


def test_emulate_publishes_fleet(
    connected: tuple[str, Cluster, Cluster], command: Command, nats_server: NatsServer
) -> None:
    stream, source, _ = connected
    options = (
        "--url",
        nats_server.url,
        "--subject",
        f"{stream}.%s",
        "--nodes",
        "5",
        "--interval",
        "200ms",
        "--for",
        "1s",
    )
    code, _, errors = command("emulate", *options, "--churn", "0.5,1s,2s")
    sent = source.stream_info(stream).messages - 2
    assert code == 0
    assert sent > 5
    assert f"published {sent} messages of 5 nodes" in errors


# ------------------------------------------------------------------------------------------------------------ the rest


def test_spark_status_without_engine(home: Path, command: Command) -> None:
    assert command("spark", "status")[:2] == (1, "not running\n")
    assert command("spark", "stop")[:2] == (0, "was not running\n")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    (
        (0, "0s"),
        (0.25, "0.250s"),
        (42, "42s"),
        (90, "1m30s"),
        (3600, "1h"),
        (5400.7, "1h30m"),
        (200_000, "2d7h"),
        (86_461, "1d1m"),
    ),
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
