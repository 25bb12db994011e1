"""`sr-assets demo`: the whole platform on this machine, with its own NATS servers and an emulated fleet.

Our user and the fleets' user have only their least permissions.

Add a check here for each new promise of the demo.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self

from dagster import DagsterInstance, DagsterRunStatus, RunsFilter
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sr_assets.adapters import times
from sr_assets.adapters.extras import require_extra
from sr_assets.adapters.locking import lock
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.private import open_private, write_private
from sr_assets.adapters.published.fleet_reader import Rows, count_rows, open_fleet, read_rows
from sr_assets.adapters.published.manifest import identity
from sr_assets.adapters.spark.engine import Engine, abandon_start, start_engine, stop_engine
from sr_assets.automation.failures import failures
from sr_assets.dagster_internals import logged_events
from sr_assets.domain.clusters import ClusterSettings, domain_api
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError
from sr_assets.domain.permissions import Action
from sr_assets.domain.tracking.rules import Event
from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import Churn, FleetPlan
from sr_assets.embedded.nats_server import HOST, NatsServer, find_nats_server, free_port
from sr_assets.operate.due_work import due_work_process
from sr_assets.operate.forking import Copies
from sr_assets.operate.instance import prepare_instance
from sr_assets.operate.metrics import Exposition, MetricsServer
from sr_assets.operate.processes import interrupted_queries, signals_as_interrupt
from sr_assets.operate.runs import run_sites
from sr_assets.operate.services import Services
from sr_assets.operate.ui_access import Ui
from sr_assets.settings import Settings, load_settings
from sr_assets.settings.needed_permissions import Permission, needed_permissions
from sr_assets.stages.connection_users import ask_servers, list_users, nats_blocks
from sr_assets.stages.source.lag import measure_lag
from sr_assets.stages.topology.link_rows import make_report
from sr_assets.stages.topology.planning import find_drift, topology_of
from sr_assets.stages.topology.survey import Survey

CITIES: Final = (
    *("london", "paris", "berlin", "madrid", "rome", "vienna", "prague", "warsaw", "dublin", "lisbon"),
    *("oslo", "helsinki", "athens", "budapest", "brussels", "zagreb", "sofia", "riga", "vilnius", "tallinn"),
)
CENTRE: Final = "centre"
#: The name of the template, and of the file in the demo's folder.
FILE_NAME: Final = "demo.yaml"
_FEEDS_COMMENT: Final = "\n# The centre's view"
#: The prefix of the nodes' subjects.
SUBJECT: Final = "choria.stream.input.registration"
_ADVISORY_SUBJECTS: Final = ["choria.stream.advisories.>", "sr_assets.observer_alive.>"]
_CITY_STREAMS: Final = {"CHORIA_REGISTRATION": [f"{SUBJECT}.>"], "CHORIA_ADVISORIES": _ADVISORY_SUBJECTS}
_CENTRE_STREAMS: Final = {"ADVISORIES": _ADVISORY_SUBJECTS}
#: Leafnodes must not forward messages published in a city; only copies reach the centre.
_NOT_FORWARDED: Final = '["choria.>", "sr_assets.>"]'
_LINK_SECONDS: Final = 30.0
_USER: Final = "sr-assets"
_FLEET: Final = "fleet"
_LEAF: Final = "leaf"
#: Differences between the centre's view and the sites' own tables: site, stream, text.
_DIFFERENCES: Final = """
    WITH site AS (SELECT name, stream, node, status, status_since FROM node_availability),
        centre AS (SELECT name, stream, node, status, status_since FROM global_availability)
    SELECT name, stream, count(DISTINCT node) || ' nodes differ between the centre and their site' FROM (
        (FROM site EXCEPT FROM centre) UNION ALL (FROM centre EXCEPT FROM site)
    ) GROUP BY name, stream
    UNION ALL
    SELECT name, stream, 'the centre receives no heartbeat of it'
    FROM (SELECT DISTINCT name, stream FROM site) LEFT JOIN global_summary USING (name, stream)
    WHERE coalesce(blind, true) OR observer_alive_at IS NULL
"""
#: Time limit for the servers' native copies of the last messages.
_ARRIVAL_SECONDS: Final = 30.0
_SITES_QUERY = """
    SELECT name, site_summary.up, site_summary.timeout, site_summary.retired, copied_messages AS copied,
        skipped_messages AS skipped, lag_messages AS lag, replication.as_of AS as_of
    FROM replication JOIN site_summary USING (name, stream) ORDER BY name
"""
# The centre's view, folded only from the sites' advisories, so slightly late.
_CENTRE_QUERY = """
    SELECT name, observer, up, timeout, retired, last_advisory_at, observer_alive_at, as_of
    FROM global_summary ORDER BY name
"""
_EVENTS_QUERY = """
    SELECT event_time, name, node, event, age_seconds FROM node_advisories
    ORDER BY event_time DESC, node LIMIT 8
"""
#: The columns that a narrow terminal omits, in this order.
_EXPENDABLE = ("as_of", "observer_alive_at", "age_seconds", "last_advisory_at", "skipped")
#: More columns than any table needs.
_WIDEST = 1_000
#: Lines of the three tables without their rows.
_FRAME_LINES = 11
_NUMBERS = frozenset({"up", "timeout", "retired", "copied", "skipped", "lag", "age_seconds"})
_STYLES = {"new": "green", "recover": "green", "timeout": "yellow", "expire": "red"}
_PLAIN_SECONDS = 10.0
_LOG: Final = "demo.log"
_LOOPBACK: Final = "127.0.0.1"
_INTERVAL_SECONDS: Final = 3.0
# Silences between the template's warning and interval (timeout, recover) and above its interval (timeout, expire).
_CHURN: Final = Churn(0.4, 12.0, 24.0)
#: The tables without whose rows the first computation of the daily tables yields none.
_INPUTS: Final = ("last_seen_nodes", "node_snapshots")
_FIRST_TABLE_SECONDS: Final = 300.0
_RUN_END_SECONDS: Final = 120.0
_LOG_LINES: Final = 20
_OPEN: Final = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]


def configuration(cities: Sequence[str], home: Path, urls: Mapping[str, str]) -> str:
    """Return the template's text for these cities, with its last city's entries repeated for each further city.

    `urls` has the URLs of all cities' servers and of `centre`. The text contains them, so that other commands can use
    the file.
    """
    template = files("sr_assets").joinpath("conf", FILE_NAME).read_text(encoding="utf-8")
    head, first_line, rest = template.partition(f"  - name: {CITIES[1]}\n")
    rest, comment, feeds = rest.partition(_FEEDS_COMMENT)
    others = [city for city in cities if city != CITIES[0]]
    entries = [_of_city(first_line + rest, city) for city in others]
    # The centre's part has one line per city.
    centre = [
        _of_city(line, city)
        for line in feeds.splitlines(keepends=True)
        for city in (others if CITIES[1] in line else [CITIES[1]])
    ]
    text = "\n".join([head.rstrip("\n") + "\n", *entries]) + comment + "".join(centre)
    for name, url in urls.items():
        text = text.replace(f"${{SR_DEMO_{name.upper()}_URL}}", url)
    return text.replace("${SR_DEMO_HOME}", json.dumps(str(home), ensure_ascii=False)[1:-1])


def _of_city(text: str, city: str) -> str:
    """Return text about the template's last city for another city."""
    return text.replace(CITIES[1], city).replace(CITIES[1].upper(), city.upper())


class DemoServers:
    """The running servers with their streams, linked; the stack stops them.

    Each server's name is its JetStream domain, through which the centre reaches a city. `restrict` takes all other
    permissions from the users. Raises RunError.
    """

    def __init__(self, folder: Path, cities: Sequence[str], stack: contextlib.ExitStack) -> None:
        self._cities = cities
        self._passwords = {user: secrets.token_hex(16) for user in (_USER, _FLEET, _LEAF)}
        self._links = self._configure_links(free_port())
        users = ", ".join(f"{{ user: {user}, password: {self._passwords[user]} }}" for user in (_USER, _FLEET))
        self._servers = {
            name: stack.enter_context(
                NatsServer(folder / name, name, domain=name, config=f"{link}\nauthorization {{ users: [ {users} ] }}")
            )
            for name, link in self._links.items()
        }
        for name in self._servers:
            with Cluster(self._login(name, _USER), "sr-assets demo") as cluster:
                for stream, subjects in (_CENTRE_STREAMS if name == CENTRE else _CITY_STREAMS).items():
                    if not cluster.stream_exists(stream):
                        cluster.create_stream({"name": stream, "subjects": subjects, "allow_direct": True})
        for city in cities:
            _await_link(self._login(CENTRE, _USER), city)

    @property
    def urls(self) -> dict[str, str]:
        """The URLs of our user, by name."""
        login = f"{_USER}:{self._passwords[_USER]}"
        return {name: f"nats://{login}@{server.address}" for name, server in self._servers.items()}

    def fleet(self, city: str) -> ClusterSettings:
        """Return the connection of a city's nodes."""
        return self._login(city, _FLEET)

    def restrict(self, settings: Settings) -> None:
        """Leave each user only the permissions that it needs, as `sr-assets permissions` prints them."""
        needs = needed_permissions(settings, ask_servers(settings))
        needs += [need for city in self._cities for need in _fleet_needs(self.fleet(city))]
        blocks = {
            address: nats_blocks([users], self._passwords)
            for users in list_users(needs)
            for address in users[0].servers
        }
        for name, server in self._servers.items():
            server.reload(f"{self._links[name]}\n{blocks[server.address]}")

    def _login(self, name: str, user: str) -> ClusterSettings:
        return ClusterSettings((self._servers[name].address,), user, self._passwords[user])

    def _configure_links(self, port: int) -> dict[str, str]:
        """Return the part of each server's configuration that links it."""
        login, password = f"user: {_LEAF}, password: {self._passwords[_LEAF]}", self._passwords[_LEAF]
        remote = f"url: nats://{_LEAF}:{password}@{HOST}:{port}, deny_imports: {_NOT_FORWARDED}, deny_exports: {_NOT_FORWARDED}"
        links = dict.fromkeys(self._cities, f"leafnodes {{ reconnect: 1, remotes: [ {{ {remote} }} ] }}")
        return {CENTRE: f"leafnodes {{ listen: {HOST}:{port}, authorization {{ {login} }} }}", **links}


def _fleet_needs(cluster: ClusterSettings) -> Iterator[Permission]:
    """Yield the permissions of the emulated nodes."""
    for action, subject, purpose in (
        (Action.PUBLISH, f"{SUBJECT}.>", "report"),
        (Action.PUBLISH, cluster.api("STREAM.NAMES"), "check that a stream takes the reports"),
        (Action.SUBSCRIBE, f"{cluster.inbox_prefix}.>", "receive acknowledgements"),
    ):
        yield Permission(cluster, "source", "the fleet", action, subject, purpose)


def _await_link(centre: ClusterSettings, city: str) -> None:
    """Wait until the centre reaches a city's JetStream."""
    settings = replace(centre, api_prefix=domain_api(city))
    deadline = times.monotonic() + _LINK_SECONDS
    with Cluster(settings, "sr-assets demo") as cluster:
        while True:
            try:
                cluster.request_api("INFO")
            except RunError:
                if times.monotonic() > deadline:
                    raise
                times.sleep(0.1)
            else:
                return


def check_demo(settings: Settings, seconds: float) -> dict[str, Any]:
    """Return the demo's counts and current lag; `failed` has a line for each broken promise."""
    with open_fleet(settings.home) as connection:
        columns = "name, stream, copied_messages, skipped_messages, spark_messages, local_messages"
        counts = read_rows(connection, f"SELECT {columns} FROM replication").values
        events = read_rows(connection, "SELECT event, count(*) FROM node_advisories GROUP BY event").values
        differences = read_rows(connection, _DIFFERENCES).values
    counters = {(name, stream): numbers for name, stream, *numbers in counts}
    lags = {(lag.name, lag.stream): lag for lag in measure_lag(settings)}
    failed = [
        f"{name}/{stream}: the lag is {lag.messages} messages"
        for (name, stream), lag in lags.items()
        if lag.messages != 0
    ]
    streams, copied_into = {}, Counter[tuple[ClusterSettings, str]]()
    for stream in settings.streams:
        key = stream.name, stream.stream
        copied, skipped, in_spark, local = counters.get(key, (0, 0, 0, 0))
        copied_into[stream.target, stream.target_stream] += copied
        streams[stream.label] = {
            "source_messages": _messages(stream.source, stream.stream),
            "copied": copied,
            "skipped": skipped,
            "spark_messages": in_spark,
            "local_messages": local,
            "position": lags[key].position,
            "lag_messages": lags[key].messages,
        }
        if stream.tracked and not in_spark:
            failed.append(f"{stream.label}: Spark has read no message")
    for (target, name), copied in copied_into.items():
        if (stored := _messages(target, name)) != copied:
            failed.append(f"{name}: contains {stored} messages after {copied} copies")
    native, native_failed = _check_native(settings)
    failed += native_failed
    advisories = {event.value: dict(events).get(event.value, 0) for event in Event}
    failed += [f"no {event} happened" for event, count in advisories.items() if not count]
    failed += [f"{name}/{stream}: {difference}" for name, stream, difference in differences]
    return {
        "seconds": round(seconds),
        "streams": streams,
        "native": native,
        "advisories": advisories,
        "tables": count_rows(settings.home),
        "failed": failed,
    }


def _check_native(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """Wait for native copies to arrive; return them, and a line for each that differs from its origins."""
    deadline = times.monotonic() + _ARRIVAL_SECONDS
    with Survey(settings, "sr-assets demo") as survey:
        while True:
            shown, failed = _compare_native(settings, survey.refresh())
            if not failed or times.monotonic() > deadline:
                return shown, failed
            times.sleep(0.5)


def _compare_native(settings: Settings, survey: Survey) -> tuple[dict[str, Any], list[str]]:
    """Return each native stream's messages, its origins' messages and its lag, and a line for each problem."""
    report = make_report(settings, survey)
    held = {(row.cluster, row.stream): row.messages for row in report.streams}
    failed = [f"{wanted.label}: {drift.key} is {drift.found}" for wanted, drift in find_drift(settings, survey)]
    links, shown = [link for link in report.links if link.native], {}
    for wanted in topology_of(settings).streams:
        own = [link for link in links if (link.cluster, link.stream) == (wanted.cluster, wanted.stream)]
        lags = [link.lag_messages for link in own]
        stream = {
            "messages": held.get((wanted.cluster, wanted.stream)),
            "origin_messages": sum(held.get((upstream.cluster, upstream.stream)) or 0 for upstream in wanted.upstreams),
            "lag_messages": None if None in lags else sum(filter(None, lags)),
        }
        shown[wanted.label] = stream
        if stream["messages"] != stream["origin_messages"] or stream["lag_messages"] != 0:
            failed.append(f"{wanted.label}: the servers have not copied everything: {stream}")
        failed += [f"{wanted.label}: the link to {link.origin_cluster} is dead" for link in own if link.dead]
    return shown, failed


def _messages(settings: ClusterSettings, stream: str) -> int:
    with Cluster(settings, "sr-assets demo") as cluster:
        return cluster.stream_info(stream).messages


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


@contextmanager
def step(console: Console, title: str) -> Iterator[None]:
    """Show a step in progress and, after success, its duration."""
    began = times.monotonic()
    with console.status(f"{title} ...", spinner="line"):
        yield
    console.print(f"[green]ok[/]  {title} [dim]({times.monotonic() - began:.1f} s)[/]", highlight=False)


class Summary:
    """The live summary, a context manager; without a terminal, a line per site every 10 seconds."""

    def __init__(self, console: Console, home: Path) -> None:
        self._console = console
        self._home = home
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_lines = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # At its end, rich would leave the first lines of a summary that is taller than the terminal.
        self._live.update("", refresh=self._console.is_terminal)
        self._live.stop()

    def refresh(self) -> None:
        """Show the current published data."""
        now = times.monotonic()
        if not self._console.is_terminal and now < self._next_lines:
            return
        self._next_lines = now + _PLAIN_SECONDS
        try:
            with open_fleet(self._home) as connection:
                sites, centre, events = (
                    read_rows(connection, query) for query in (_SITES_QUERY, _CENTRE_QUERY, _EVENTS_QUERY)
                )
        except SrAssetsError:
            return
        if self._console.is_terminal:
            left = self._console.height - _FRAME_LINES - len(sites.values) - len(centre.values)
            tables = Group(
                _table(self._console, sites, "sites"),
                "",
                _table(self._console, centre, "centre, from their advisories"),
                "",
                _table(self._console, replace(events, values=events.values[: max(1, left)]), "newest transitions"),
            )
            self._live.update(tables, refresh=True)
        else:
            for prefix, rows in (("", sites), ("centre: ", centre)):
                for row in rows.values:
                    cells = zip(rows.columns, row, strict=True)
                    parts = (f"{column} {value}" for column, value in cells if not isinstance(value, datetime | None))
                    self._console.print(prefix + "  ".join(parts), highlight=False)


def _table(console: Console, rows: Rows, title: str, omitted: Sequence[str] = ()) -> RenderableType:
    """Return a table without the expendable columns for which the terminal is too narrow; its title lists them."""
    remark = f" (not shown: {', '.join(map(_header, omitted))})" if omitted else ""
    table = Table(
        title=Text.assemble(title, (remark, "dim")),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    shown = {number: column for number, column in enumerate(rows.columns) if column not in omitted}
    for column in shown.values():
        table.add_column(_header(column), justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for row in rows.values:
        table.add_row(*(_cell(row[number]) for number in shown))
    needed = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    further = next((column for column in _EXPENDABLE if column in shown.values()), None)
    if further is None or needed <= console.width:
        return table
    return _table(console, rows, title, (*omitted, further))


def _header(column: str) -> str:
    return column.removesuffix("_seconds").replace("_", " ")


def _cell(value: object) -> Text:
    """Return a value as text; emulated names need no escapes."""
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, datetime):
        return Text(f"{value:%Y-%m-%d %H:%M:%S}")
    if isinstance(value, float):
        return Text(f"{value:.0f} s")
    return Text(str(value), style=_STYLES.get(str(value), ""))


def run_demo(
    sites: int = 2,
    nodes: int = 100,
    port: int = 3000,
    home: Path | None = None,
    *,
    ui: bool = True,
    for_seconds: float | None = None,
    as_json: bool = False,
) -> int:
    """Run the demo and return its exit code.

    Without `for_seconds` it runs until Ctrl-C, SIGTERM or SIGHUP. Otherwise it ends that long after the first published
    table: the fleet stops, the sites are drained, and the code is 1 if the result lists a failure. With `as_json`,
    stdout contains only the result. A given `home` stays, and the next demo there continues with its data. Raises
    SrAssetsError.
    """
    if not 1 <= sites <= len(CITIES):
        raise ConfigurationError(f"--sites {sites}: not a number from 1 to {len(CITIES)}; choose fewer sites")
    find_nats_server()
    if ui:
        require_extra("the demo's Dagster UI (omitted with --no-ui)", "ui", "dagster_webserver")
    try:
        with (
            Copies() as copies,
            stdout_on_stderr() if as_json else contextlib.nullcontext(),
            signals_as_interrupt(*_signals()) as ignore_signals,
        ):
            console = Console()
            stack = contextlib.ExitStack()
            try:
                folder = stack.enter_context(demo_home(home))
                demo = _Demo(console, folder, CITIES[:sites], nodes, stack, copies)
                with interrupted_queries():
                    result = demo.run(port, ui=ui, for_seconds=for_seconds, judged=as_json or for_seconds is not None)
            finally:
                try:
                    ignore_signals()
                finally:
                    with console.status("stopping ...", spinner="line"):
                        stack.close()
    except KeyboardInterrupt:
        return 0 if for_seconds is None else 128 + signal.SIGINT
    if result is None:
        return 0
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return int(bool(result["failed"]))


class _Demo:
    """One demo in its folder; the stack stops what it starts, in reverse order."""

    def __init__(
        self,
        console: Console,
        folder: Path,
        cities: Sequence[str],
        nodes: int,
        stack: contextlib.ExitStack,
        copies: Copies,
    ) -> None:
        self._console = console
        self._folder = folder
        self._cities = cities
        self._nodes = nodes
        self._stack = stack
        self._copies = copies
        self._began = times.utc_now()

    def run(self, port: int, *, ui: bool, for_seconds: float | None, judged: bool) -> dict[str, Any] | None:
        """Start and show everything; if `judged`, drain it and return the result."""
        began, before = times.monotonic(), identity(self._folder / "fleet.duckdb")
        try:
            with step(self._console, f"NATS servers of {', '.join(self._cities)} and the centre"):
                servers = DemoServers(self._folder / "nats", self._cities, self._stack)
                settings = self._configure(servers.urls)
                servers.restrict(settings)
            fleets = [self._start_fleet(seed, city, servers) for seed, city in enumerate(self._cities)]
            engine = self._start_engine(settings)
            with step(self._console, "Dagster"):
                logged = settings.changed(logfile=self._folder / _LOG)
                services = self._stack.enter_context(Services(logged, Ui(port) if ui else None, self._copies))
            metrics = self._stack.enter_context(MetricsServer(Exposition(settings), _LOOPBACK, 0))
            self._print_addresses(services.url, metrics)
            with step(self._console, "Spark"):
                engine.result()
            with step(self._console, "first run"):
                self._await_publication(before, services)
            self._console.print(f"first rows {times.monotonic() - began:.0f} s after the start", highlight=False)
            self._start_daily_tables()
        except RunError:
            self._show_log()
            raise
        watched = times.monotonic()
        try:
            with interrupted_queries():
                self._watch(services, for_seconds)
        except KeyboardInterrupt:
            if for_seconds is not None or not judged:
                raise
        if not judged:
            return None
        return self._finish(settings, services, fleets, times.monotonic() - watched)

    def _configure(self, urls: Mapping[str, str]) -> Settings:
        """Write the configuration that names the servers, and load it."""
        file = self._folder / FILE_NAME
        write_private(file, configuration(self._cities, self._folder, urls))
        # For all child processes. The user's own settings do not apply to the demo.
        os.environ["SR_ASSETS_CONFIG"] = str(file)
        for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
            os.environ.pop(name, None)
        settings = load_settings()
        prepare_instance(settings)
        return settings

    def _start_fleet(self, seed: int, city: str, servers: DemoServers) -> Fleet:
        plan = FleetPlan(self._nodes, _INTERVAL_SECONDS, seed, _CHURN, suffix=f".{city}.example.net")
        return self._stack.enter_context(Fleet(plan, servers.fleet(city), f"{SUBJECT}.%s"))

    def _start_daily_tables(self) -> None:
        """Compute the daily tables now, for the first time; later the schedules do it."""
        work = partial(due_work_process, once=True, since=self._began.timestamp())
        with (self._folder / _LOG).open("ab") as log:
            child = self._copies.start("daily tables", work, errors=log.fileno(), output=log.fileno())
        self._stack.callback(child.terminate)

    def _start_engine(self, settings: Settings) -> "Future[Engine]":
        """Start Spark while Dagster starts, so that it is warm for the first run."""
        self._stack.callback(stop_engine, self._folder)
        pool = self._stack.enter_context(ThreadPoolExecutor(1))
        engine = pool.submit(start_engine, settings.spark, self._folder)
        self._stack.callback(self._abandon, engine)
        return engine

    def _abandon(self, engine: "Future[Engine]") -> None:
        """Abandon an engine that is still starting; its start may take minutes on a busy machine."""
        while not engine.done():
            abandon_start(self._folder)
            times.sleep(0.1)

    def _print_addresses(self, url: str | None, metrics: str) -> None:
        if url is not None:
            self._console.print(f"\n    Dagster  [bold]{url}[/]")
        self._console.print(
            f"    Metrics  {metrics}\n"
            f"    Ask      export SR_ASSETS_CONFIG={self._folder / FILE_NAME}\n"
            "             sr-assets summary, sr-assets nodes --global, sr-assets report,\n"
            "             sr-assets advisories --global --follow",
            highlight=False,
            soft_wrap=True,
        )
        self._console.print("    Stop     Ctrl-C\n", highlight=False)

    def _await_publication(self, before: list[int], services: Services) -> None:
        deadline = times.monotonic() + _FIRST_TABLE_SECONDS
        while identity(self._folder / "fleet.duckdb") == before or not all(map(count_rows(self._folder).get, _INPUTS)):
            services.check()
            if times.monotonic() > deadline:
                reasons = "; ".join(self._failed_runs()) or "no run failed"
                raise RunError(f"nothing was published within {_FIRST_TABLE_SECONDS:.0f} s: {reasons}")
            times.sleep(0.1)

    def _watch(self, services: Services, for_seconds: float | None) -> None:
        """Show published data for `for_seconds`, or until an interrupt."""
        end = None if for_seconds is None else times.monotonic() + for_seconds
        with Summary(self._console, self._folder) as summary:
            while (left := 0.5 if end is None else end - times.monotonic()) > 0:
                services.check()
                summary.refresh()
                times.sleep(min(left, 0.5))

    def _finish(
        self, settings: Settings, services: Services, fleets: Sequence[Fleet], seconds: float
    ) -> dict[str, Any]:
        """Wait for open runs, stop the fleet, drain everything and return the result.

        The fleet publishes until the runs have ended, because otherwise all its nodes would time out. The drains follow
        the data: registrations, their advisories, the centre's feed.
        """
        failed = []
        with step(self._console, "last runs"):
            services.stop("daemon")
            if not _await_end_of_runs():
                failed.append(f"a run had not ended after {_RUN_END_SECONDS:.0f} s")
        with step(self._console, "fleet stopped, last drain"):
            for fleet in fleets:
                fleet.stop()
            tracked = [stream for stream in settings.streams if stream.tracked]
            advisories = [stream for stream in settings.streams if not stream.tracked]
            codes = [run_sites(settings, entries, once=True) for entries in (tracked, advisories, settings.feeds)]
            if any(codes):
                failed.append("the last drain failed")
        result = check_demo(settings, seconds)
        result["failed"] = [*failed, *self._failed_runs(), *result["failed"]]
        for line in result["failed"]:
            self._console.print(f"[red]failed[/]  {line}", highlight=False)
        if result["failed"]:
            self._show_log()
        return result

    def _failed_runs(self) -> list[str]:
        with DagsterInstance.get() as instance:
            failed = RunsFilter(statuses=[DagsterRunStatus.FAILURE], created_after=self._began)
            runs = [record.dagster_run for record in instance.get_run_records(failed)]
            return [
                f"run {run.run_id[:8]} of {run.job_name}: {line}"
                for run in runs
                for line in failures(logged_events(instance, run.run_id))
            ]

    def _show_log(self) -> None:
        with contextlib.suppress(OSError):
            lines = (self._folder / _LOG).read_text(errors="replace").splitlines()
            self._console.print("\n".join(lines[-_LOG_LINES:]), markup=False, highlight=False)


def _await_end_of_runs() -> bool:
    """Wait for open runs to use up their budget; return False if one takes too long."""
    deadline = times.monotonic() + _RUN_END_SECONDS
    with DagsterInstance.get() as instance:
        while instance.get_run_records(RunsFilter(statuses=_OPEN), limit=1):
            if times.monotonic() > deadline:
                return False
            times.sleep(0.3)
    return True


def _signals() -> list[signal.Signals]:
    """Return the signals that end a demo; under nohup SIGHUP does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
