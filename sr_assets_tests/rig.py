"""A site between two real servers: tests create streams, publish messages, run the site and read its results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb
import psutil

from sr_assets.adapters import control
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.tables import literal
from sr_assets.adapters.state.status_file import read_status, write_status
from sr_assets.adapters.wire import Connection, Outgoing, Publisher, read_confirmed
from sr_assets.domain.positions import SequenceRange
from sr_assets.operate.due_work import note_checked
from sr_assets.settings import ClusterSettings, Settings, TlsSettings, load_settings
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_tests.forks import Forked
from sr_assets_tests.travel import Travel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sr_assets.domain.messages import Message
    from sr_assets.embedded.nats_server import NatsServer

T = TypeVar("T")

SITE = "LONDON"
#: The block `spark` that sends every batch to Spark.
ALL_ON_SPARK = {"from_messages": 0}
#: The block `spark` that keeps every batch in the run's process: an engine takes ten seconds to start.
IN_PROCESS = {"from_messages": 1_000_000}
#: Long enough for a busy machine.
PATIENCE_SECONDS = 200.0
#: Runs `sr-assets` in this process: exit code, stdout, stderr.
Command = Callable[..., tuple[int, str, str]]
#: The warm engine stays in the home.
_KEPT = {"spark"}
_OWN_FILES = ("fleet.duckdb", "fleet.json", "fleet.lock", ".fleet.duckdb.new")
_RUN = f"""
import json, sys
from pathlib import Path
from sr_assets.settings import load_settings
from sr_assets.stages.run import run_site
from sr_assets.stages.report import Stage
from sr_assets.stages.site import Site

with Site(load_settings(Path(sys.argv[1]), {{}}), {SITE!r}, owner="child", run_id="child") as site:
    reports = run_site(site, {{entry.stream: frozenset(Stage) for entry in site.entries}}, drain_only=True)
print(json.dumps([report.failure for report in reports.values() if report.failure]))
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message to publish; the stream's name is prepended to the subject."""

    payload: bytes = b""
    subject: str = "m"
    headers: bytes = b""


@dataclass(slots=True)
class Rig:
    """A home and two servers. The tests of a session share the home, emptied for each, and its warm Spark engine.

    `tls` and `spark` are blocks of the configuration.
    """

    home: Path
    source: NatsServer
    target: NatsServer
    unique: Callable[[str], str]
    tls: dict[str, Any] = field(default_factory=dict)
    spark: dict[str, Any] = field(default_factory=lambda: dict(IN_PROCESS))
    entries: list[dict[str, Any]] = field(default_factory=list)
    feeds: list[dict[str, Any]] = field(default_factory=list)
    clocks: Travel | None = None
    #: The last configuration as text and loaded.
    _loaded: tuple[str, Settings | None] = ("", None)

    def __post_init__(self) -> None:
        """Empty the home, except for the engine."""
        for path in self.home.iterdir():
            if path.is_dir() and path.name not in _KEPT:
                shutil.rmtree(path, ignore_errors=True)
        for name in _OWN_FILES:
            (self.home / name).unlink(missing_ok=True)
        self.lose()
        # Tests of runs measure and kill the sites' work; the tests of due work start without this.
        note_checked(self.home)

    def lose(self, *folders: str) -> None:
        """Lose folders of the home, and its control store."""
        for folder in folders:
            shutil.rmtree(self.home / folder, ignore_errors=True)
        with control.transaction(self.home) as connection:
            for (table,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
                connection.execute(f"DELETE FROM {table}")

    # ------------------------------------------------------------------------------------------------ the servers

    def make(self, stem: str = "S", server: NatsServer | None = None, **config: Any) -> str:
        """Create a stream with a unique name and the subjects `<name>.>`; return the name."""
        name = self.unique(stem)
        self.create(name, server, **config)
        return name

    def create(self, name: str, server: NatsServer | None = None, **config: Any) -> None:
        """Create a stream, by default on the source."""
        with Cluster(self._reach(server), "test") as opened:
            opened.create_stream({"name": name, "subjects": [f"{name}.>"], "allow_direct": True, **config})

    def api(self, request: str, body: dict[str, Any] | None = None, server: NatsServer | None = None) -> dict[str, Any]:
        """Send a request such as `STREAM.DELETE.X` to JetStream; return the response, errors included."""
        with Connection(self._reach(server), "test") as opened:
            return opened.request(f"$JS.API.{request}", body or {})

    def info(self, stream: str, server: NatsServer | None = None) -> StreamInfo:
        """Return the info of a stream, by default on the source."""
        with Cluster(self._reach(server), "test") as opened:
            return opened.stream_info(stream)

    def clock_ns(self, stream: str, server: NatsServer | None = None) -> int:
        """Return the time of a stream's leader, by default on the source."""
        now_ns = self.info(stream, server).ts_ns
        assert now_ns is not None, "a server before 2.10"
        return now_ns

    def travel(self, **delta: float) -> None:
        """Move the platform's and the servers' clocks in this process, by arguments of `timedelta`, until the test's end.

        A server itself still expires messages and keys by its real clock.
        """
        assert self.clocks is not None, "the fixture that made this rig does not move clocks"
        self.clocks.forward(timedelta(**delta))

    def await_clock(self, stream: str, at_ns: int, server: NatsServer | None = None) -> None:
        """Wait until the clock of a stream's leader, a server on this machine, passes `at_ns`."""
        interval_seconds = max(0.02, min((at_ns - self.clock_ns(stream, server)) / 1e9 / 4, 1.0))
        awaited = f"the server's clock to pass {at_ns}"
        wait_until(lambda: self.clock_ns(stream, server) > at_ns, awaited, every=interval_seconds)

    def publish(self, stream: str, messages: Iterable[Sent], server: NatsServer | None = None) -> None:
        """Publish messages in order and assert that each is stored."""
        items = [
            Outgoing(n, f"{stream}.{message.subject}", message.headers, message.payload)
            for n, message in enumerate(messages, 1)
        ]
        with Connection(self._reach(server), "test") as opened:
            acks = list(Publisher(opened).publish_all(items))
        refused = [ack for ack in acks if ack.error]
        assert not refused, refused
        assert len(acks) == len(items), f"{len(acks)} of {len(items)}"

    @contextmanager
    def beating(self, stream: str, message: Sent, server: NatsServer | None = None) -> Iterator[None]:
        """Publish a message every 0.1 s within the block, from a thread."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(0.1):
                self.publish(stream, [message], server)

        with in_background(beat):
            try:
                yield
            finally:
                ended.set()

    def stored(self, stream: str, server: NatsServer | None = None) -> list[Message]:
        """Return all messages of a stream in order, by default on the source."""
        last = self.info(stream, server).last_sequence
        with Connection(self._reach(server), "test") as opened:
            return list(chain.from_iterable(read_confirmed(opened, stream, SequenceRange(1, last + 1), direct=False)))

    def copies(self, stream: str) -> list[Message]:
        """Return all messages of a stream on the target in order."""
        return self.stored(stream, self.target)

    def _reach(self, server: NatsServer | None) -> ClusterSettings:
        """Return the settings of a server, by default the source, with the `tls` block."""
        return replace(address(server or self.source), tls=TlsSettings(**self.tls) if self.tls else None)

    # --------------------------------------------------------------------------------------------------- the runs

    def add(self, stream: str, **entry: Any) -> dict[str, Any]:
        """Add a stream to the configuration; return its entry, which may be changed."""
        entry = {"stream": stream, "source_url": self.source.url, "target_url": self.target.url, **entry}
        self.entries.append(entry)
        return entry

    def add_feed(self, stream: str, **entry: Any) -> dict[str, Any]:
        """Add a feed that reads a stream of the target; return its entry, which may be changed."""
        entry = {"stream": stream, "url": self.target.url, **entry}
        self.feeds.append(entry)
        return entry

    def settings(self, **top: Any) -> Settings:
        """Load a configuration of the entries and feeds."""
        file = self.home / "replication.yaml"
        document = {
            "name": SITE,
            "state_store": str(self.home),
            "tls": self.tls,
            "spark": self.spark,
            "streams": self.entries,
        }
        # A value in JSON is YAML, and is written in no time.
        text = "".join(
            f"{key}: {json.dumps(value)}\n" for key, value in {**document, "feeds": self.feeds, **top}.items()
        )
        known, settings = self._loaded
        fixed = "data" not in text and "file" not in text
        if settings is not None and fixed and text == known and file.exists() and file.read_text() == text:
            return settings
        # Atomically, because commands may read it meanwhile.
        draft = file.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(file)
        settings = load_settings(file, {})
        self._loaded = text, settings
        return settings

    @contextmanager
    def open(self, site: str = SITE, **top: Any) -> Iterator[Site]:
        """Open a site as a run does."""
        with Site(self.settings(**top), site, owner="test", run_id="test", wait_seconds=0) as opened:
            yield opened

    def run(
        self, site: str = SITE, stages: Iterable[Stage] = tuple(Stage), *, drain_only: bool = True, **top: Any
    ) -> dict[str, StreamReport]:
        """Run a site as Dagster's job does; return the reports by stream, failures included."""
        with self.open(site, **top) as opened:
            selection = {entry.stream: frozenset(stages) for entry in opened.entries}
            return run_site(opened, selection, drain_only=drain_only)

    def start(self, environ: Mapping[str, str] | None = None, **top: Any) -> subprocess.Popen[str]:
        """Start a run of the site in a process that may be killed; it prints the failures as JSON."""
        self.settings(**top)
        command = [sys.executable, "-c", _RUN, str(self.home / "replication.yaml")]
        return Forked(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def drain(self, site: str = SITE, stages: Iterable[Stage] = tuple(Stage), **top: Any) -> dict[str, StreamReport]:
        """Run a site and assert that no stream failed."""
        reports = self.run(site, stages, **top)
        failures = [report.failure for report in reports.values() if report.failure]
        assert not failures, failures
        return reports

    def failure(self, site: str = SITE, **top: Any) -> str:
        """Run a site whose only stream fails; return the error, which must be one line without a traceback."""
        (report,) = self.run(site, **top).values()
        assert report.failure is not None, report
        assert "\n" not in report.failure, report.failure
        assert "Traceback" not in report.failure, report.failure
        return report.failure

    # ----------------------------------------------------------------------------------------- the published tables

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return rows of the published tables; `query` is SQL or a table's name."""
        with _open_fleet(self.home) as opened:
            result = opened.execute(query if " " in query else f"SELECT * FROM {query}")
            names = [column[0] for column in result.description or ()]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def row(self, query: str) -> dict[str, Any]:
        """Return the only row of a query."""
        (row,) = self.rows(query)
        return row


@cache
def _reader() -> duckdb.DuckDBPyConnection:
    reader = duckdb.connect(config={"threads": 2})
    reader.execute("SET GLOBAL TimeZone = 'UTC'")
    return reader


@contextmanager
def _open_fleet(home: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the published tables in one DuckDB for all tests: making another takes 35 ms of CPU time."""
    if not (home / "fleet.duckdb").exists():
        with open_fleet(home) as opened:
            yield opened
        return
    with _reader().cursor() as opened:
        opened.execute(f"ATTACH {literal(str(home / 'fleet.duckdb'))} AS fleet (READ_ONLY); USE fleet")
        try:
            yield opened
        finally:
            opened.execute("USE memory; DETACH fleet")


def files_with(text: str, *folders: Path) -> list[str]:
    """Return the names of the files with a text, in order; another process reads them, as `adapters.control` demands."""
    command = [
        "grep",
        "--recursive",
        "--files-with-matches",
        "--text",
        "--fixed-strings",
        "--",
        text,
        *map(str, folders),
    ]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode in (0, 1)
    return sorted(line.rpartition("/")[2] for line in ended.stdout.splitlines())


def edit_status(folder: Path, stream: str, **values: Any) -> None:
    """Change a stream in the status of a site's last run."""
    status = read_status(folder)
    write_status(folder, replace(status, streams={**status.streams, stream: replace(status.of(stream), **values)}))


def leave_out_due_work(home: Path) -> None:
    """Let the next `run --once` of a home leave out the hourly and nightly jobs, which take longer than a site's run."""
    home.mkdir(parents=True, exist_ok=True)
    note_checked(home)


def wait_until(
    condition: Callable[[], bool], awaited: str, seconds: float = PATIENCE_SECONDS, every: float = 0.02
) -> None:
    """Poll until a condition holds; at the deadline, raise AssertionError with the text `awaited`.

    The pause between two polls (`every`, in seconds) grows with the cost of the condition, such as a query of a database
    file: the awaited process needs the core. A condition that does the awaited work itself has no pause: `every=0.0`.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        ended = time.monotonic()
        assert ended < deadline, f"waited {seconds:g} s for {awaited}"
        time.sleep(every and max(every, min(3 * (ended - began), 0.5)))


@contextmanager
def in_background(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Do some work in a thread during the block and wait for its end; an error of it is raised unless the block raises one."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield future
    future.result()


def stop_process(pid: int) -> None:
    """Suspend a process and wait for all its threads: on a busy machine some run on for a while."""
    process = psutil.Process(pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, f"process {pid} to stop")


def address(server: NatsServer) -> ClusterSettings:
    """Return the settings of a server."""
    return ClusterSettings((server.address,))


def cluster(server: NatsServer) -> Cluster:
    """Return a client of a server's JetStream, a context manager."""
    return Cluster(address(server), "test")


def connection(server: NatsServer) -> Connection:
    """Return a bulk connection, a context manager."""
    return Connection(address(server), "test")
