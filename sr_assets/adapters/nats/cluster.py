"""A cluster's JetStream for administration: stream info, single messages, creating a target, advisories. Uses nats-py.

A synchronous face over a connection that lives in a thread of its own. Bulk traffic is in `wire`, because nats-py
cannot carry headers byte for byte. Not here: what to do about an answer.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import ssl
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from sr_assets.adapters.nats.security import NO_TLS, read_login, silence_words, tls_context, tls_words
from sr_assets.adapters.wire.frames import encode_json, stored_message
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets.domain.subjects import covers
from sr_assets.settings import ClusterSettings, StreamSettings

REQUEST_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 0.1
#: How long the server keeps a consumer that was made to count, if we cannot delete it.
COUNTED_NS: Final = 30 * 1_000_000_000
PUBLISH_WINDOW: Final = 256
#: So many refusals one after the other are not about single messages.
MOST_REFUSALS: Final = 512
MIN_DUPLICATE_WINDOW_NS: Final = 120 * 1_000_000_000

#: What a server without a leader, or one that is just starting, answers.
UNAVAILABLE: Final = 503
STREAM_NOT_FOUND: Final = 10059
MESSAGE_NOT_FOUND: Final = 10037
# A cluster too small for the replicas, and a server without a cluster.
TOO_FEW_SERVERS: Final = frozenset({10005, 10074})
# No target's last sequence: a publish that expects it is answered but never stored.
IMPOSSIBLE_SEQUENCE: Final = 18446744073709551614

Version = tuple[int, int, int]
T = TypeVar("T")


class ApiError(RunError):
    """JetStream answered with an error; `code` is its `err_code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a stream's leader says about it. An empty stream's `first_sequence` is `last_sequence` + 1, or 0.

    `ts_ns` is the server's clock when it answered (None before 2.10), `deleted` is only filled when it was asked for,
    `cluster_size` and `server_version` are those of the server we talk to, `config` is the configuration as it came.
    """

    stream: str
    created_ns: int
    first_sequence: int
    last_sequence: int
    messages: int
    bytes: int
    ts_ns: int | None
    last_stored_ns: int | None
    replicas: int
    mirror: bool
    retention: str
    storage: str
    subjects: tuple[str, ...]
    allow_direct: bool
    max_msg_size: int
    max_msgs_per_subject: int
    no_ack: bool
    sealed: bool
    deny_delete: bool
    deny_purge: bool
    num_deleted: int
    deleted: tuple[int, ...]
    lost: tuple[int, ...]
    cluster_size: int
    server_version: Version
    config: dict[str, Any]


def parse_stream_info(answer: dict[str, Any], server_version: Version, cluster_size: int) -> StreamInfo:
    """Read the JSON of `STREAM.INFO` or `STREAM.CREATE`."""
    config, state = answer["config"], answer["state"]
    return StreamInfo(
        stream=config["name"],
        created_ns=parse_rfc3339_ns(answer["created"]),
        first_sequence=state["first_seq"],
        last_sequence=state["last_seq"],
        messages=state["messages"],
        bytes=state["bytes"],
        ts_ns=_time_ns(answer.get("ts")),
        last_stored_ns=_time_ns(state.get("last_ts")),
        replicas=config.get("num_replicas", 1),
        mirror=bool(config.get("mirror")),
        retention=config.get("retention", "limits"),
        storage=config.get("storage", "file"),
        subjects=tuple(config.get("subjects") or ()),
        allow_direct=bool(config.get("allow_direct")),
        max_msg_size=config.get("max_msg_size", -1),
        max_msgs_per_subject=config.get("max_msgs_per_subject", -1),
        no_ack=bool(config.get("no_ack")),
        sealed=bool(config.get("sealed")),
        deny_delete=bool(config.get("deny_delete")),
        deny_purge=bool(config.get("deny_purge")),
        num_deleted=state.get("num_deleted", 0),
        deleted=tuple(state.get("deleted") or ()),
        lost=tuple((state.get("lost") or {}).get("msgs") or ()),
        cluster_size=cluster_size,
        server_version=server_version,
        config=config,
    )


def _time_ns(text: str | None) -> int | None:
    """Go's zero time, the year 1, means that there is none."""
    return None if not text or text.startswith("0001-") else parse_rfc3339_ns(text)


def target_config(
    source: StreamInfo, stream: StreamSettings, server_version: Version, cluster_size: int
) -> dict[str, Any]:
    """Return the configuration of a target stream that is to be created, after CONTRACT.md; nothing else is copied.

    Every key is known to each server since 2.9, whatever `server_version`. Raises RunError when the source does not
    say its subjects (a mirror without a filter), ConfigurationError when a rewritten one is none.
    """
    del server_version
    patterns = [stream.filter_subject] if stream.filter_subject else source.subjects
    if not patterns:
        raise RunError(
            f"stream {stream.label}: the source names no subjects (a mirror does not): create target stream "
            f"{stream.target_stream} yourself or set filter_subject"
        )
    copied = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject", "max_msg_size", "discard")
    config = {key: source.config[key] for key in copied if key in source.config}
    window_ns = max(MIN_DUPLICATE_WINDOW_NS, source.config.get("duplicate_window", 0))
    max_age_ns = source.config.get("max_age", 0)
    return {
        "name": stream.target_stream,
        "subjects": _widest([stream.target_pattern(pattern) for pattern in patterns]),
        "storage": source.storage,
        "retention": "limits",
        **config,
        # The server refuses a window that is longer than messages live.
        "duplicate_window": min(window_ns, max_age_ns) if max_age_ns > 0 else window_ns,
        "num_replicas": max(1, min(source.replicas, cluster_size)),
        "allow_direct": True,
    }


def _widest(patterns: Iterable[str]) -> list[str]:
    """Leave out what another pattern covers: the server refuses overlapping subjects, and rewriting may make some."""
    unique = list(dict.fromkeys(patterns))
    return [one for one in unique if not any(other != one and covers(other, one) for other in unique)]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of a published message: stored, refused with a reason, or neither is known."""

    acknowledged: bool
    refusal: str | None = None


NOT_DELIVERED: Final = Delivery(acknowledged=False)


class Cluster:
    """A connection to one cluster's JetStream, opened by `with` or the first call, closed at the end of `with`.

    Every method raises RunError, one line with the cluster's label and never a secret, when there is no (good) answer.
    """

    def __init__(self, settings: ClusterSettings, name: str = "sr-assets") -> None:
        self.settings = settings
        self.last_refusal: str | None = None
        self._name = name
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._complaint: str | None = None

    def __enter__(self) -> Self:
        try:
            self._connected()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end its thread; harmless when there is none."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop = self._thread = self._client = None

    @property
    def server_version(self) -> Version:
        """The version of the server we talk to; the others of its cluster may differ."""
        version = self._connected().connected_server_version
        return version.major, version.minor, version.patch

    @property
    def max_payload(self) -> int:
        """The largest message, headers included, that the server takes, in bytes."""
        return self._connected().max_payload

    @property
    def cluster_size(self) -> int:
        """How many servers the cluster announces to its clients, at least 1."""
        announced = self._connected()._server_info.get("connect_urls")  # noqa: SLF001 - nats-py shows it nowhere else
        return max(1, len(set(announced or ())))

    def request_api(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask a JetStream API subject (`$JS.API.` is put in front); raises ApiError with the server's words."""
        return self._run(self._request(subject, body))

    def stream_info(self, stream: str, *, deleted: bool = False) -> StreamInfo:
        """Return what the leader says now, with the list of interior deletes when asked for."""
        try:
            answer = self.request_api(f"STREAM.INFO.{stream}", {"deleted_details": True} if deleted else None)
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:
                raise ApiError(f"stream {stream} does not exist on {self.settings.label}", error.code) from None
            raise
        return parse_stream_info(answer, self.server_version, self.cluster_size)

    def find_stream(self, stream: str) -> StreamInfo | None:
        """Return what the leader says now; None when there is no such stream."""
        try:
            return self.stream_info(stream)
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:
                return None
            raise

    def stream_exists(self, stream: str) -> bool:
        """Tell whether there is such a stream."""
        return self.find_stream(stream) is not None

    def stream_names(self, subject: str = ">") -> list[str]:
        """Return the streams whose subjects overlap the given one."""
        names: list[str] = []
        while True:
            answer = self.request_api("STREAM.NAMES", {"subject": subject, "offset": len(names)})
            page = answer.get("streams") or []
            names += page
            if not page or len(names) >= answer["total"]:
                return names

    def create_stream(self, config: dict[str, Any]) -> StreamInfo:
        """Create a stream, with fewer replicas when the cluster has too few servers; the answer says what was made."""
        for replicas in range(config.get("num_replicas", 1), 0, -1):
            try:
                answer = self.request_api(f"STREAM.CREATE.{config['name']}", {**config, "num_replicas": replicas})
            except ApiError as error:
                if error.code not in TOO_FEW_SERVERS or replicas == 1:
                    raise
            else:
                return parse_stream_info(answer, self.server_version, self.cluster_size)
        raise RunError(f"stream {config['name']}: num_replicas {config['num_replicas']!r} is not at least 1")

    def message(self, stream: str, sequence: int) -> Message | None:
        """Return a message as the leader has it; None when it is not there."""
        return self._message(stream, {"seq": sequence})

    def next_message(self, stream: str, sequence: int, subject: str = ">") -> Message | None:
        """Return the leader's first message at or after a sequence that matches; None when there is none."""
        return self._message(stream, {"seq": sequence, "next_by_subj": subject})

    def last_message(self, stream: str, subject: str = ">") -> Message | None:
        """Return the leader's last message that matches; None when there is none."""
        return self._message(stream, {"last_by_subj": subject})

    def count_from(self, stream: str, sequence: int, subject: str | None = None) -> int:
        """Return how many messages at or after a sequence a consumer would get; it is made and deleted for the answer."""
        name = f"sr_count_{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(1, sequence),
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": COUNTED_NS,
        }
        if subject:
            config["filter_subject"] = subject
        create = f"CONSUMER.CREATE.{stream}.{name}" + (f".{subject}" if subject else "")
        answer = self.request_api(create, {"stream_name": stream, "config": config})
        self.request_api(f"CONSUMER.DELETE.{stream}.{name}")
        return int(answer["num_pending"])

    def publish_many(
        self,
        items: Sequence[tuple[str, bytes, str]],
        senders: Sequence[str] | None = None,
        timeout_seconds: float = REQUEST_SECONDS,
    ) -> list[Delivery]:
        """Publish (subject, payload, message id) in order into JetStream; returns what became of each.

        With `senders`, one for each item, a sender's next message waits until the one before it was acknowledged, and one
        that is refused keeps back its sender's later ones: sent again it would stand behind its successor. What comes
        later than the timeout after the acknowledgement before it, and what was under way when the connection was lost,
        is not acknowledged: send it again with the same id; `last_refusal` then says why. After many refusals without an
        acknowledgement between them nothing more is sent.
        """
        patience_seconds = timeout_seconds * max(1, len(items))
        return self._run(self._publish_many(items, senders or range(len(items)), timeout_seconds), patience_seconds)

    def publish_core(self, items: Iterable[tuple[str, bytes]]) -> None:
        """Publish (subject, payload) to whoever listens now, and wait until the server has them."""
        self._run(self._publish_core(items))

    def publish_refusal(self, subject: str) -> tuple[int, str]:
        """Publish with an expectation that cannot hold, so that nothing is stored; return code and text of the answer.

        10071 proves that a stream takes the subject and that we may publish there.
        """
        return self._run(self._publish_refusal(subject))

    def _message(self, stream: str, body: dict[str, Any]) -> Message | None:
        try:
            return stored_message(self.request_api(f"STREAM.MSG.GET.{stream}", body))
        except ApiError as error:
            if error.code == MESSAGE_NOT_FOUND:
                return None
            raise

    # ----------------------------------------------------------------------------- in the connection's own thread

    async def _request(self, subject: str, body: dict[str, Any] | None) -> dict[str, Any]:
        payload = encode_json(body) if body else b""
        answered = await self._ask(f"$JS.API.{subject}", payload, None)
        try:
            answer: dict[str, Any] = json.loads(answered.data)
        except ValueError:
            raise RunError(f"{self.settings.label}: {subject}: answered no JSON: {answered.data[:80]!r}") from None
        error = answer.get("error")
        if error:
            said = f"{self.settings.label}: {subject}: {error.get('description')} ({error.get('err_code')})"
            if error.get("code") == UNAVAILABLE:
                raise TransientError(said)
            raise ApiError(said, int(error.get("err_code") or error.get("code") or 0))
        return answer

    async def _ask(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> Msg:
        client, self._complaint = self._opened(), None
        asking = asyncio.ensure_future(client.request(subject, payload, timeout=REQUEST_SECONDS, headers=headers))
        self._woken.clear()
        complaining = asyncio.ensure_future(self._woken.wait())
        try:
            # A refused permission is said aside and never answered; after a lost connection nothing is.
            await asyncio.wait((asking, complaining), return_when=asyncio.FIRST_COMPLETED)
            if self._complaint and not asking.done():
                kind = RunError if "violation" in self._complaint.lower() else TransientError
                raise kind(f"{self.settings.label}: {subject}: {self._complaint}")
            return await asking
        except nats.errors.NoRespondersError:
            raise ApiError(
                f"{self.settings.label}: {subject}: nobody answers (is JetStream enabled?)", UNAVAILABLE
            ) from None
        except nats.errors.TimeoutError:
            raise TransientError(f"{self.settings.label}: {subject}: no answer in {REQUEST_SECONDS:.0f} s") from None
        finally:
            asking.cancel()
            complaining.cancel()

    async def _publish_many(
        self, items: Sequence[tuple[str, bytes, str]], senders: Sequence[object], timeout_seconds: float
    ) -> list[Delivery]:
        client, loop = self._opened(), asyncio.get_running_loop()
        deliveries = [NOT_DELIVERED] * len(items)
        held_back: set[object] = set()
        refused_in_a_row = 0
        under_way: dict[object, int] = {}
        inbox, deadline = client.new_inbox(), loop.time() + timeout_seconds
        self.last_refusal = self._complaint = None

        async def on_answer(message: Msg) -> None:
            nonlocal deadline, refused_in_a_row
            number = int(message.subject.rpartition(".")[2])
            refusal = _refusal(message)
            deliveries[number] = Delivery(refusal is None, refusal[1] if refusal else None)
            refused_in_a_row = refused_in_a_row + 1 if refusal else 0
            if refusal:
                held_back.add(senders[number])
            under_way.pop(senders[number], None)
            deadline = loop.time() + timeout_seconds
            self._woken.set()

        async def next_answer() -> None:
            self._woken.clear()
            await asyncio.wait_for(self._woken.wait(), deadline - loop.time())

        subscription = await client.subscribe(f"{inbox}.*", cb=on_answer)
        try:
            for number, ((subject, payload, message_id), sender) in enumerate(zip(items, senders, strict=True)):
                while (sender in under_way or len(under_way) >= PUBLISH_WINDOW) and not self._complaint:
                    await next_answer()
                if refused_in_a_row >= MOST_REFUSALS or self._complaint:
                    break
                if sender in held_back:
                    continue
                under_way[sender] = number
                await client.publish(subject, payload, reply=f"{inbox}.{number}", headers={"Nats-Msg-Id": message_id})
            while under_way and not self._complaint:
                await next_answer()
        except TimeoutError:
            self.last_refusal = self.last_refusal or f"no acknowledgement within {timeout_seconds:g} s"
        except (OSError, nats.errors.Error) as error:
            # What was acknowledged until then counts all the same.
            self._complaint = self._complaint or _words(error)
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()
        self.last_refusal = self.last_refusal or self._complaint
        return deliveries

    async def _publish_core(self, items: Iterable[tuple[str, bytes]]) -> None:
        client = self._opened()
        for subject, payload in items:
            await client.publish(subject, payload)
        await client.flush(int(REQUEST_SECONDS))

    async def _publish_refusal(self, subject: str) -> tuple[int, str]:
        headers = {"Nats-Expected-Last-Sequence": str(IMPOSSIBLE_SEQUENCE)}
        try:
            return _refusal(await self._ask(subject, b"", headers)) or (0, "stored")
        except ApiError as error:
            return error.code, "no stream takes this subject"

    def _opened(self) -> Client:
        if self._client is None:
            raise RunError(f"{self.settings.label}: the connection is closed")
        return self._client

    def _connected(self) -> Client:
        """The open connection; a lost one is made again."""
        if self._client is None or self._client.is_closed:
            self._client = self._submit(self._connect(), self.settings.connect_timeout_seconds)
        return self._client

    async def _serve(self, ready: Future[asyncio.AbstractEventLoop]) -> None:
        self._ended, self._woken = asyncio.Event(), asyncio.Event()
        logging.getLogger("asyncio").addFilter(_worth_saying)
        ready.set_result(asyncio.get_running_loop())
        await self._ended.wait()
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> Client:
        problems = []
        options = _secure_options(self.settings)
        for server in self.settings.servers:
            client, self._complaint = _SecuredClient(self.settings), None
            try:
                await asyncio.wait_for(self._connect_to(client, server, options), self.settings.connect_timeout_seconds)
            except (OSError, TimeoutError, nats.errors.Error) as error:
                # nats-py has no end of waiting for a link on which TLS failed.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.close(), CLOSE_SECONDS)
                hint = silence_words(self.settings) if isinstance(error, TimeoutError) else ""
                problems.append(f"{server}: {self._complaint or _words(error)}{hint}")
            else:
                return client
        raise TransientError(f"cannot connect to NATS: {'; '.join(problems)}")

    async def _connect_to(self, client: Client, server: str, options: dict[str, Any]) -> None:
        async def on_error(error: Exception) -> None:
            self._complaint = _words(error)
            self._woken.set()

        async def on_closed() -> None:
            if client is self._client:
                self._complaint = self._complaint or "connection lost"
                self._woken.set()

        await client.connect(
            servers=f"nats://{server}",
            name=self._name,
            # Ours, around it, is exact.
            connect_timeout=math.ceil(self.settings.connect_timeout_seconds) + 1,
            # Makes nats-py read the answer to CONNECT before it writes on: otherwise a reset may overtake the server's
            # words about wrong credentials.
            verbose=True,
            # A lost connection is made again by the next call: waiting here would only hide it.
            allow_reconnect=False,
            # The fewest attempts that nats-py lets end: 0 means for ever.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            error_cb=on_error,
            **options,
            closed_cb=on_closed,
        )

    def _run(self, work: Coroutine[Any, Any, T], timeout_seconds: float = REQUEST_SECONDS) -> T:
        try:
            self._connected()
        except BaseException:
            work.close()
            raise
        return self._submit(work, timeout_seconds)

    def _submit(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._started())
            # The work has its own deadline; this one only guards against a thread that hangs.
            return future.result(timeout_seconds + 2 * REQUEST_SECONDS)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise TransientError(f"{self.settings.label}: {self._complaint or _words(error)}") from None

    def _started(self) -> asyncio.AbstractEventLoop:
        """The loop of the connection's thread, which is started by the first call."""
        if self._loop is None:
            ready: Future[asyncio.AbstractEventLoop] = Future()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(ready)), name=self._name, daemon=True
            )
            self._thread.start()
            self._loop = ready.result()
        return self._loop


class _SecuredClient(Client):
    """nats-py's client, which says nothing in the clear to a server when TLS was asked for."""

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__()
        self._tls = settings.tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Look at the greeting before anything is answered; nats-py goes by `tls_required` alone."""
        if initial_connection and self._tls and not self._tls.handshake_first:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise nats.errors.Error(NO_TLS)
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Leave out what asyncio says at the end of each TLS link, because of how nats-py makes them; it means nothing."""
    return "eof_received() has no effect" not in record.getMessage()


def _secure_options(settings: ClusterSettings) -> dict[str, Any]:
    """Return what nats-py is told about TLS and who we are; raises RunError naming a file that cannot be used."""
    options: dict[str, Any] = {"user": settings.user, "password": settings.password, "token": settings.token}
    jwt, seed = read_login(settings)
    if jwt:
        # nats-py would look for it in the file for ever, were it not there.
        options["user_jwt_cb"] = jwt.encode
    if settings.tls:
        options |= {"tls": tls_context(settings.tls), "tls_handshake_first": settings.tls.handshake_first}
    return options | {"nkeys_seed_str": seed}


def _words(error: Exception) -> str:
    """What went wrong, without the library's decoration."""
    if isinstance(error, ssl.SSLError):
        return tls_words(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).removeprefix("nats: ").strip("'\"") or type(error).__name__


def _refusal(message: Msg) -> tuple[int, str] | None:
    """Return code and text when the answer to a publish is not that it is stored."""
    status = (message.headers or {}).get("Status")
    if status:
        return int(status), "no stream takes this subject" if status == "503" else f"answered with status {status}"
    try:
        answer = json.loads(message.data)
        error = answer.get("error")
        if error:
            return int(error.get("err_code") or 0), f"{error.get('description')} ({error.get('err_code')})"
        return None if answer["stream"] and answer["seq"] else (0, "not the answer of a stream")
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0, "not the answer of a stream"
