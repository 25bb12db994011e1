"""Servers that break the protocol, off or refuse: one clear line in time, never a wrong message and never a hang.

The player is a socket that sends what the test wants; where a real server can be made to misbehave, it is used.
"""

import socket
import struct
import threading
import time
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
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import ClusterSettings
from sr_assets_tests.adapters.wire.rig import flat, made, outgoing, publish
from sr_assets_tests.rig import address, wait_until

SECRET = "hunter2"
INFO = b'INFO {"server_id":"X","version":"2.15.1","max_payload":1024,"headers":true}\r\n'
BLOCK = (
    b"NATS/1.0\r\nNats-Stream: S\r\nNats-Subject: a\r\nNats-Sequence: 1\r\n"
    b"Nats-Time-Stamp: 2026-03-15T13:48:10Z\r\nNats-Num-Pending: 5\r\nNats-Last-Sequence: 0\r\n\r\n"
)
#: Every complaint nats-server sends, as far as a client of ours can bring it about.
COMPLAINTS = (
    "Unknown Protocol Operation",
    "Authorization Violation",
    "Authorization Timeout",
    "User Authentication Expired",
    "User Authentication Revoked",
    "Account Authentication Expired",
    'Permissions Violation for Publish to "a.b"',
    'Permissions Violation for Subscription to "_INBOX.>"',
    "Maximum Payload Violation",
    "Maximum Connections Exceeded",
    "Maximum Control Line Exceeded",
    "Maximum Subscriptions Exceeded",
    "Invalid Publish Subject",
    "Stale Connection",
    "Slow Consumer",
    "Secure Connection - TLS Required",
    "Parser Error",
    "Server Shutdown",
    "something a later server says",
)

Act = bytes | Callable[[bytes, bytes], bytes] | None


class End(StrEnum):
    """What a player does after its last act."""

    SILENCE = "silence"
    #: Closes, and takes what still comes: the client reads the end of the stream.
    FIN = "fin"
    #: Closes although something may still come: the client's next call says that the peer reset the connection.
    RST = "rst"


CLOSES = (End.FIN, End.RST)


@contextmanager
def player(*acts: Act, end: End = End.SILENCE, patience: float = 10.0) -> Iterator[ClusterSettings]:
    """Be a server: send bytes at once, or, for a function, what it makes of the next request: its subject and inbox;
    None awaits the login and lets in.

    At the end it stays silent until the test is over, or closes the connection.
    """
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def play() -> None:
            with suppress(OSError), server.accept()[0] as client:
                # What is sent is on its way before a reset, which would discard it.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for act in acts:
                    if act is None:
                        _lines_with(client, b"PING\r\n")
                        client.sendall(b"PONG\r\n")
                    else:
                        client.sendall(act if isinstance(act, bytes) else act(*_request(client)))
                if end is End.SILENCE:
                    over.wait()
                elif end is End.RST:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass

        thread = threading.Thread(target=play)
        thread.start()
        port = server.getsockname()[1]
        try:
            servers = (f"127.0.0.1:{port}",)
            yield ClusterSettings(servers, user="me", password=SECRET, connect_timeout_seconds=patience)
        finally:
            over.set()
            # Ends a player that nobody connected to.
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            thread.join()


def _lines_with(client: socket.socket, awaited: bytes) -> bytes:
    """Read whole lines until the awaited one is among them."""
    lines = b""
    while not lines.endswith(b"\r\n") or awaited not in lines:
        more = client.recv(65536)
        if not more:
            raise OSError("the client closed the connection")
        lines += more
    return lines


def _request(client: socket.socket) -> tuple[bytes, bytes]:
    """Read the next request; returns its subject and where the answer goes."""
    lines = _lines_with(client, b"PUB ")
    _, subject, inbox, *_ = lines[lines.index(b"PUB ") :].split(b" ")
    return subject, inbox


def logged_in(*acts: Act) -> tuple[Act, ...]:
    """Return the acts of a server that behaves until the login is over."""
    return INFO, None, *acts


def msg(to: bytes, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Return the frame of a message."""
    fields = b" ".join(filter(None, [to, b"1", reply]))
    if not headers:
        return b"MSG %b %d\r\n%b\r\n" % (fields, len(payload), payload)
    sizes = (len(headers), len(headers) + len(payload))
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (fields, *sizes, headers, payload)


def error_of(work: Callable[[], object]) -> str:
    """Do what must fail soon; returns the line, which holds no secret."""
    started = time.monotonic()
    with pytest.raises(WireError) as caught:
        work()
    assert time.monotonic() - started < 10
    line = str(caught.value)
    assert line.isprintable(), line
    assert SECRET not in line
    assert "127.0.0.1:" in line
    return line


# --------------------------------------------------------------------------------------------------------- connecting


@pytest.mark.parametrize("end", CLOSES)
@pytest.mark.parametrize(
    "sent", (b"", INFO[:-20], INFO, INFO + b"PING\r\n", INFO.replace(b"{", b'{"tls_required":true,', 1))
)
def test_a_server_that_closes_at_the_login_is_one_line(sent: bytes, end: End) -> None:
    with player(sent, end=end) as cluster:
        line = error_of(Connection(cluster).open)
        assert line == f"cannot connect to NATS: {cluster.servers[0]}: the server closed the connection"


def test_the_last_complaint_of_a_server_that_closes_is_the_line() -> None:
    with player(INFO + b"-ERR 'maximum connections exceeded'\r\n", end=End.FIN) as cluster:
        assert error_of(Connection(cluster).open).endswith(": maximum connections exceeded")


@pytest.mark.parametrize(
    ("sent", "says"),
    (
        (b"", "no INFO within 0.3 s"),
        (INFO[:-2], "no INFO within 0.3 s"),
        (INFO, "no PONG within 0.3 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not the NATS protocol"),
        (b"\x15\x03\x01\x00\x02\x02\x46\r\n", "not the NATS protocol"),
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
        (INFO.replace(b"{", b'{"tls_required":true,', 1) + b"PONG\r\n" * 9, "no TLS within 0.3 s"),
    ),
)
def test_what_is_no_server_is_recognised_at_connecting(sent: bytes, says: str) -> None:
    with player(sent, patience=0.3 if "within" in says else 10.0) as cluster:
        assert says in error_of(Connection(cluster).open)


@pytest.mark.parametrize("noise", (b"PING\r\n", INFO, b"+OK\r\n", b"MSG a 1 0\r\n\r\n"))
def test_noise_is_no_answer_to_the_login(noise: bytes) -> None:
    with player(INFO, *[noise] * 20_000, patience=0.3) as cluster:
        assert "no PONG within 0.3 s" in error_of(Connection(cluster).open)


def remedy(complaint: str) -> str:
    """Return what is added to a complaint of the server."""
    if not complaint.startswith("Permissions Violation"):
        return ""
    inbox = ", or set inbox_prefix in the URL to a permitted prefix" if "Subscription" in complaint else ""
    return f"; give the user that permission{inbox}"


@pytest.mark.parametrize("complaint", COMPLAINTS)
# Without an RST: one that comes while the client still connects discards what was sent before it.
@pytest.mark.parametrize("end", (End.SILENCE, End.FIN))
def test_a_complaint_at_the_login_is_the_line(complaint: str, end: End) -> None:
    with player(INFO, f"-ERR '{complaint}'\r\n".encode(), end=end) as cluster:
        assert error_of(Connection(cluster).open).endswith(f": {complaint}{remedy(complaint)}")


# ------------------------------------------------------------------------------------------------------------ reading


def asks(connection: Connection) -> object:
    return connection.request("$JS.API.STREAM.INFO.S", {})


def reads_direct(connection: Connection) -> object:
    return flat(read_range(connection, "S", SequenceRange(1, 9), direct=True))


def reads_single(connection: Connection) -> list[Message]:
    return flat(read_sequences(connection, "S", [1], direct=True))


def reads_stored(connection: Connection) -> object:
    return stored_message(connection, "S", 1)


def reads_next(connection: Connection) -> object:
    return next_message(connection, "S", 1)


def publishes(connection: Connection) -> object:
    return list(
        Publisher(connection, ack_timeout_seconds=connection.request_seconds).publish_all([Outgoing(1, "a", b"", b"x")])
    )


everything = pytest.mark.parametrize("work", (asks, reads_direct, reads_single, reads_stored, reads_next, publishes))


@everything
@pytest.mark.parametrize(
    ("answer", "says"),
    (
        (b"", "no a"),
        (b"MSG _INBOX.x 1 100\r\nhalf", "no a"),
        (b"PING\r\n" * 1000, "no a"),
        (b"MSG nobody.asked 1 2\r\n{}\r\n", "no a"),
        (b"garbage\r\n", "not the NATS protocol"),
        (b"MSG a 1 3\r\nabcdef\r\n", "lengths do not fit"),
        (b"MSG a 1 8\r\nabc\r\nPING\r\n\r\n", "lengths do not fit"),
        (b"HMSG a 1 9 3\r\nabc\r\n", "lengths do not fit"),
        (b"MSG a 1 three\r\nabc\r\n", "invalid literal"),
        (b"MSG a 1 %d\r\n" % (1 << 40), "impossible size"),
        (b"\r\n", "not the NATS protocol"),
    ),
)
def test_a_broken_answer_is_an_error_and_never_a_message(
    work: Callable[[Connection], object], answer: bytes, says: str
) -> None:
    patience = 0.1 if says == "no a" else 10.0
    with player(*logged_in(lambda *_: answer)) as cluster, Connection(cluster, request_seconds=patience) as connection:
        assert says in error_of(lambda: work(connection))


@everything
@pytest.mark.parametrize("last", (b"", b"MSG _INBOX.x 1 100\r\nhalf", b"HMSG _INBOX.x 1 12", BLOCK))
@pytest.mark.parametrize("end", CLOSES)
def test_a_server_that_closes_in_the_middle_is_an_error_at_once(
    work: Callable[[Connection], object], last: bytes, end: End
) -> None:
    with player(*logged_in(lambda *_: last), end=end) as cluster, Connection(cluster) as connection:
        line = error_of(lambda: work(connection))
        assert line.endswith(": the server closed the connection") or (
            last == BLOCK and "not the NATS protocol" in line
        )


@pytest.mark.parametrize("complaint", COMPLAINTS)
@pytest.mark.parametrize("work", (asks, reads_direct, publishes))
@pytest.mark.parametrize("end", CLOSES)
def test_a_complaint_in_place_of_an_answer_is_the_line(
    work: Callable[[Connection], object], complaint: str, end: End
) -> None:
    act = f"-ERR '{complaint}'\r\n".encode()
    with player(*logged_in(lambda *_: act), end=end) as cluster, Connection(cluster) as connection:
        assert error_of(lambda: work(connection)).endswith(f": {complaint}{remedy(complaint)}")


def test_a_complaint_of_odd_bytes_is_still_one_line() -> None:
    act = b"-ERR 'bad\nnews \x1b[31m\xff'\r\n"
    with player(*logged_in(lambda *_: act)) as cluster, Connection(cluster) as connection:
        assert "bad news" in error_of(lambda: asks(connection))


@pytest.mark.parametrize(
    ("work", "body", "headers"),
    (
        *((asks, body, b"") for body in (b"", b"no json", b"[]", b"\xff", b'{"error":"x"}', b"[" * 1000)),
        *(
            (work, body, b"")
            for work in (reads_stored, reads_next)
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
            (work, b"x", headers)
            for work in (reads_direct, reads_single)
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
def test_an_answer_without_sense_is_an_error(work: Callable[[Connection], object], body: bytes, headers: bytes) -> None:
    with player(*logged_in(lambda _, inbox: msg(inbox, body, headers))) as cluster, Connection(cluster) as connection:
        error_of(lambda: work(connection))


@pytest.mark.parametrize("reply", (b"$JS.ACK.S.%b.1.x.1.0.0", b"x.%b.y", b"$JS.ACK.S.%b.1.5.2.0.0"))
def test_a_delivery_that_is_none_or_comes_after_a_lost_one_is_an_error(reply: bytes) -> None:
    def deliver(subject: bytes, inbox: bytes) -> bytes:
        return msg(inbox, b"x", reply=reply % subject.rpartition(b".")[2])

    acts = logged_in(lambda _, inbox: msg(inbox, b"{}"), deliver)
    with player(*acts) as cluster, Connection(cluster, request_seconds=0.1) as connection:
        error_of(lambda: flat(read_range(connection, "S", SequenceRange(1, 9), direct=False)))


class Recorder:
    """Acts of a player that knows consumers: it keeps each request's subject, and answers what a test needs."""

    def __init__(self) -> None:
        self.subjects: list[bytes] = []

    def silent(self, subject: bytes, _: bytes) -> bytes:
        """To anything: no answer."""
        self.subjects.append(subject)
        return b""

    def agree(self, subject: bytes, inbox: bytes) -> bytes:
        """To create or to delete something."""
        self.subjects.append(subject)
        return msg(inbox, b"{}")

    def deliver(self, *deliveries: tuple[int, int, int]) -> Act:
        """Messages: sequence, number in the consumer, how many follow; no status comes after them."""

        def act(subject: bytes, inbox: bytes) -> bytes:
            self.subjects.append(subject)
            name = subject.rpartition(b".")[2]
            return b"".join(
                msg(b"a", b"x", reply=b"$JS.ACK.S.%b.1.%d.%d.1.%d" % (name, *delivery)) for delivery in deliveries
            )

        return act

    def stored(self, subject: bytes, inbox: bytes) -> bytes:
        """To a question about a stored message: the first."""
        self.subjects.append(subject)
        return msg(inbox, b'{"message":{"seq":1,"subject":"a","time":"2026-03-15T13:48:10Z"}}')

    @property
    def verbs(self) -> list[str]:
        """What was asked, without names."""
        return [" ".join(subject.decode().split(".")[2:4]) for subject in self.subjects]


def test_a_pull_that_stays_silent_is_asked_again_through_another_consumer() -> None:
    asked = Recorder()
    acts = (
        *(asked.agree, asked.deliver((1, 1, 3), (2, 2, 2)), asked.agree),
        *(asked.agree, asked.silent, asked.agree),
        *(asked.agree, asked.deliver((3, 1, 1), (4, 2, 0)), asked.agree),
    )
    with player(*logged_in(*acts)) as cluster, Connection(cluster, request_seconds=5.0) as connection:
        connection.silence_seconds = 0.1
        read = flat(read_confirmed(connection, "S", SequenceRange(1, 5), direct=False))
    assert [message.sequence for message in read] == [1, 2, 3, 4]
    assert asked.verbs == ["CONSUMER CREATE", "CONSUMER MSG", "CONSUMER DELETE"] * 3
    assert len({subject.rpartition(b".")[2] for subject in asked.subjects}) == 3


def test_pulls_that_stay_silent_end_in_an_error() -> None:
    asked = Recorder()
    acts = (asked.agree, asked.silent, asked.agree) * 40
    with player(*logged_in(*acts)) as cluster, Connection(cluster, request_seconds=2.0) as connection:
        connection.silence_seconds = 0.1
        line = error_of(lambda: flat(read_confirmed(connection, "S", SequenceRange(1, 5), direct=False)))
    assert "no answer to a pull from S" in line
    assert asked.verbs.count("CONSUMER CREATE") > 2


def test_direct_gets_that_stay_silent_are_replaced_by_the_leaders_answers() -> None:
    asked = Recorder()
    acts = (asked.silent, asked.stored, asked.agree, asked.deliver((1, 1, 1), (2, 2, 0)), asked.agree)
    with player(*logged_in(*acts)) as cluster, Connection(cluster, request_seconds=5.0) as connection:
        connection.silence_seconds = 0.1
        read = flat(read_confirmed(connection, "S", SequenceRange(1, 3), direct=True))
    assert [message.sequence for message in read] == [1, 2]
    assert asked.verbs == ["DIRECT GET", "STREAM MSG", "CONSUMER CREATE", "CONSUMER MSG", "CONSUMER DELETE"]


def test_a_single_direct_get_that_stays_silent_is_replaced_by_the_leaders_answer() -> None:
    asked = Recorder()
    with (
        player(*logged_in(asked.silent, asked.stored)) as cluster,
        Connection(cluster, request_seconds=5.0) as connection,
    ):
        connection.silence_seconds = 0.1
        assert [message.sequence for message in reads_single(connection)] == [1]
    assert asked.verbs == ["DIRECT GET", "STREAM MSG"]


# --------------------------------------------------------------------------------------------------------- publishing


def test_what_is_larger_than_info_allows_is_refused_and_not_sent() -> None:
    acts = logged_in(lambda _, inbox: msg(inbox, b'{"stream":"S","seq":1}'))
    with player(*acts) as cluster, Connection(cluster) as connection:
        items = [Outgoing(1, "a", b"", b"x" * 1024), Outgoing(2, "a", b"", b"x" * 1025), Outgoing(3, "a", b"", b"x")]
        acks = list(Publisher(connection).publish_all(items))
    assert [(ack.sequence, ack.target_sequence, ack.error_code) for ack in acks] == [(1, 1, None), (2, None, 10054)]
    assert "max_payload 1024" in str(acks[1].error)


def test_a_server_that_takes_nothing_more_is_left() -> None:
    with player(*logged_in()) as cluster, Connection(cluster, request_seconds=0.1) as connection:
        assert "accepted no data for 0.1 s" in error_of(lambda: connection.send(bytes(64 << 20)))


def test_a_connection_cut_amid_acknowledgements_reports_what_was_stored_and_no_more() -> None:
    acks: list[Ack] = []

    def some(_: bytes, inbox: bytes) -> bytes:
        stem = inbox.rpartition(b".")[0]
        # Requests are numbered from 1 on.
        answers = b"".join(msg(b"%b.%d" % (stem, n), b'{"stream":"S","seq":%d}' % n) for n in (1, 2, 3, 4))
        return answers[:-9]

    with player(*logged_in(some), end=End.FIN) as cluster, Connection(cluster) as connection:
        items = outgoing("s", 50)
        error_of(lambda: acks.extend(Publisher(connection).publish_all(items)))
    assert [(ack.sequence, ack.target_sequence, ack.error) for ack in acks] == [(n, n, None) for n in (1, 2, 3)]


# ------------------------------------------------------------------------------------------------------- real servers


def until_logged(server: NatsServer, text: str) -> None:
    wait_until(lambda: text in server.log_file.read_text(), f"{text!r} in the server's log")


@pytest.mark.process
def test_a_real_server_that_refuses_a_subscription_is_one_line(tmp_path: Path) -> None:
    users = '{ user: "me", password: "hunter2", permissions: { subscribe: { deny: "_INBOX.>" } } }'
    with NatsServer(tmp_path, "deaf", config=f"authorization {{ users: [ {users} ] }}") as server:
        cluster = ClusterSettings((server.address,), user="me", password=SECRET)
        assert "Permissions Violation for Subscription" in error_of(lambda: Connection(cluster).open())


@pytest.mark.process
def test_a_real_server_that_is_full_is_one_line(tmp_path: Path) -> None:
    with (
        NatsServer(tmp_path, "full", config="max_connections: 1", jetstream=False) as server,
        Connection(address(server)),
    ):
        assert "maximum connections exceeded" in error_of(Connection(address(server)).open)


@pytest.mark.process
def test_a_real_server_that_drops_a_stale_client_is_one_line(tmp_path: Path) -> None:
    config = 'ping_interval: "20ms"\nping_max: 1\ndebug: true'
    with NatsServer(tmp_path, "strict", config=config) as server, Connection(address(server)) as connection:
        # Nobody reads, so nobody answers its PING.
        until_logged(server, "Stale Client Connection")
        assert "Stale Connection" in error_of(lambda: asks(connection))


@pytest.mark.process
def test_a_real_server_that_cuts_off_a_slow_consumer_loses_nothing(tmp_path: Path) -> None:
    config = 'write_deadline: "200ms"\nmax_pending: 1048576\nmax_payload: 524288'
    with NatsServer(tmp_path, "hasty", config=config) as server:
        with Connection(address(server)) as connection:
            stream = made(connection, "SLOW")
            publish(connection, outgoing(stream, 200, size_bytes=200_000))
            read = read_range(connection, stream, SequenceRange(1, 201), max_bytes=64 << 20, direct=True)
            # One request asks for more than the server buffers for a client, and nothing is read yet.
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
            until_logged(server, "Slow Consumer")
            assert error_of(lambda: flat(read))
        with Connection(address(server)) as connection:
            again = flat(read_range(connection, stream, SequenceRange(1, 201), max_bytes=400_000, direct=True))
            assert [message.sequence for message in again] == list(range(1, 201))
