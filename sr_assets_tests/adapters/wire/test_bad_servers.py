"""Servers that break the protocol or the connection, or refuse: each causes a one-line error in time.

Most tests script the server with a plain socket; the last ones use real servers that misbehave.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

import pytest

from sr_assets.adapters.wire import (
    Ack,
    Connection,
    Outgoing,
    Publisher,
    WireError,
    next_message,
    read_confirmed,
    read_range,
    read_sequences,
    stored_message,
)
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import ClusterSettings
from sr_assets_tests.adapters.wire.rig import create_stream, flat, outgoing, publish
from sr_assets_tests.rig import PATIENCE_SECONDS, address, in_background, wait_until
from sr_assets_tests.servers import NatsServer

SECRET = "hunter2"
INFO = b'INFO {"server_id":"X","version":"2.15.1","max_payload":1024,"headers":true}\r\n'
BLOCK = (
    b"NATS/1.0\r\nNats-Stream: S\r\nNats-Subject: a\r\nNats-Sequence: 1\r\n"
    b"Nats-Time-Stamp: 2026-03-15T13:48:10Z\r\nNats-Num-Pending: 5\r\nNats-Last-Sequence: 0\r\n\r\n"
)
#: Errors of nats-server: two permissions, whose text gets a remedy, and others.
SERVER_ERRORS = (
    'Permissions Violation for Publish to "a.b"',
    'Permissions Violation for Subscription to "_INBOX.>"',
    "Authorization Violation",
    "an error of a later server",
)

Step = bytes | Callable[[bytes, bytes], bytes] | None


class End(StrEnum):
    """The end of a scripted server, after its last step."""

    SILENCE = "silence"
    #: Close, but read the remaining data: the client reads the end of the stream.
    FIN = "fin"
    #: Close without reading the remaining data: the client's next call reports a connection reset.
    RST = "rst"


CLOSING_ENDS = (End.FIN, End.RST)


@contextmanager
def scripted_server(*steps: Step, end: End = End.SILENCE, patience: float = 10.0) -> Iterator[ClusterSettings]:
    """Run a server that follows a script.

    A step is bytes to send, a function that returns the response to the next request from its subject and inbox, or
    None: await the login and accept it. After the last step the server stays silent until the test ends, or closes the
    connection.
    """
    test_ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def play() -> None:
            with suppress(OSError), server.accept()[0] as client:
                # Send without delay: a reset would discard data that is still buffered.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for step in steps:
                    if step is None:
                        _read_until(client, b"PING\r\n")
                        client.sendall(b"PONG\r\n")
                    else:
                        client.sendall(step if isinstance(step, bytes) else step(*_request(client)))
                if end is End.SILENCE:
                    test_ended.wait()
                elif end is End.RST:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass

        port = server.getsockname()[1]
        with in_background(play):
            try:
                servers = (f"127.0.0.1:{port}",)
                yield ClusterSettings(servers, user="me", password=SECRET, connect_timeout_seconds=patience)
            finally:
                test_ended.set()
                # End a server that no client connected to.
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS).close()


def _read_until(client: socket.socket, awaited: bytes) -> bytes:
    """Read complete lines up to the awaited text."""
    lines = b""
    while not lines.endswith(b"\r\n") or awaited not in lines:
        more = client.recv(65536)
        if not more:
            raise OSError("the client closed the connection")
        lines += more
    return lines


def _request(client: socket.socket) -> tuple[bytes, bytes]:
    """Read the next request; return its subject and reply inbox."""
    lines = _read_until(client, b"PUB ")
    _, subject, inbox, *_ = lines[lines.index(b"PUB ") :].split(b" ")
    return subject, inbox


def after_login(*steps: Step) -> tuple[Step, ...]:
    """Return the steps of a server that accepts the login, then follows these steps."""
    return INFO, None, *steps


def msg(to: bytes, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Return a MSG or HMSG frame."""
    fields = b" ".join(filter(None, [to, b"1", reply]))
    if not headers:
        return b"MSG %b %d\r\n%b\r\n" % (fields, len(payload), payload)
    sizes = (len(headers), len(headers) + len(payload))
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (fields, *sizes, headers, payload)


def error_line(operation: Callable[[], object]) -> str:
    """Return the one-line error of an operation that must fail, without the password."""
    with pytest.raises(WireError) as caught:
        operation()
    line = str(caught.value)
    assert line.isprintable(), line
    assert SECRET not in line
    assert "127.0.0.1:" in line
    return line


# --------------------------------------------------------------------------------------------------------- connecting


@pytest.mark.parametrize("end", CLOSING_ENDS)
@pytest.mark.parametrize(
    "sent", (b"", INFO[:-20], INFO, INFO + b"PING\r\n", INFO.replace(b"{", b'{"tls_required":true,', 1))
)
def test_open_fails_with_one_line_when_server_closes_during_login(sent: bytes, end: End) -> None:
    with scripted_server(sent, end=end) as cluster:
        line = error_line(Connection(cluster).open)
        assert line == f"cannot connect to NATS: {cluster.servers[0]}: the server closed the connection"


def test_open_reports_error_sent_before_server_closes() -> None:
    with scripted_server(INFO + b"-ERR 'maximum connections exceeded'\r\n", end=End.FIN) as cluster:
        assert error_line(Connection(cluster).open).endswith(": maximum connections exceeded")


@pytest.mark.parametrize(
    ("sent", "expected"),
    (
        (b"", "no INFO within 1 s"),
        (INFO[:-2], "no INFO within 1 s"),
        (INFO, "no PONG within 1 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not the NATS protocol"),
        (bytes(range(256)) * 10 + b"\r\n", "not the NATS protocol"),
        (b"\xff" * ((1 << 20) + 70_000), "a line without an end"),
        (b"INFO {\r\n", "INFO: not a response of JetStream"),
        (b"INFO []\r\n", "INFO: not a response of JetStream"),
        (b"INFO \xff\r\n", "INFO: not a response of JetStream"),
        (b"INFO " + b"[" * 100_000 + b"\r\n", "INFO: not a response of JetStream"),
        (b"INFO {}\r\n", "does not support headers"),
        (b'INFO {"headers":true,"version":"2.15.1"}\r\n', "neither max_payload nor version"),
        (b'INFO {"headers":true,"version":1,"max_payload":1}\r\n', "neither max_payload nor version"),
        (b'INFO {"headers":true,"version":"1","max_payload":"1"}\r\n', "neither max_payload nor version"),
        (INFO.replace(b"{", b'{"tls_required":true,', 1) + b"PONG\r\n" * 9, "no TLS within 1 s"),
    ),
)
def test_open_rejects_invalid_or_incomplete_greeting(sent: bytes, expected: str) -> None:
    with scripted_server(sent, patience=1.0 if "within" in expected else 10.0) as cluster:
        assert expected in error_line(Connection(cluster).open)


@pytest.mark.parametrize("noise", (b"PING\r\n", INFO, b"+OK\r\n", b"MSG a 1 0\r\n\r\n"))
def test_open_times_out_when_only_other_frames_follow_login(noise: bytes) -> None:
    with scripted_server(INFO, *[noise] * 20_000, patience=1.0) as cluster:
        assert "no PONG within 1 s" in error_line(Connection(cluster).open)


def remedy(server_error: str) -> str:
    """Return the remedy that is appended to an error of the server."""
    if not server_error.startswith("Permissions Violation"):
        return ""
    inbox = ", or set inbox_prefix in the URL to a permitted prefix" if "Subscription" in server_error else ""
    return f"; give the user that permission (`sr-assets permissions` prints all that it needs){inbox}"


@pytest.mark.parametrize("server_error", SERVER_ERRORS)
# Without RST: a reset while the client still connects would discard the error.
@pytest.mark.parametrize("end", (End.SILENCE, End.FIN))
def test_open_reports_server_error_during_login(server_error: str, end: End) -> None:
    with scripted_server(INFO, f"-ERR '{server_error}'\r\n".encode(), end=end) as cluster:
        assert error_line(Connection(cluster).open).endswith(f": {server_error}{remedy(server_error)}")


# ------------------------------------------------------------------------------------------------------------ reading


def request_info(connection: Connection) -> object:
    return connection.request("$JS.API.STREAM.INFO.S", {})


def read_direct(connection: Connection) -> object:
    return flat(read_range(connection, "S", SequenceRange(1, 9), direct=True))


def read_single(connection: Connection) -> list[Message]:
    return flat(read_sequences(connection, "S", [1], direct=True))


def read_stored(connection: Connection) -> object:
    return stored_message(connection, "S", 1)


def read_next(connection: Connection) -> object:
    return next_message(connection, "S", 1)


def publish_one(connection: Connection) -> object:
    return list(
        Publisher(connection, ack_timeout_seconds=connection.request_seconds).publish_all([Outgoing(1, "a", b"", b"x")])
    )


all_operations = pytest.mark.parametrize(
    "operation", (request_info, read_direct, read_single, read_stored, read_next, publish_one)
)


@all_operations
@pytest.mark.parametrize(
    ("answer", "expected"),
    (
        (b"", "no a"),
        (b"MSG _INBOX.x 1 100\r\nhalf", "no a"),
        (b"PING\r\n" * 1000, "no a"),
        (b"MSG another.inbox 1 2\r\n{}\r\n", "no a"),
        (b"garbage\r\n", "not the NATS protocol"),
        (b"MSG a 1 3\r\nabcdef\r\n", "lengths do not fit"),
    ),
)
def test_operation_fails_on_malformed_response(
    operation: Callable[[Connection], object], answer: bytes, expected: str
) -> None:
    patience = 0.1 if expected == "no a" else 10.0
    with (
        scripted_server(*after_login(lambda *_: answer)) as cluster,
        Connection(cluster, request_seconds=patience) as connection,
    ):
        assert expected in error_line(lambda: operation(connection))


@all_operations
@pytest.mark.parametrize("last", (b"", b"MSG _INBOX.x 1 100\r\nhalf", b"HMSG _INBOX.x 1 12", BLOCK))
@pytest.mark.parametrize("end", CLOSING_ENDS)
def test_operation_fails_immediately_when_server_closes(
    operation: Callable[[Connection], object], last: bytes, end: End
) -> None:
    with scripted_server(*after_login(lambda *_: last), end=end) as cluster, Connection(cluster) as connection:
        line = error_line(lambda: operation(connection))
        assert line.endswith(": the server closed the connection") or (
            last == BLOCK and "not the NATS protocol" in line
        )


@pytest.mark.parametrize("server_error", SERVER_ERRORS)
@pytest.mark.parametrize("operation", (request_info, read_direct, publish_one))
@pytest.mark.parametrize("end", CLOSING_ENDS)
def test_operation_reports_server_error_sent_as_response(
    operation: Callable[[Connection], object], server_error: str, end: End
) -> None:
    step = f"-ERR '{server_error}'\r\n".encode()
    with scripted_server(*after_login(lambda *_: step), end=end) as cluster, Connection(cluster) as connection:
        assert error_line(lambda: operation(connection)).endswith(f": {server_error}{remedy(server_error)}")


def test_server_error_with_control_characters_is_one_line() -> None:
    step = b"-ERR 'bad\nnews \x1b[31m\xff'\r\n"
    with scripted_server(*after_login(lambda *_: step)) as cluster, Connection(cluster) as connection:
        assert "bad\\nnews \\x1b[31m" in error_line(lambda: request_info(connection))


@pytest.mark.parametrize(
    ("operation", "body", "headers"),
    (
        *((request_info, body, b"") for body in (b"", b"no json", b"[]", b"\xff", b'{"error":"x"}', b"[" * 1000)),
        *(
            (operation, body, b"")
            for operation in (read_stored, read_next)
            for body in (
                b"{}",
                b'{"message":[]}',
                b'{"message":{"seq":1}}',
                b'{"message":{"seq":"x","subject":"a","time":"2026-03-15T13:48:10Z"}}',
                b'{"message":{"seq":1,"subject":"a","time":"soon"}}',
                b'{"message":{"seq":1,"subject":"a","time":"2026-03-15T13:48:10Z","data":"!"}}',
            )
        ),
        *(
            (operation, b"x", headers)
            for operation in (read_direct, read_single)
            for headers in (
                b"",
                b"NATS/1.0 500 broken\r\n\r\n",
                b"NATS/1.0\r\n\r\n",
                b"\xff\xff",
                BLOCK[:-2],
                BLOCK.replace(b"2026-03-15", b"2026-13-15"),
                BLOCK.replace(b"Sequence: 1", b"Sequence: one"),
            )
        ),
    ),
)
def test_operation_fails_on_meaningless_response(
    operation: Callable[[Connection], object], body: bytes, headers: bytes
) -> None:
    with (
        scripted_server(*after_login(lambda _, inbox: msg(inbox, body, headers))) as cluster,
        Connection(cluster) as connection,
    ):
        error_line(lambda: operation(connection))


@pytest.mark.parametrize("reply", (b"$JS.ACK.S.%b.1.x.1.0.0", b"x.%b.y", b"$JS.ACK.S.%b.1.5.2.0.0"))
def test_read_range_fails_on_invalid_or_skipped_delivery(reply: bytes) -> None:
    def deliver(subject: bytes, inbox: bytes) -> bytes:
        return msg(inbox, b"x", reply=reply % subject.rpartition(b".")[2])

    steps = after_login(lambda _, inbox: msg(inbox, b"{}"), deliver)
    with scripted_server(*steps) as cluster, Connection(cluster, request_seconds=0.1) as connection:
        error_line(lambda: flat(read_range(connection, "S", SequenceRange(1, 9), direct=False)))


class Recorder:
    """Steps of a scripted server that record the subject of each request."""

    def __init__(self) -> None:
        self.subjects: list[bytes] = []

    def ignore(self, subject: bytes, _: bytes) -> bytes:
        """Do not respond."""
        self.subjects.append(subject)
        return b""

    def respond_ok(self, subject: bytes, inbox: bytes) -> bytes:
        """Respond with success to a creation or a deletion."""
        self.subjects.append(subject)
        return msg(inbox, b"{}")

    def refuse(self, subject: bytes, inbox: bytes) -> bytes:
        """Respond as a server that knows no leader of its cluster."""
        self.subjects.append(subject)
        return msg(inbox, b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}')

    def deliver(self, *deliveries: tuple[int, int, int]) -> Step:
        """Return a step that delivers messages without a final status: sequence, consumer sequence, pending count."""

        def step(subject: bytes, inbox: bytes) -> bytes:
            self.subjects.append(subject)
            name = subject.rpartition(b".")[2]
            return b"".join(
                msg(b"a", b"x", reply=b"$JS.ACK.S.%b.1.%d.%d.1.%d" % (name, *delivery)) for delivery in deliveries
            )

        return step

    def respond_stored(self, subject: bytes, inbox: bytes) -> bytes:
        """Respond with the stored message 1."""
        self.subjects.append(subject)
        return msg(inbox, b'{"message":{"seq":1,"subject":"a","time":"2026-03-15T13:48:10Z"}}')

    @property
    def verbs(self) -> list[str]:
        """The API verbs of the requests, without names."""
        return [" ".join(subject.decode().split(".")[2:4]) for subject in self.subjects]


def test_unanswered_pull_is_repeated_through_another_consumer() -> None:
    recorder = Recorder()
    steps = (
        *(recorder.respond_ok, recorder.deliver((1, 1, 3), (2, 2, 2)), recorder.respond_ok),
        *(recorder.respond_ok, recorder.ignore, recorder.respond_ok),
        *(recorder.respond_ok, recorder.deliver((3, 1, 1), (4, 2, 0)), recorder.respond_ok),
    )
    with scripted_server(*after_login(*steps)) as cluster, Connection(cluster, request_seconds=5.0) as connection:
        connection.silence_seconds = 1.0
        read = flat(read_confirmed(connection, "S", SequenceRange(1, 5), direct=False))
    assert [message.sequence for message in read] == [1, 2, 3, 4]
    assert recorder.verbs == ["CONSUMER CREATE", "CONSUMER MSG", "CONSUMER DELETE"] * 3
    assert len({subject.rpartition(b".")[2] for subject in recorder.subjects}) == 3


def test_consumer_is_created_as_soon_as_the_cluster_has_a_leader() -> None:
    recorder = Recorder()
    steps = (recorder.refuse, recorder.refuse, recorder.respond_ok, recorder.deliver((1, 1, 0)), recorder.respond_ok)
    with scripted_server(*after_login(*steps)) as cluster, Connection(cluster, request_seconds=30.0) as connection:
        read = flat(read_confirmed(connection, "S", SequenceRange(1, 2), direct=False))
    assert [message.sequence for message in read] == [1]
    assert recorder.verbs == ["CONSUMER CREATE"] * 3 + ["CONSUMER MSG", "CONSUMER DELETE"]


def test_read_fails_when_all_pulls_are_unanswered() -> None:
    recorder = Recorder()
    steps = (recorder.respond_ok, recorder.ignore, recorder.respond_ok) * 80
    with scripted_server(*after_login(*steps)) as cluster, Connection(cluster, request_seconds=4.0) as connection:
        connection.silence_seconds = 0.1
        line = error_line(lambda: flat(read_confirmed(connection, "S", SequenceRange(1, 5), direct=False)))
    assert "no answer to a pull from S" in line
    assert recorder.verbs.count("CONSUMER CREATE") > 2


def test_leader_is_read_when_direct_gets_are_unanswered() -> None:
    recorder = Recorder()
    steps = (
        recorder.ignore,
        recorder.respond_stored,
        recorder.respond_ok,
        recorder.deliver((1, 1, 1), (2, 2, 0)),
        recorder.respond_ok,
    )
    with scripted_server(*after_login(*steps)) as cluster, Connection(cluster, request_seconds=5.0) as connection:
        connection.silence_seconds = 1.0
        read = flat(read_confirmed(connection, "S", SequenceRange(1, 3), direct=True))
    assert [message.sequence for message in read] == [1, 2]
    assert recorder.verbs == ["DIRECT GET", "STREAM MSG", "CONSUMER CREATE", "CONSUMER MSG", "CONSUMER DELETE"]


def test_leader_is_read_when_single_direct_get_is_unanswered() -> None:
    recorder = Recorder()
    with (
        scripted_server(*after_login(recorder.ignore, recorder.respond_stored)) as cluster,
        Connection(cluster, request_seconds=5.0) as connection,
    ):
        connection.silence_seconds = 0.1
        assert [message.sequence for message in read_single(connection)] == [1]
    assert recorder.verbs == ["DIRECT GET", "STREAM MSG"]


# --------------------------------------------------------------------------------------------------------- publishing


def test_publisher_does_not_send_messages_over_max_payload() -> None:
    steps = after_login(lambda _, inbox: msg(inbox, b'{"stream":"S","seq":1}'))
    with scripted_server(*steps) as cluster, Connection(cluster) as connection:
        items = [Outgoing(1, "a", b"", b"x" * 1024), Outgoing(2, "a", b"", b"x" * 1025), Outgoing(3, "a", b"", b"x")]
        acks = list(Publisher(connection).publish_all(items))
    assert [(ack.sequence, ack.target_sequence, ack.error_code) for ack in acks] == [(1, 1, None), (2, None, 10054)]
    assert "max_payload 1024" in str(acks[1].error)


def test_send_times_out_when_server_accepts_no_data() -> None:
    with scripted_server(*after_login()) as cluster, Connection(cluster, request_seconds=0.1) as connection:
        assert "accepted no data for 0.1 s" in error_line(lambda: connection.send(bytes(64 << 20)))


def test_publisher_yields_acks_received_before_connection_is_lost() -> None:
    acks: list[Ack] = []

    def acknowledge_some(_: bytes, inbox: bytes) -> bytes:
        stem = inbox.rpartition(b".")[0]
        # Reply subjects are numbered from 1.
        answers = b"".join(msg(b"%b.%d" % (stem, n), b'{"stream":"S","seq":%d}' % n) for n in (1, 2, 3, 4))
        return answers[:-9]

    with scripted_server(*after_login(acknowledge_some), end=End.FIN) as cluster, Connection(cluster) as connection:
        items = outgoing("s", 50)
        error_line(lambda: acks.extend(Publisher(connection).publish_all(items)))
    assert [(ack.sequence, ack.target_sequence, ack.error) for ack in acks] == [(n, n, None) for n in (1, 2, 3)]


# ------------------------------------------------------------------------------------------------------- real servers


def wait_for_log(server: NatsServer, text: str) -> None:
    wait_until(lambda: text in server.log_file.read_text(), f"{text!r} in the server's log")


@pytest.mark.process
def test_open_reports_denied_subscription_of_real_server(tmp_path: Path) -> None:
    users = '{ user: "me", password: "hunter2", permissions: { subscribe: { deny: "_INBOX.>" } } }'
    with NatsServer(tmp_path, "deaf", config=f"authorization {{ users: [ {users} ] }}") as server:
        cluster = ClusterSettings((server.address,), user="me", password=SECRET)
        assert "Permissions Violation for Subscription" in error_line(lambda: Connection(cluster).open())


@pytest.mark.process
def test_request_reports_stale_connection_of_real_server(tmp_path: Path) -> None:
    config = 'ping_interval: "500ms"\nping_max: 1\ndebug: true'
    with NatsServer(tmp_path, "strict", config=config) as server, Connection(address(server)) as connection:
        # The client does not read, so it does not answer the PING.
        wait_for_log(server, "Stale Client Connection")
        assert "Stale Connection" in error_line(lambda: request_info(connection))


@pytest.mark.process
def test_new_connection_reads_all_after_slow_consumer_error(tmp_path: Path) -> None:
    config = 'write_deadline: "200ms"\nmax_pending: 1048576\nmax_payload: 524288'
    with NatsServer(tmp_path, "hasty", config=config) as server:
        with Connection(address(server)) as connection:
            stream = create_stream(connection, "SLOW")
            publish(connection, outgoing(stream, 200, size_bytes=200_000))
            read = read_range(connection, stream, SequenceRange(1, 201), max_bytes=64 << 20, direct=True)
            # Request more than the server buffers for a client, and read nothing yet.
            request = b'{"seq":1,"batch":200,"max_bytes":67108864}'
            connection.send(
                b"PUB $JS.API.DIRECT.GET.%b %b %d\r\n%b\r\n"
                % (
                    stream.encode(),
                    connection.new_inbox(),
                    len(request),
                    request,
                )
            )
            wait_for_log(server, "Slow Consumer")
            assert error_line(lambda: flat(read))
        with Connection(address(server)) as connection:
            again = flat(read_range(connection, stream, SequenceRange(1, 201), max_bytes=400_000, direct=True))
            assert [message.sequence for message in again] == list(range(1, 201))
