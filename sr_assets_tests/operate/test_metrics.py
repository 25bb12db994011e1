"""The metrics endpoint: names, types, labels and values, counters after a killed run, invalid configuration."""

import contextlib
import http.client
import itertools
import json
import signal
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.state.status_file import record_idle_poll
from sr_assets.domain.errors import ConfigurationError
from sr_assets.operate.health import Health
from sr_assets.operate.metrics import Exposition, metrics_beside, write_textfile_once
from sr_assets.operate.metrics.serving import MetricsServer
from sr_assets.operate.page import PagePublisher
from sr_assets_tests.exposed import SITES, STREAM, configured, expose_tables, write_stream
from sr_assets_tests.faults.rig import await_marker, kill_run, start_run
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Command, Rig, Sent, wait_until
from sr_assets_tests.servers import free_port
from sr_assets_tests.strangers import connected_stranger

# The Stream Replicator's metrics: type, then labels.
_WORKER = {"stream", "replicator", "worker"}
_LIMITER = {"limiter", "stream", "replicator"}
_ADVISOR = {"advisory", "stream", "replicator"}
REPLICATOR = {
    "replicator_total_messages": ("counter", _WORKER),
    "replicator_total_bytes": ("counter", _WORKER),
    "replicator_handler_error_count": ("counter", _WORKER),
    "replicator_processing_time_seconds": ("summary", _WORKER),
    "replicator_stream_sequence": ("gauge", _WORKER),
    "replicator_stream_lag_messages": ("gauge", _WORKER),
    "replicator_too_old_messages": ("counter", _WORKER),
    "replicator_copied_messages": ("counter", _WORKER),
    "replicator_copied_bytes": ("counter", _WORKER),
    "replicator_skipped_messages": ("counter", _WORKER),
    "replicator_skipped_bytes": ("counter", _WORKER),
    "replicator_meta_parse_failed_count": ("counter", _WORKER),
    "replicator_ack_failed_count": ("counter", _WORKER),
    "replicator_consumer_recreated": ("counter", _WORKER),
    **dict.fromkeys(("connection_errors", "connection_closed", "connection_reconnections"), ("counter", _WORKER)),
    "limiter_messages_without_limit_field_count": ("counter", _LIMITER),
    "limiter_messages_copy_forced_count": ("counter", _LIMITER),
    "tracker_total_items": ("gauge", _WORKER),
    "advisor_total_messages": ("counter", _ADVISOR),
    "advisor_publish_errors": ("counter", _ADVISOR),
}
_OLD, _KEY, _ADVISED = {"name", "worker"}, {"key", "name"}, {"name"}
LEGACY = {
    **dict.fromkeys(("received_msgs", "received_bytes", "copied_msgs", "copied_bytes"), ("counter", _OLD)),
    **dict.fromkeys(("failed_msgs", "acks_failed"), ("counter", _OLD)),
    **dict.fromkeys(("stream_reconnections", "connection_reconnections"), ("counter", _OLD)),
    **dict.fromkeys(("connection_closed", "connection_errors"), ("counter", _OLD)),
    "processing_time": ("summary", _OLD),
    "current_sequence": ("gauge", _OLD),
    "limiter_memory_seen": ("gauge", _KEY),
    **dict.fromkeys(("limiter_memory_skipped", "limiter_memory_passed", "limiter_memory_errors"), ("counter", _KEY)),
    **{f"advisories_{event}": ("counter", _ADVISED) for event in ("timeout", "recover", "expire", "errors")},
}
_STREAM = {"name", "stream"}
STREAM_METRICS = {
    **dict.fromkeys(("lag_messages", "lag_seconds", "watermark_age_seconds", "paused"), ("gauge", _STREAM)),
    **dict.fromkeys(("outbox_messages", "copy_queue_messages"), ("gauge", _STREAM)),
    "last_success_timestamp_seconds": ("gauge", _STREAM),
    **dict.fromkeys(
        (
            "gap_messages_total",
            "parked_messages_total",
            "impossible_hops_total",
            "refused_metadata_total",
            "refused_senders_total",
            "forged_copies_total",
        ),
        ("counter", _STREAM),
    ),
    "nodes": ("gauge", {*_STREAM, "status"}),
    "messages_total": ("counter", {"name", "stream", "engine"}),
}
#: Metrics from the published tables of partitions, a centre, a topology and heartbeats.
TABLES = {
    **dict.fromkeys(
        ("partition_lag_messages", "partition_next_sequence", "partition_watermark_age_seconds"),
        ("gauge", {*_STREAM, "partition"}),
    ),
    "site_observer_age_seconds": ("gauge", {*_STREAM, "replicator"}),
    "site_blind": ("gauge", {*_STREAM, "replicator"}),
    "site_nodes": ("gauge", {*_STREAM, "replicator", "status"}),
    "link_lag_messages": ("gauge", {"cluster", "stream", "kind", "origin"}),
    "link_active_seconds": ("gauge", {"cluster", "stream", "kind", "origin"}),
    "heartbeat_latency_seconds": ("summary", {*_STREAM, "subject", "quantile"}),
    "hop_latency_seconds": ("summary", {*_STREAM, "quantile"}),
    "heartbeat_age_seconds": ("gauge", {*_STREAM, "subject"}),
}
STREAMS = {
    **{f"sr_assets_{name}": shape for name, shape in STREAM_METRICS.items()},
    **{f"choria_stream_replicator_{name}": shape for name, shape in REPLICATOR.items()},
}
BIRTH = 1_769_860_800.0


def scrape(url: str) -> str:
    """Return the text of an endpoint."""
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text: str = answer.read().decode()
        return text


def shapes(text: str) -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of each metric by the name in its TYPE line."""
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    labels_by_name: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name if family.name in types else f"{family.name}_total"
        labels_by_name[name] = {label for sample in family.samples for label in sample.labels}
    assert set(labels_by_name) == set(types)
    return {name: (types[name], labels) for name, labels in labels_by_name.items()}


def value(text: str, name: str, /, **labels: str) -> float:
    """Return the sum of all samples of a metric with these labels."""
    lines = [line for line in text.splitlines() if line.partition("{")[0] == name]
    wanted = [
        line for line in lines if all(f'{label}="{label_value}"' in line for label, label_value in labels.items())
    ]
    assert wanted, f"no sample of {name} with {labels}"
    return sum(float(line.rpartition(" ")[2]) for line in wanted)


def counters(text: str) -> dict[str, float]:
    """Return every sample of a counter or summary, by name and labels."""
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {
        named: float(number)
        for named, _, number in samples
        if types.get(named.partition("{")[0]) == "counter" or named.partition("{")[0].endswith(("_sum", "_count"))
    }


def from_senders(count: int, size: int = 100) -> list[Sent]:
    """Return one message per sender."""
    return [Sent(json.dumps({"sender": f"n{n}", "fill": "x" * size}).encode()) for n in range(count)]


def test_metrics_have_the_documented_names_types_labels_and_values(rig: Rig) -> None:
    stream, feed = rig.make(), rig.make("FEED")
    messages = [*from_senders(10), *from_senders(10), Sent(b'{"sender": "n1", "now": true}'), Sent(b"nobody")]
    rig.publish(stream, messages)
    rig.add(
        stream,
        inspect_field="sender",
        inspect_force_field="now",
        inspect_duration="10h",
        advisory={"subject": f"{feed}.%s.%v", "reliable": True},
    )
    rig.drain()
    settings = rig.settings(metrics={"legacy": True})
    with MetricsServer(Exposition(settings), "127.0.0.1", 0) as url:
        text = scrape(url)
    legacy = {f"stream_replicator_{name}": shape for name, shape in LEGACY.items()}
    hops = {"sr_assets_hop_latency_seconds": TABLES["hop_latency_seconds"]}
    assert shapes(text) == {**STREAMS, **hops, **legacy}
    replication, worker = rig.row("replication"), {"stream": stream, "replicator": SITE, "worker": SITE}
    for name, column in (
        ("total_messages", "seen_messages"),
        ("copied_messages", "copied_messages"),
        ("copied_bytes", "copied_bytes"),
        ("skipped_messages", "skipped_messages"),
    ):
        assert value(text, f"choria_stream_replicator_replicator_{name}", **worker) == replication[column] > 0
    read_or_copied = len(messages) + replication["copied_messages"]
    assert value(text, "sr_assets_messages_total", name=SITE, stream=stream, engine="local") == read_or_copied
    assert value(text, "sr_assets_messages_total", name=SITE, stream=stream, engine="spark") == 0
    total_bytes = sum(len(message.payload) for message in messages)
    assert value(text, "choria_stream_replicator_replicator_total_bytes", **worker) == total_bytes
    skipped_bytes = total_bytes - replication["copied_bytes"]
    assert value(text, "choria_stream_replicator_replicator_skipped_bytes", **worker) == skipped_bytes
    assert value(text, "choria_stream_replicator_replicator_stream_sequence", **worker) == len(messages)
    assert value(text, "choria_stream_replicator_replicator_processing_time_seconds_count", **worker) == len(messages)
    assert value(text, "choria_stream_replicator_replicator_processing_time_seconds_sum", **worker) > 0
    assert value(text, "choria_stream_replicator_limiter_messages_copy_forced_count", stream=stream) == 1
    assert value(text, "choria_stream_replicator_limiter_messages_without_limit_field_count", stream=stream) == 1
    assert value(text, "choria_stream_replicator_tracker_total_items", **worker) == 10
    assert value(text, "choria_stream_replicator_advisor_total_messages", advisory="new", stream=stream) == 10
    assert value(text, "choria_stream_replicator_advisor_publish_errors", stream=stream) == 0
    assert value(text, "sr_assets_nodes", name=SITE, stream=stream, status="up") == 10
    assert value(text, "stream_replicator_copied_msgs", name=f"{SITE}_0", worker=SITE) == replication["copied_messages"]
    assert value(text, "stream_replicator_limiter_memory_seen", key="sender", name=f"{SITE}_0") == 10
    assert not any(line for line in text.splitlines() if '"n1"' in line), "a label for a node"
    assert shapes(Exposition(rig.settings()).text()) == STREAMS


def test_counters_never_decrease_after_a_killed_run(rig: Rig, tmp_path: Path) -> None:
    stream, port = rig.make(), free_port()
    rig.publish(stream, from_senders(60))
    rig.add(stream, batch_messages=20)
    rig.settings(metrics={"port": port}, logfile=str(tmp_path / "log"), log_format="json")
    marker, url, seen = tmp_path / "held", f"http://127.0.0.1:{port}/metrics", []
    process = start_run(rig, (Point.COMMITTED, marker), mode="--follow")
    try:
        await_marker(process, marker)
        # Log rotation does not affect it. The run is suspended in the middle of its work, with the state open.
        process.send_signal(signal.SIGHUP)
        scrape(url)
        marker.write_text("go on")
        total = "choria_stream_replicator_replicator_total_messages"
        wait_until(lambda: f"{total}{{" in (text := scrape(url)) and value(text, total) == 60, "the run's numbers")
        seen.append(counters(scrape(url)))
        marker.unlink()
        rig.publish(stream, from_senders(60))
        await_marker(process, marker)
        seen.append(counters(scrape(url)))
    finally:
        kill_run(process)
    assert f"{SITE}/{stream}" in {
        json.loads(line).get("stream") for line in (tmp_path / "log").read_text().splitlines()
    }
    settings = rig.settings()
    seen.append(counters(Exposition(settings).text()))
    rig.drain()
    text = Exposition(settings).text()
    seen.append(counters(text))
    for before, after in itertools.pairwise(seen):
        assert set(before) == set(after)
        assert all(after[name] >= number for name, number in before.items())
    # Each batch is counted once, by whichever run committed it.
    payload = sum(len(message.payload) for message in from_senders(60))
    assert value(text, "choria_stream_replicator_replicator_total_bytes") == 2 * payload
    assert value(text, "choria_stream_replicator_replicator_copied_bytes") == 2 * payload
    assert value(text, "choria_stream_replicator_replicator_processing_time_seconds_count") == 120


def test_failure_is_counted_and_keeps_the_last_success(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream)
    rig.drain()
    before = Exposition(rig.settings()).text()
    rig.api(f"STREAM.DELETE.{stream}")
    rig.failure()
    record_idle_poll(rig.home / "sites" / SITE)
    after = Exposition(rig.settings()).text()
    errors, success = (
        "choria_stream_replicator_replicator_handler_error_count",
        "sr_assets_last_success_timestamp_seconds",
    )
    assert (value(before, errors), value(after, errors)) == (0, 1)
    assert value(before, success) == value(after, success) > 0


def test_idle_poll_counts_as_a_success(tmp_path: Path) -> None:
    settings = configured(tmp_path)
    folder = write_stream(tmp_path, SITES[0], {"created_ns": 1, "last_success_ns": int(BIRTH * 1e9)})
    success, exposition = "sr_assets_last_success_timestamp_seconds", Exposition(settings)
    assert value(exposition.text(), success) == BIRTH
    record_idle_poll(folder)
    assert value(exposition.text(), success) == pytest.approx(time.time(), abs=600)


def test_sites_links_and_heartbeats_come_from_published_tables(tmp_path: Path) -> None:
    exposition = Exposition(configured(tmp_path))
    with MetricsServer(exposition, "127.0.0.1", 0) as url:
        assert scrape(url) == ""
        expose_tables(tmp_path)
        wait_until(lambda: "sr_assets_heartbeat_age_seconds" in scrape(url), "the tables")
        text = scrape(url)
    assert shapes(text) == {f"sr_assets_{name}": shape for name, shape in TABLES.items()}
    site = {"name": "EDGE", "stream": STREAM, "replicator": "EDGE"}
    assert value(text, "sr_assets_site_observer_age_seconds", **site) == pytest.approx(90, abs=60)
    assert value(text, "sr_assets_site_blind", **site) == 1
    assert value(text, "sr_assets_site_nodes", **site, status="retired") == 2
    assert value(text, "sr_assets_link_lag_messages", origin="edge/REG") == 7
    assert "edge/OTHER" not in text
    lane = {"name": "london", "stream": STREAM}
    assert value(text, "sr_assets_partition_lag_messages", **lane) == 5
    assert value(text, "sr_assets_partition_next_sequence", **lane, partition="1") == 41
    assert value(text, "sr_assets_partition_watermark_age_seconds", **lane, partition="0") == pytest.approx(20, abs=60)
    assert value(text, "sr_assets_hop_latency_seconds", quantile="0.95") == 2.5
    (family,) = (
        metric
        for metric in text_string_to_metric_families(text)
        if metric.name == "sr_assets_heartbeat_latency_seconds"
    )
    assert {sample.labels["quantile"]: sample.value for sample in family.samples} == {"0.5": 0.1, "0.95": 0.2, "1": 0.4}
    assert family.samples[0].labels["subject"] == 'hb."a"'


def test_empty_home_exposes_nothing_and_other_paths_are_404(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = configured(tmp_path)
    with MetricsServer(Exposition(settings), "127.0.0.1", 0) as url:
        assert scrape(url) == ""
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace("/metrics", "/"), timeout=PATIENCE_SECONDS)
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    assert command("metrics", "--once") == (0, "", "")


@pytest.mark.parametrize("host", ("edge..example.net", "a" * 64))
def test_invalid_metrics_host_is_one_warning(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics_beside(configured(tmp_path, metrics={"port": 1, "host": host})) as url:
        assert url is None
    printed = capsys.readouterr().err
    assert printed.startswith(f"warning: metrics: cannot listen on {host}:1 (")
    assert printed.count("\n") == 1


def test_busy_metrics_port_is_one_warning(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = configured(tmp_path, monitor_port=other.getsockname()[1])
        with metrics_beside(settings) as url:
            assert url is None
        printed = capsys.readouterr().err
        assert printed.startswith(f"warning: metrics: cannot listen on 127.0.0.1:{settings.metrics.port} (")
        assert printed.count("\n") == 1
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
        code, _, printed = command("metrics")
        assert (code, printed.count("\n")) == (1, 1)
        assert printed.startswith("error: metrics: cannot listen")


def test_textfile_is_world_readable_and_a_missing_folder_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "textfiles"
    settings = configured(tmp_path, metrics={"textfile": str(folder / "sr_assets.prom")})
    write_stream(tmp_path, SITES[0], {"created_ns": 1, "lag_messages": 5})
    write_textfile_once(settings)
    printed = capsys.readouterr().err
    assert "sr_assets.prom: cannot be written (No such file or directory)" in printed
    assert printed.count("\n") == 1
    folder.mkdir()
    with metrics_beside(settings) as url:
        wait_until((folder / "sr_assets.prom").exists, "the file")
    assert url is None
    assert [file.name for file in folder.iterdir()] == ["sr_assets.prom"]
    assert stat.S_IMODE((folder / "sr_assets.prom").stat().st_mode) == 0o644
    assert value((folder / "sr_assets.prom").read_text(), "sr_assets_lag_messages", name=SITES[0], stream=STREAM) == 5


def drip(client: socket.socket) -> None:
    while True:
        client.sendall(b"x")
        time.sleep(0.05)


def test_client_that_drips_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.operate.metrics.serving._CLIENT_SECONDS", 0.5)
    with MetricsServer(Exposition(configured(tmp_path)), "127.0.0.1", 0) as url:
        port = int(url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(ConnectionError):
            drip(client)


@pytest.mark.process
def test_stranger_holds_only_a_few_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.operate.metrics.serving._CLIENT_SECONDS", 600.0)
    monkeypatch.setattr("sr_assets.operate.metrics.serving._Handler.timeout", 600.0)
    with MetricsServer(Exposition(configured(tmp_path)), "127.0.0.1", 0) as url:
        address, before = ("127.0.0.1", int(url.split(":")[2].partition("/")[0])), open_descriptors()
        with connected_stranger(address[1], 200):
            assert scrape(url) == ""
            assert open_descriptors() - before < 40
        # One that sends something is no better.
        with connected_stranger(address[1], 200, b"GET / HT"):
            assert scrape(url) == ""


def test_any_request_to_the_metrics_port_is_answered_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException | None] = []
    monkeypatch.setattr(
        "sr_assets.operate.metrics.serving._Server.handle_error", lambda *_: errors.append(sys.exc_info()[1])
    )
    with metrics_port(tmp_path) as address:

        @hypothesis.settings(max_examples=60, deadline=None)
        @given(
            st.sampled_from((b"", b"GET /metrics HTTP/1.1\r\n", b"HEAD /status HTTP/1.0\r\nHost: ", b"GET /healthz?")),
            st.binary(max_size=100),
        )
        def answers(begin: bytes, rest: bytes) -> None:
            with (
                socket.create_connection(address, timeout=PATIENCE_SECONDS) as client,
                contextlib.suppress(ConnectionError),
            ):
                client.sendall(begin + rest + b"\r\n\r\n")
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass

        answers()
    assert not [error for error in errors if not isinstance(error, OSError)]


@contextlib.contextmanager
def metrics_port(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve all parts and yield the address."""
    settings = configured(folder)
    server = MetricsServer(Exposition(settings), "127.0.0.1", 0, PagePublisher(settings), Health(settings))
    with server as url:
        yield "127.0.0.1", int(url.split(":")[2].partition("/")[0])


def test_searches_for_users_take_a_share_of_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [100.0]

    def search(*_: object) -> int:
        now[0] += 0.25
        return 65534

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    server = MetricsServer(Exposition(configured(tmp_path)), "127.0.0.1", 0)
    monkeypatch.setattr("sr_assets.operate.metrics.serving.peer_user", search)
    monkeypatch.setattr("sr_assets.operate.metrics.serving.times", clock)
    ends = ("127.0.0.1", 1), ("127.0.0.1", 2)
    assert [server._server.is_owner(*ends) for _ in range(3)] == [False, False, False]
    assert now[0] - 100.0 == 3 * 0.25 + 2 * 2.5
    server._server.server_close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_answered(url: str) -> bool:
    try:
        scrape(url)
    except (OSError, http.client.HTTPException):
        return False
    return True


def test_concurrent_scrapes_all_succeed(tmp_path: Path) -> None:
    write_stream(tmp_path, SITES[0], {"created_ns": 1, "lag_messages": 5})
    with MetricsServer(Exposition(configured(tmp_path)), "127.0.0.1", 0) as url, ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(scrape, [url] * 8)]
    assert len({value(answer, "sr_assets_lag_messages") for answer in answers}) == 1


@pytest.mark.parametrize(
    ("top", "problem"),
    (
        ({"monitor_port": 99999}, "monitor_port"),
        ({"metrics": {"port": "many"}}, "metrics"),
        ({"monitor_port": 9100, "metrics": {"port": 9200}}, "remove one"),
    ),
)
def test_invalid_metrics_port_is_refused(tmp_path: Path, top: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        configured(tmp_path, **top)
