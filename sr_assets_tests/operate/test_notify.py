"""Notifications to real receivers: a web server, a mail server, a command; their failures; rules; digests."""

import contextlib
import email
import email.policy
import json
import os
import signal
import socketserver
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from datetime import time as datetime_time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psutil
import pyarrow as pa
import pytest
import trustme
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters import control
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import ConfigurationError
from sr_assets.operate.notify import begin_notifying, notify_beside, notify_once
from sr_assets.operate.notify.content import Event, messages
from sr_assets.operate.notify.delivery import _Delivery
from sr_assets.settings import Settings, load_settings
from sr_assets.settings.notify import QuietHours
from sr_assets_tests.exposed import SITES, STREAM, configured, write_stream
from sr_assets_tests.faults.rig import finish, start_run
from sr_assets_tests.rig import PATIENCE_SECONDS, Rig, wait_until
from sr_assets_tests.stages.tracking.test_node_advisories import from_sender

#: A server's own phrase that contains a terminal's codes and the webhook's path.
PHRASE = b"HTTP/1.1 500 \x1b[31m/services/s3cret\r\n\r\n"
NIGHT = {"from": "22:00", "to": "07:00"}


@pytest.fixture(autouse=True)
def _end_of_threads() -> Iterator[None]:
    """Wait for delivery threads to end, because they may print a warning."""
    yield
    wait_until(
        lambda: not any(thread.name.startswith("notify ") for thread in threading.enumerate()), "the deliveries' end"
    )


class Receiver(ThreadingHTTPServer):
    """A web server that stores posted bodies and responds with `code` or `line`, or never if it `hangs`.

    It answers 401 to the first `refused` requests, and 403 to a body that contains `refuses`, as a firewall for web
    applications does.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Post)
        self.bodies: list[dict[str, Any]] = []
        self.requests, self.refused, self.code, self.line = 0, 0, 200, b""
        self.refuses = ""
        self.keys: list[str] = []
        self.hangs, self.ended = False, threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect."""

    @property
    def url(self) -> str:
        """The URL of the webhook."""
        return f"http://127.0.0.1:{self.server_address[1]}/services/s3cret"

    @property
    def ids(self) -> list[str]:
        """The ids of all received events, in order."""
        return [event_id for body in self.bodies for event_id in body.get("event_ids") or [body["event_id"]]]


class _Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        """Receive a notification."""
        body, code = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server.code
        self.server.requests += 1
        if self.server.requests <= self.server.refused:
            code = 401
        self.server.keys.append(self.headers["Idempotency-Key"])
        if self.server.hangs:
            self.server.ended.wait(PATIENCE_SECONDS)
            return
        if self.server.line:
            self.wfile.write(self.server.line)
            return
        if self.server.refuses and self.server.refuses in json.dumps(body):
            code = 403
        if code == 200:
            self.server.bodies.append(body)
        self.send_response(code)
        self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """Serve the target of the redirects."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """Run a receiver inside the block."""
    receiver = Receiver(port)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    try:
        yield receiver
    finally:
        receiver.ended.set()
        receiver.shutdown()
        receiver.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Run a receiver that accepts everything."""
    with receiving() as opened:
        yield opened


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without a pause."""
    monkeypatch.setattr("sr_assets.operate.notify.delivery._FIRST_PAUSE_SECONDS", 0.0)


def publish(
    home: Path, *nodes: str, event: str = "timeout", batch: int = 1, node_class: str | None = None
) -> list[str]:
    """Publish one transition per node, detected at the same time; returns their ids."""
    began = home / "began"
    if not began.exists():
        began.write_text(str(time.time_ns()))
    at_ns = int(began.read_text()) // 1000 * 1000 + batch * 1_000_000_000
    rows = [
        {
            "event_id": f"{batch}-{event}-{node}",
            "stream": STREAM,
            "node": node,
            "event": event,
            "event_ns": at_ns,
            "detected_ns": at_ns,
            "age_ns": 90_000_000_000,
            "transition": batch,
            "outbox": False,
            "class": node_class,
        }
        for node in nodes
    ]
    with SiteState(home / "sites" / SITES[0]) as state:
        with state.transaction():
            state.save_stream(StreamState(STREAM, 1, 8, watermark_ns=at_ns, as_of_ns=at_ns))
            if rows:
                state.add_rows("transitions", pa.Table.from_pylist(rows))
        streams = [PublishedStream(STREAM, "COPY", tracked=True)]
        publish_site(home, SITES[0], state, streams, sites=[SITES[0]], run=Run(at_ns, "run"))
    return [str(row["event_id"]) for row in rows]


def publish_outage(home: Path) -> list[str]:
    """Publish the site events of an outage: partial, dark, restored; returns their ids."""
    with SiteState(home / "sites" / SITES[0]) as state, state.transaction():
        for number, event in enumerate(("partial", "dark", "restored")):
            values = [event, STREAM, event, number + 1, 40, 30, 1, 2 * 10**18 + number]
            state.connection.execute(
                """
                INSERT INTO site_events (event_id, stream, event, event_ns, nodes, silent, since_ns, detected_ns)
                VALUES (?, ?, ?, ?, ?, ?, ?, ?)
                """,
                values,
            )
    publish(home)
    return ["partial", "dark", "restored"]


def quiet_now(**more: Any) -> dict[str, Any]:
    """Return quiet hours that began an hour ago and end in an hour."""
    hour = timedelta(hours=1)
    begin, end = (f"{datetime.now(UTC) + difference:%H:%M:%S}" for difference in (-hour, hour))
    return {"quiet_hours": {"from": begin, "to": end, **more}}


def later(monkeypatch: pytest.MonkeyPatch, **difference: float) -> None:
    """Set the clock of the deliveries ahead."""
    at = time.time() + timedelta(**difference).total_seconds()
    monkeypatch.setattr("sr_assets.operate.notify.delivery.times.time", lambda: at)


def fail(home: Path, reason: str | None) -> None:
    """Let the stream of the first site fail, or recover."""
    write_stream(home, SITES[0], {"created_ns": 1, "last_error": reason, "last_error_since_ns": 1_000_000})


def notifying(home: Path, *targets: dict[str, Any]) -> Settings:
    """Return a configuration with these targets, which start now."""
    settings = configured(home, notify=list(targets))
    begin_notifying(settings)
    return settings


def test_each_event_is_sent_once_with_a_text_for_slack(tmp_path: Path, receiver: Receiver) -> None:
    publish(tmp_path, "old")
    settings = notifying(tmp_path, {"webhook": receiver.url})
    ids = publish(tmp_path, "web1", "web2", batch=2)
    publish(tmp_path, "web3", event="new", batch=3)
    for _ in range(2):
        notify_once(settings)
    assert receiver.ids == ids
    first = receiver.bodies[0]
    assert first["text"].startswith("web1 is silent after 90 s (london/REG, 20")
    assert (first["event_id"], first["event"], first["node"]) == (ids[0], "timeout", "web1")
    # A later batch with the same detection time is not mistaken for the earlier one.
    later = publish(tmp_path, "web4", batch=3)
    notify_once(settings)
    assert receiver.ids == [*ids, *later]


def test_events_are_resent_after_the_receiver_recovers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with receiving() as closed:
        port = closed.server_address[1]
    settings = notifying(tmp_path, {"name": "ops", "webhook": f"http://127.0.0.1:{port}/services/s3cret"})
    ids = publish(tmp_path, "web1")
    notify_once(settings)
    printed = capsys.readouterr().err
    assert (
        printed
        == "warning: notify ops (webhook 127.0.0.1): Connection refused; 1 events are pending and will be retried\n"
    )
    with receiving(port) as back:
        back.code = 500
        ids += publish(tmp_path, "web2", batch=2)
        with notify_beside(settings):
            wait_until(lambda: back.requests >= 2, "two attempts")
            assert back.bodies == []
            back.code = 200
            wait_until(lambda: back.ids == ids, "the refused events")
        printed = capsys.readouterr().err
        assert printed == (
            "warning: notify ops (webhook 127.0.0.1): answered 500 Internal Server Error;"
            " 2 events are pending and will be retried\n"
        )
        notify_once(settings)
        assert back.ids == ids


def test_name_that_a_receiver_refuses_holds_up_no_event(
    tmp_path: Path, receiver: Receiver, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = configured(tmp_path, notify=[{"webhook": receiver.url}])
    begin_notifying(settings)
    receiver.refuses = "<script"
    publish(tmp_path, "<script>alert(1)</script>", "web1")
    with notify_beside(settings):
        wait_until(lambda: len(receiver.bodies) == 2, "both messages")
    (withheld,) = (body for body in receiver.bodies if "event_ids" in body)
    (other,) = (body for body in receiver.bodies if "event_ids" not in body)
    assert other["node"] == "web1"
    assert withheld["counts"] == {"timeout": 1}
    assert SITES[0] in withheld["text"]
    assert "sent 1 events without names and reasons" in capsys.readouterr().err


def test_receiver_that_refuses_everything_gets_all_later(tmp_path: Path, receiver: Receiver, quick: None) -> None:
    settings = configured(tmp_path, notify=[{"webhook": receiver.url}])
    begin_notifying(settings)
    # Four attempts; after the third and the fourth comes the message without its details.
    receiver.refused = 6
    (event_id,) = publish(tmp_path, "web1")
    with notify_beside(settings):
        wait_until(lambda: bool(receiver.bodies), "the message")
    assert receiver.bodies[0]["event_id"] == event_id
    assert receiver.bodies[0]["node"] == "web1"


def test_name_is_no_mention_link_or_line_in_a_chat(tmp_path: Path, receiver: Receiver) -> None:
    settings = configured(tmp_path, notify=[{"webhook": receiver.url}])
    begin_notifying(settings)
    names = ["<!channel>", "<https://evil|sign in>", "@all", "[sign in](https://evil)", "web1\nweb2 is retired"]
    publish(tmp_path, *names)
    notify_once(settings)
    bodies = {body["node"]: body for body in receiver.bodies}
    assert bodies.keys() == set(names)
    for body in bodies.values():
        assert not any(each in body["text"] for each in ("<", ">", "@a", "](", "://", "\n"))
        assert "\n" not in body["plain_text"]
    assert bodies["<!channel>"]["text"].startswith("&lt;!channel&gt; is silent")
    assert bodies["@all"]["plain_text"].startswith("@all is silent")


def test_events_are_discarded_a_day_after_their_own_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    clock = time.time()

    def attempt_after(hours: float) -> None:
        nonlocal clock
        clock += hours * 3_600
        monkeypatch.setattr("sr_assets.operate.notify.delivery.times.time", lambda: clock)
        notify_once(settings)

    with receiving() as receiver:
        receiver.code = 500
        settings = notifying(tmp_path, {"name": "ops", "webhook": receiver.url})
        publish(tmp_path, "first")
        attempt_after(0)
        second = publish(tmp_path, "second", batch=2)
        attempt_after(23)
        attempt_after(2)
        receiver.code = 200
        attempt_after(1)
        assert receiver.ids == second, "the first one has failed for 25 hours, the second one for 3"
        # After all pending events are done, a later outage counts from its own start.
        receiver.code = 500
        third = publish(tmp_path, "third", batch=3)
        attempt_after(48)
        receiver.code = 200
        attempt_after(1)
        assert receiver.ids == [*second, *third]


def test_failures_of_events_that_are_gone_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    with receiving() as receiver:
        receiver.code = 500
        settings = notifying(tmp_path, {"name": "ops", "webhook": receiver.url, "events": ["timeout"]})
        publish(tmp_path, "web1")
        notify_once(settings)
        others = configured(tmp_path, notify=[{"name": "ops", "webhook": receiver.url, "events": ["expire"]}])
        notify_once(others)
        ids = publish(tmp_path, "web2", event="expire", batch=2)
        later = time.time() + 48 * 3_600
        monkeypatch.setattr("sr_assets.operate.notify.delivery.times.time", lambda: later)
        notify_once(others)
        receiver.code = 200
        notify_once(others)
        assert receiver.ids == ids


def test_hanging_receiver_delays_no_other(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who waits for its answer waits for ever.
    monkeypatch.setattr("sr_assets.operate.notify.targets._ANSWER_SECONDS", 3_600.0)
    with receiving() as hanging:
        hanging.hangs = True
        settings = notifying(tmp_path, {"webhook": hanging.url}, {"webhook": receiver.url})
        ids = publish(tmp_path, "web1")
        with notify_beside(settings):
            wait_until(lambda: hanging.requests == 1 and receiver.ids == ids, "a request to both")


def test_hundreds_of_events_become_one_digest_with_every_id(tmp_path: Path, receiver: Receiver) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    ids = publish(tmp_path, *(f"n{n:03}" for n in range(300)))
    notify_once(settings)
    (digest,) = receiver.bodies
    assert digest["digest"]
    assert digest["counts"] == {"timeout": 300}
    assert digest["event_ids"] == ids
    assert digest["text"].startswith("300 timeout (london/REG)\nn000 is silent")
    assert digest["text"].endswith("and 290 more")


def test_many_events_become_one_digest_per_site_and_class(tmp_path: Path, receiver: Receiver) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    web = publish(tmp_path, *(f"web{n:03}" for n in range(30)), node_class="web")
    db = publish(tmp_path, *(f"db{n:03}" for n in range(20)), node_class="db")
    (alone,) = publish(tmp_path, "other")
    notify_once(settings)
    by_class = {body.get("groups", [{}])[0].get("class"): body for body in receiver.bodies}
    assert sorted(by_class["web"]["event_ids"]) == sorted(web)
    assert sorted(by_class["db"]["event_ids"]) == sorted(db)
    assert by_class["db"]["groups"] == [{"name": "london", "class": "db", "counts": {"timeout": 20}}]
    assert by_class["db"]["text"].startswith("20 timeout (london/REG, class db)\n")
    assert by_class[None]["event_id"] == alone
    assert len(receiver.bodies) == 3


def test_many_classes_become_one_digest_with_a_count_for_each(tmp_path: Path, receiver: Receiver) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    ids = [publish(tmp_path, f"n{n}", node_class=f"class{n}")[0] for n in range(20)]
    notify_once(settings)
    (digest,) = receiver.bodies
    assert sorted(digest["event_ids"]) == sorted(ids)
    assert {group["class"]: group["counts"] for group in digest["groups"]} == {
        f"class{n}": {"timeout": 1} for n in range(20)
    }


def test_outage_is_one_message_per_site_event(tmp_path: Path, receiver: Receiver) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    ids = publish_outage(tmp_path)
    notify_once(settings)
    assert [body["event_id"] for body in receiver.bodies] == ids
    assert receiver.bodies[1]["text"].startswith("london/REG is dark: 30 of 40 nodes are silent (london/REG, 1970")


def test_quiet_hours_end_with_one_summary_of_all_events(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url, **quiet_now()})
    ids = publish(tmp_path, *(f"n{n:04}" for n in range(1_500)), node_class="web")
    fail(tmp_path, "source stream REG is missing; create it")
    notify_once(settings)
    # A failure that is over is reported as well.
    fail(tmp_path, None)
    ids += publish(tmp_path, "last", event="expire", batch=2)
    notify_once(settings)
    assert receiver.bodies == []
    later(monkeypatch, hours=2)
    fresh = publish(tmp_path, "fresh", batch=3)
    for _ in range(2):
        notify_once(settings)
    (summary,) = receiver.bodies
    assert summary["summary"]
    assert summary["counts"] == {"timeout": 1_501, "expire": 1, "failed": 1}
    assert {"name": "london", "class": "web", "counts": {"timeout": 1_500}} in summary["groups"]
    assert set(summary["event_ids"]) > {*ids, *fresh}
    assert len(summary["event_ids"]) == len(ids) + 2
    assert len(summary["events"]) == 1_000
    assert summary["text"].startswith("1503 events since 20")
    after = publish(tmp_path, "after", batch=7_300)
    notify_once(settings)
    assert receiver.bodies[1]["event_id"] == after[0]


def test_summary_outlives_deleted_rows_and_a_refusing_receiver(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    receiver.code = 500
    settings = notifying(tmp_path, {"webhook": receiver.url, **quiet_now()})
    ids = publish(tmp_path, "web1", "web2")
    notify_once(settings)
    with SiteState(tmp_path / "sites" / SITES[0]) as state, state.transaction():
        state.connection.execute("DELETE FROM transitions")
    publish(tmp_path)
    later(monkeypatch, hours=2)
    notify_once(settings)
    assert receiver.bodies == []
    receiver.code = 200
    for _ in range(2):
        notify_once(settings)
    (summary,) = receiver.bodies
    assert summary["event_ids"] == ids


def test_events_of_quiet_hours_without_a_process_are_one_summary(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url, **quiet_now()})
    ids = publish(tmp_path, "web1", "web2")
    later(monkeypatch, hours=2)
    notify_once(settings)
    (summary,) = receiver.bodies
    assert summary["event_ids"] == ids


def test_rate_limit_ends_with_one_summary_and_survives_restarts(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url, "rate_limit": {"messages": 3, "within": "10m"}})
    first = publish(tmp_path, *(f"a{n}" for n in range(5)))
    for _ in range(2):
        notify_once(settings)
    assert receiver.ids == first[:3]
    second = publish(tmp_path, *(f"b{n}" for n in range(40)), batch=2)
    later(monkeypatch, minutes=9)
    notify_once(settings)
    assert len(receiver.bodies) == 3
    later(monkeypatch, minutes=11)
    for _ in range(2):
        notify_once(settings)
    assert len(receiver.bodies) == 4
    assert receiver.bodies[3]["counts"] == {"timeout": 42}
    assert sorted(receiver.bodies[3]["event_ids"]) == sorted([*first[3:], *second])
    third = publish(tmp_path, "c", batch=3)
    notify_once(settings)
    assert receiver.bodies[4]["event_id"] == third[0], "the summary took one of three messages"


def test_removed_limits_release_the_summary(tmp_path: Path, receiver: Receiver) -> None:
    target = {"name": "ops", "webhook": receiver.url}
    settings = notifying(tmp_path, {**target, **quiet_now()})
    ids = publish(tmp_path, "web1")
    notify_once(settings)
    assert receiver.bodies == []
    notify_once(configured(tmp_path, notify=[target]))
    assert receiver.ids == ids


@given(
    begin=st.times(),
    end=st.times(),
    days=st.sets(st.sampled_from(("mon", "tue", "wed", "thu", "fri", "sat", "sun")), max_size=6),
    zone=st.sampled_from(("UTC", "Europe/London", "America/New_York", "Asia/Kolkata")),
    seconds=st.integers(0, 365 * 86_400),
)
def test_quiet_hours_cover_the_times_from_begin_to_end(
    begin: datetime_time, end: datetime_time, days: set[str], zone: str, seconds: int
) -> None:
    begin, end = begin.replace(microsecond=0), end.replace(microsecond=0)
    hours = QuietHours.model_validate(
        {"from": begin.isoformat(), "to": end.isoformat(), "days": sorted(days), "timezone": zone}
    )
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    local = at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    expected = False
    for day in (local.date() - timedelta(days=1), local.date()):
        begins = datetime.combine(day, begin)
        ends = datetime.combine(day + timedelta(days=begin >= end), end)
        expected |= begins <= local < ends and (not days or f"{day:%a}".lower() in days)
    assert hours.cover(at) == expected


def test_events_that_cannot_be_read_for_a_while_are_sent_once(tmp_path: Path, receiver: Receiver) -> None:
    settings = notifying(tmp_path, {"name": "ops", "webhook": receiver.url})
    ids, fleet = publish(tmp_path, "web1", "web2"), tmp_path / "fleet.duckdb"
    notify_once(settings)
    published = fleet.read_bytes()
    fleet.write_bytes(b"of another version" * 1_000)
    fail(tmp_path, "source stream REG is missing; create it")
    notify_once(settings)
    assert receiver.bodies[-1]["event"] == "failed"
    later_target = [{"name": name, "webhook": receiver.url} for name in ("ops", "later")]
    both = notifying(tmp_path, *later_target)
    fleet.unlink()
    notify_once(settings)
    fleet.write_bytes(published)
    notify_once(configured(tmp_path, SITES[1], notify=later_target))
    notify_once(both)
    assert [event_id for event_id in receiver.ids if event_id in ids] == ids


def test_progress_of_another_shape_starts_anew(tmp_path: Path, receiver: Receiver) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    publish(tmp_path, "web1")
    assert control.change(tmp_path, "UPDATE notified SET progress = '[]'") == 1
    notify_once(settings)
    ids = publish(tmp_path, "web2", batch=2)
    notify_once(settings)
    assert receiver.ids == ids


def test_nodes_after_min_nodes_are_sent_in_the_same_window(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url, "min_nodes": 3})
    ids = publish(tmp_path, "a", "b", "c")
    notify_once(settings)
    ids += publish(tmp_path, "d", batch=2)
    notify_once(settings)
    assert receiver.ids == ids
    later(monkeypatch, minutes=10)
    publish(tmp_path, "e", batch=600)
    notify_once(settings)
    assert receiver.ids == ids


def test_repetition_with_other_events_has_another_key(tmp_path: Path, receiver: Receiver, quick: None) -> None:
    receiver.code = 500
    settings = notifying(tmp_path, {"webhook": receiver.url})
    ids = publish(tmp_path, *(f"n{n:02}" for n in range(11)))
    notify_once(settings)
    assert len(set(receiver.keys)) == 1
    receiver.code = 200
    ids += publish(tmp_path, "late", batch=2)
    notify_once(settings)
    assert receiver.ids == ids
    assert len(set(receiver.keys)) == 2, "a receiver that drops repeated keys would lose the late event"


def test_response_that_never_ends_counts_as_none(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    monkeypatch.setattr("sr_assets.operate.notify.targets._ANSWER_SECONDS", 0.5)

    def drip(answer: _Post) -> None:
        with contextlib.suppress(OSError):
            while not receiver.ended.wait(0.001):
                answer.wfile.write(b"H")

    monkeypatch.setattr(_Post, "do_POST", drip)
    settings = notifying(tmp_path, {"webhook": receiver.url})
    publish(tmp_path, "web1")
    notify_once(settings)
    assert "no response within 0 s; 1 events are pending" in capsys.readouterr().err


@pytest.mark.parametrize("code", (301, 302, 303, 307, 308))
def test_redirect_does_not_count_as_delivery(
    code: int, tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    numbers = publish(tmp_path, "web1")
    receiver.code = code
    notify_once(settings)
    printed = capsys.readouterr().err
    assert f"answered {code}" in printed
    assert "s3cret" not in printed
    receiver.code = 200
    notify_once(settings)
    assert receiver.ids == numbers


@pytest.mark.parametrize(
    "line", (b"hello\r\n\r\n", b"HTTP/1.1 200 " + b"x" * 70_000 + b"\r\n\r\n", b"HTTP/1.1 5\r\n", PHRASE)
)
def test_response_that_is_not_http_is_retried(
    line: bytes, tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    numbers = publish(tmp_path, "web1")
    receiver.line = line
    notify_once(settings)
    printed = capsys.readouterr().err
    assert printed.startswith("warning: notify 1 (webhook 127.0.0.1): ")
    assert printed.count("\n") == 1
    assert "s3cret" not in printed
    assert "\x1b" not in printed
    receiver.line = b""
    notify_once(settings)
    assert receiver.ids == numbers


def test_rules_select_events_by_kind_node_site_and_number(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        by = {name: stack.enter_context(receiving()) for name in ("events", "match", "sites", "many")}
        settings = configured(
            tmp_path,
            *SITES,
            notify=[
                {"name": "events", "webhook": by["events"].url, "events": ["new", "recover"]},
                {"name": "match", "webhook": by["match"].url, "match": "db*"},
                {"name": "sites", "webhook": by["sites"].url, "sites": [SITES[1]]},
                {"name": "many", "webhook": by["many"].url, "min_nodes": 3},
            ],
        )
        begin_notifying(settings)
        silent = publish(tmp_path, "web1", "db1")
        fresh = publish(tmp_path, "web2", event="new", batch=2)
        notify_once(settings)
        assert by["events"].ids == fresh
        assert by["match"].ids == [silent[1]]
        assert by["sites"].ids == by["many"].ids == []
        # A third silent node within the window reaches min_nodes.
        silent += publish(tmp_path, "web3", batch=3)
        notify_once(settings)
        assert sorted(by["many"].ids) == sorted(silent)
        assert len(by["many"].bodies) == 1


def test_unexpected_error_ends_no_deliveries(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    ids = publish(tmp_path, "web1")
    with monkeypatch.context() as patched, notify_beside(settings):
        patched.setattr("sr_assets.operate.notify.delivery.lock", lambda _: 1 / 0)
        wait_until(lambda: "division by zero; retrying" in caplog.text, "a warning")
        patched.undo()
        wait_until(lambda: receiver.ids == ids, "the event")


def test_failing_stream_is_reported_once_with_its_reason(tmp_path: Path, receiver: Receiver) -> None:
    settings = notifying(tmp_path, {"webhook": receiver.url})
    failure = {
        "created_ns": 1,
        "last_error": "source stream REG is missing; create it",
        "last_error_since_ns": 1_000_000,
    }
    write_stream(tmp_path, SITES[0], failure)
    for _ in range(2):
        notify_once(settings)
    (body,) = receiver.bodies
    assert body["text"] == "london/REG failed: source stream REG is missing; create it"
    write_stream(tmp_path, SITES[0], {**failure, "last_error_since_ns": 2_000_000})
    notify_once(settings)
    assert len(receiver.bodies) == 2


class _Smtp(socketserver.StreamRequestHandler):
    """A mail server that refuses only the recipient `nobody`, and answers QUIT with `bye`."""

    bye = b"221 bye\r\n"

    def handle(self) -> None:
        """Speak just enough SMTP."""
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline():
            if line.upper().startswith(b"DATA"):
                self.wfile.write(b"354 go on\r\n")
                mail = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.mails.append(mail.decode())  # type: ignore[attr-defined]
            if line.upper().startswith(b"QUIT"):
                self.wfile.write(self.bye)
                return
            self.wfile.write(b"550 no such user\r\n" if b"<nobody@" in line else b"250 ok\r\n")


@contextlib.contextmanager
def mail_server(
    handler: type[socketserver.StreamRequestHandler] = _Smtp, context: ssl.SSLContext | None = None
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Run a mail server inside the block, with TLS if there is a context; yield a target's `email` and the received mails."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        mails: list[str] = []
        server.mails = mails  # type: ignore[attr-defined]
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = {"host": "127.0.0.1", "port": server.server_address[1]}
        yield {**address, "sender": "sr@example.net", "to": ["ops@example.net"]}, mails
        server.shutdown()


def test_mail_contains_text_and_ids(tmp_path: Path) -> None:
    with mail_server() as (by_mail, mails):
        settings = notifying(tmp_path, {"email": by_mail})
        (number,) = publish(tmp_path, "web1")
        notify_once(settings)
    (mail,) = (email.message_from_string(text, policy=email.policy.default) for text in mails)
    assert mail["Subject"].strip().startswith("sr-assets: web1 is silent after 90 s")
    assert (mail["From"], mail["To"]) == ("sr@example.net", "ops@example.net")
    assert number in mail.get_content()


def test_refused_recipient_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mail_server() as (by_mail, mails):
        settings = notifying(tmp_path, {"email": {**by_mail, "to": ["ops@example.net", "nobody@example.net"]}})
        publish(tmp_path, "web1")
        for _ in range(2):
            notify_once(settings)
    assert len(mails) == 1
    warning = "warning: notify: the mail server 127.0.0.1 refused these recipients: nobody@example.net\n"
    assert capsys.readouterr().err == warning


def test_accepted_mail_is_sent_once_whatever_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    class Rude(_Smtp):
        bye = b"421 too busy\r\n"

    with mail_server(Rude) as (by_mail, mails):
        settings = notifying(tmp_path, {"email": by_mail})
        publish(tmp_path, "web1")
        for _ in range(2):
            notify_once(settings)
    assert (len(mails), capsys.readouterr().err) == (1, "")


def test_mail_server_that_drips_holds_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    class Dripping(_Smtp):
        def handle(self) -> None:
            """Send a greeting that never ends."""
            while True:
                self.wfile.write(b"220-patience\r\n")
                time.sleep(0.05)

    monkeypatch.setattr("sr_assets.operate.notify.targets._MAIL_SECONDS", 0.5)
    with mail_server(Dripping) as (by_mail, _):
        settings = notifying(tmp_path, {"email": by_mail})
        publish(tmp_path, "web1")
        notify_once(settings)
    assert "did not take the mail within 0 s; 1 events are pending" in capsys.readouterr().err


def test_mail_server_with_untrusted_certificate_gets_no_mail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with mail_server(context=context) as (by_mail, mails):
        settings = notifying(tmp_path, {"email": {**by_mail, "tls": "tls"}})
        publish(tmp_path, "web1")
        notify_once(settings)
    assert "the certificate is not trusted (" in capsys.readouterr().err
    assert mails == []


@pytest.mark.process
def test_background_process_of_a_command_delays_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, taken = tmp_path / "tell", tmp_path / "taken"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path / 'pid'}\ncat >> {taken}\n")
    script.chmod(stat.S_IRWXU)
    settings = notifying(tmp_path, {"command": [str(script)]})
    (number,) = publish(tmp_path, "web1")
    for _ in range(2):
        notify_once(settings)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert json.loads(taken.read_text())["event_id"] == number
    assert capsys.readouterr().err == ""


@pytest.mark.process
def test_processes_of_a_hanging_command_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    monkeypatch.setattr("sr_assets.operate.notify.targets._ANSWER_SECONDS", 2.0)
    script, pid = tmp_path / "tell", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {pid}.new; mv {pid}.new {pid}\nwait\n")
    script.chmod(stat.S_IRWXU)
    settings = notifying(tmp_path, {"command": [str(script)]})
    publish(tmp_path, "web1")
    notify_once(settings)
    assert "did not end within 2 s; 1 events are pending" in capsys.readouterr().err
    wait_until(lambda: not psutil.pid_exists(int(pid.read_text())), "the end of the command's child")


@pytest.mark.process
def test_command_gets_no_password_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "environment"
    variables = {"SOURCE_PASSWORD": "s3cret", "PAGER_KEY": "key", "HOME": str(tmp_path), "OTHER": "value"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = ["sh", "-c", f"env > {file}"]
    (tmp_path / "replication.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "EDGE",
                "state_store": "${HOME}",
                "streams": [
                    {"stream": "REG", "source_url": "nats://u:${SOURCE_PASSWORD}@127.0.0.1", "target_url": "b"}
                ],
                "notify": [{"command": command, "environment": ["PAGER_KEY"], "name": "${PAGER_KEY}"}],
            }
        )
    )
    settings = load_settings(tmp_path / "replication.yaml")
    event = Event("1", "EDGE", "REG", "timeout", datetime.now(UTC), datetime.now(UTC), node="web1")
    _Delivery(settings, settings.notify[0])._send_message(messages([event], together=False)[0])
    seen = dict(line.partition("=")[::2] for line in file.read_text().splitlines())
    assert {name: seen.get(name) for name in variables} == {**variables, "SOURCE_PASSWORD": None}


@pytest.mark.process
def test_failing_command_is_retried_with_the_same_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, taken = tmp_path / "tell", tmp_path / "taken"
    script.write_text(f"#!/bin/sh\ntest -e {taken} || {{ touch {taken}; echo not yet >&2; exit 3; }}\ncat > {taken}\n")
    script.chmod(stat.S_IRWXU)
    settings = notifying(tmp_path, {"command": [str(script)]})
    (number,) = publish(tmp_path, "web1")
    notify_once(settings)
    assert json.loads(taken.read_text())["event_id"] == number
    assert "ended with exit code 3: not yet; 1 events are pending" in capsys.readouterr().err


def test_command_line_run_sends_notifications(rig: Rig, receiver: Receiver) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a", "b"))
    rig.add(stream, inspect_field="sender", inspect_duration="10m")
    rig.settings(notify=[{"webhook": receiver.url, "events": ["new"]}])
    finish(start_run(rig))
    assert sorted(body["node"] for body in receiver.bodies) == ["a", "b"]


@pytest.mark.parametrize(
    ("target", "problem"),
    (
        ({}, "needs exactly one of webhook, command and email"),
        ({"webhook": "ftp://example.net/s3cret"}, "is not a webhook URL"),
        ({"webhook": "http://a/b", "command": "c"}, "needs exactly one"),
        ({"command": "c", "events": ["gone"]}, "'gone' is not one of new, timeout"),
        ({"command": "c", "sites": ["atlantis"]}, "'atlantis' is no entry's name; there are: london"),
        ({"email": {"host": "h", "sender": "a"}}, "to"),
        ({"email": {"host": "h", "sender": "a@b", "to": []}}, "to: is empty"),
        (
            {"email": {"host": "h", "sender": "a@b", "to": "c@d", "user": "u", "password": "s3cret"}},
            "password: would travel unencrypted to h; set tls: starttls or tls: tls",
        ),
        ({"email": {"host": "h", "sender": "a@b", "to": ["c d"]}}, "'c d' is not an address"),
        ({"webhook": "https://example.net:99999x/s3cret"}, "is not a webhook URL"),
        ({"webhook": "https://example.net/s3 cret"}, "is not a webhook URL"),
        ({"webhook": "https://me:s3cret@example.net/"}, "has a login"),
        ({"command": "c", "rate_limit": {"within": "1h"}}, "rate_limit.messages: is required"),
        ({"command": "c", "rate_limit": {"messages": 0}}, "messages: 0 is not a whole number"),
        ({"command": "c", "rate_limit": {"messages": 5, "within": "0s"}}, "within: '0s' must be longer than zero"),
        ({"command": "c", "quiet_hours": {"from": "22:00"}}, "quiet_hours.*to: is required"),
        ({"command": "c", "quiet_hours": {"from": "24:00", "to": "07:00"}}, "'24:00' is not a time of day; use HH:MM"),
        ({"command": "c", "quiet_hours": {"from": 22, "to": "07:00"}}, "22 is not text"),
        ({"command": "c", "quiet_hours": {**NIGHT, "days": ["funday"]}}, "'funday' is not one of mon, tue"),
        ({"command": "c", "quiet_hours": {**NIGHT, "timezone": "Mars"}}, "'Mars' is not a time zone"),
        ({"command": "c", "quiet_hours": [NIGHT, {"from": "07:00", "to": "22:00"}]}, "cover the whole week"),
        ({"command": "c", "quiet_hours": {"from": "00:00", "to": "00:00"}}, "cover the whole week"),
    ),
)
def test_invalid_notification_target_is_refused(tmp_path: Path, target: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        configured(tmp_path, notify=[target])
    assert "s3cret" not in str(refused.value)


def test_webhook_with_untrusted_certificate_is_one_warning(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    receiver.socket = context.wrap_socket(receiver.socket, server_side=True)
    settings = notifying(tmp_path, {"webhook": receiver.url.replace("http:", "https:")})
    publish(tmp_path, "web1")
    notify_once(settings)
    printed = capsys.readouterr().err
    assert printed.startswith("warning: notify 1 (webhook 127.0.0.1): the certificate is not trusted (")
    assert printed.count("\n") == 1
    assert "s3cret" not in printed
    assert receiver.bodies == []
