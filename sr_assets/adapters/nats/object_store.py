"""Objects in a JetStream object store, through nats-py."""

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import nats.errors
import nats.js.api
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.object_store import ObjectStore

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import (
    MESSAGE_NOT_FOUND,
    ApiError,
    check_response,
    decode_response,
    encode_json,
    parse_message,
)
from sr_assets.adapters.nats.client import ANY, ClientThread
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError, TransientError, cannot_write
from sr_assets.domain.messages import Message
from sr_assets.domain.subjects import object_subject

logger = logging.getLogger(__name__)

T = TypeVar("T")
_REPLICAS: Final = (3, 1)
_CHUNK_BYTES: Final = 128 * 1024
_SECONDS: Final = 60.0
#: The bucket behind a leaf node's link may store the chunks after the leaf node's own bucket has acknowledged them.
_STORED_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.1
_REPLACED_SECONDS: Final = 1.0
#: The chunks that no object names may be so many, each with a subject of its own, before a put deletes the old ones.
_LEFT: Final = 20
_LEFT_NS: Final = 10 * 60 * 10**9
#: A list of more subjects may exceed the largest message that a leaf node's link accepts.
_LISTED: Final = 10_000
#: A put deletes at most so many.
_SWEPT: Final = 200
#: The largest object that a get accepts: an object of another program, or of an attacker, must not fill the disk.
LARGEST_BYTES: Final = 2 << 30
#: The largest JSON of an object's info that is parsed.
_LARGEST_INFO: Final = 1 << 20
#: The last token of the chunks' subject. A writer of the store chooses it, so a wildcard would reach other objects.
_NUID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StoredObject(NamedTuple):
    """An object's size, and its description: a JSON object, empty if another program stored it."""

    size_bytes: int
    description: dict[str, Any]


class ObjectBucket:
    """One object store through its own connection; a context manager.

    Every method raises TransientError, one line, if the server does not respond, and RunError if it refuses, or if a file of
    this machine cannot be written.
    """

    def __init__(self, cluster: ClusterSettings, bucket: str) -> None:
        self._cluster, self._bucket = cluster, bucket
        self._info = f"STREAM.INFO.OBJ_{bucket}"
        self._thread = ClientThread(cluster, "sr-assets checkpoint", ANY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def put(
        self,
        name: str,
        file: Path,
        description: dict[str, Any],
        check: Callable[[StoredObject | None], None] = lambda _: None,
    ) -> None:
        """Store a file's content; the previous object stays valid until the new one is complete.

        `check` is called directly before, with the object that will be replaced, and raises an error to keep it.

        Then delete old chunks that no object names: of interrupted puts, and of a bucket with this name in another domain,
        whose subjects pass through leaf nodes.
        """
        # Read here: the connection takes an OSError for one of the server.
        content = file.read_bytes()
        self._run(lambda: self._put(name, content, json.dumps(description), check))
        try:
            self._run(self._sweep)
        except (RunError, ValueError, KeyError) as error:
            # A failure, or an object of another program, must not look like a checkpoint that was not stored.
            logger.warning("%s: left chunks were not deleted: %s", name, error)

    def get(self, name: str, file: Path) -> StoredObject | None:
        """Write an object's content into a file and return its description; None if there is none."""
        return self._run(lambda: self._get(name, file))

    def find(self, name: str) -> StoredObject | None:
        """Return an object's description, or None if there is none."""
        return self._run(lambda: self._get(name, None))

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        where = self._where

        async def attempt() -> T:
            try:
                return await self._thread.heed(f"object store {self._bucket}", work())
            except (nats.errors.TimeoutError, TimeoutError, nats.errors.ConnectionClosedError):
                raise TransientError(f"{where}: {self._thread.complaint or 'no response'}") from None
            except (nats.errors.Error, nats.js.errors.Error) as error:
                raise RunError(f"{where}: {error}") from None

        return self._thread.run(attempt(), _SECONDS)

    async def _put(
        self, name: str, content: bytes, description: str, check: Callable[[StoredObject | None], None]
    ) -> None:
        await self._store(creates=True)
        nuid = secrets.token_hex(11)
        chunks_subject = f"$O.{self._bucket}.C.{nuid}"
        chunks = range(0, len(content), _CHUNK_BYTES)
        try:
            with LongWork(f"storing bytes of {name}", len(content)) as progress:
                for at in chunks:
                    await self._context().publish(chunks_subject, content[at : at + _CHUNK_BYTES])
                    progress.reached(min(at + _CHUNK_BYTES, len(content)))
            deadline = times.monotonic() + _STORED_SECONDS
            # An acknowledgement may be that of another stream, which is earlier than this one's.
            while await self._count(chunks_subject) != len(chunks):
                if times.monotonic() > deadline:
                    raise RunError(f"{self._where}: not all chunks of {name} were stored")
                await asyncio.sleep(_LOOK_SECONDS)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            info = nats.js.api.ObjectInfo(
                name=name,
                bucket=self._bucket,
                nuid=nuid,
                size=len(content),
                chunks=len(chunks),
                digest=f"SHA-256={digest}",
                description=description,
                options=nats.js.api.ObjectMetaOptions(max_chunk_size=_CHUNK_BYTES),
                mtime=times.utc_now().isoformat(),
            )
            before = await self._replace(name, info, check)
        except BaseException:
            with contextlib.suppress(RunError):
                await self._purge(chunks_subject)
            raise
        if before is not None and (old := _nuid(_read_info(before.payload))):
            await self._purge(f"$O.{self._bucket}.C.{old}")

    async def _replace(
        self, name: str, info: nats.js.api.ObjectInfo, check: Callable[[StoredObject | None], None]
    ) -> Message | None:
        """Let a name stand for a new object; return the message of the previous one."""
        subject = object_subject(self._bucket, name)
        before = await self._last(subject)
        check(_stored_object(_read_info(before.payload)) if before else None)
        # Not conditional on the previous message: a bucket of this name in another domain stores it too, and has another one.
        await self._context().publish(subject, json.dumps(info.as_dict()).encode(), headers={"Nats-Rollup": "sub"})
        return before

    async def _purge(self, subject: str) -> None:
        await self._ask(f"STREAM.PURGE.OBJ_{self._bucket}", {"filter": subject})

    def _context(self) -> JetStreamContext:
        return self._thread.opened().jetstream(prefix=self._cluster.api_prefix, timeout=10.0)

    @property
    def _where(self) -> str:
        return f"{self._cluster.label}: object store {self._bucket}"

    async def _count(self, subject: str) -> int:
        state = (await self._ask(self._info, {"subjects_filter": subject}))["state"]
        return int((state.get("subjects") or {}).get(subject, 0))

    async def _sweep(self) -> None:
        prefix = f"$O.{self._bucket}"
        state = (await self._ask(self._info, {"subjects_filter": f"{prefix}.M.>"}))["state"]
        objects, count = state.get("subjects") or {}, state["num_subjects"]
        if count <= 2 * len(objects) + _LEFT or (count > _LISTED and self._cluster.api_owner):
            return
        chunks = (await self._ask(self._info, {"subjects_filter": f"{prefix}.C.>"}))["state"].get("subjects") or {}
        described = [message for subject in objects if (message := await self._last(subject))]
        newest_ns = max((message.stored_ns for message in described), default=0)
        named = {f"{prefix}.C.{_nuid(_read_info(message.payload))}" for message in described}
        for subject in sorted(chunks.keys() - named)[:_SWEPT]:
            chunk = await self._last(subject)
            if chunk is not None and chunk.stored_ns < newest_ns - _LEFT_NS:
                await self._purge(subject)

    async def _last(self, subject: str) -> Message | None:
        """Return the last message of a subject, or None if another member has just deleted it."""
        try:
            return parse_message(await self._ask(f"STREAM.MSG.GET.OBJ_{self._bucket}", {"last_by_subj": subject}))
        except ApiError as error:
            if error.code == MESSAGE_NOT_FOUND:
                return None
            raise

    async def _ask(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._thread.ask(self._cluster.api(operation), encode_json(body))
        try:
            return check_response(self._cluster.label, operation, decode_response(answer.data))
        except ValueError as error:
            raise RunError(f"{self._cluster.label}: {operation}: {error}") from None

    async def _get(self, name: str, file: Path | None) -> StoredObject | None:
        if await self._store(creates=False) is None:
            return None
        while (info := await self._find(name)) is not None:
            held = _stored_object(info)
            if held is None or file is None or await self._read(name, info, held, file):
                return held
        return None

    async def _find(self, name: str) -> dict[str, Any] | None:
        message = await self._last(object_subject(self._bucket, name))
        return None if message is None else _read_info(message.payload)

    async def _read(self, name: str, info: dict[str, Any], held: StoredObject, file: Path) -> bool:
        """Write an object's content into a file; return False if another object replaces it meanwhile.

        Chunks after the size that the info names are not read.
        """
        nuid, where = _nuid(info), f"{self._where}: {name}"
        if not nuid or held.size_bytes > LARGEST_BYTES:
            raise RunError(f"{where}: is not an object of at most {LARGEST_BYTES >> 30} GiB")
        digest, left, received = hashlib.sha256(), held.size_bytes, 0
        if not left:
            raise RunError(f"{where}: is empty")
        subject = f"$O.{self._bucket}.C.{nuid}"
        chunks = await self._context().subscribe(subject, ordered_consumer=True)
        try:
            with file.open("wb") as content, LongWork(f"reading bytes of {name}", left) as progress:
                while left > 0:
                    try:
                        chunk = (await chunks.next_msg(timeout=_REPLACED_SECONDS)).data
                    except (nats.errors.TimeoutError, TimeoutError):
                        # On a slow link the response waits behind the chunks.
                        with contextlib.suppress(TransientError):
                            # In this order: chunks are only deleted after another object has replaced theirs.
                            count = await self._count(subject)
                            if _nuid(await self._find(name) or {}) != nuid:
                                return False
                            if count <= received:
                                raise RunError(
                                    f"{where}: lacks {left:,} of its {held.size_bytes:,} bytes; store another"
                                    " checkpoint, or restore a file"
                                ) from None
                        continue
                    content.write(chunk[:left])
                    digest.update(chunk[:left])
                    left, received = left - len(chunk), received + 1
                    progress.reached(min(held.size_bytes - left, held.size_bytes))
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            # The connection would take it for an error of the server.
            raise RunError(cannot_write(file, error)) from None
        await chunks.unsubscribe()
        if info.get("digest") != f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}":
            raise RunError(f"{where}: its content differs from its digest")
        return True

    async def _store(self, *, creates: bool) -> ObjectStore | None:
        context = self._context()
        try:
            return await context.object_store(self._bucket)
        except nats.js.errors.NotFoundError:
            if not creates:
                return None
        for replicas in _REPLICAS:
            try:
                return await context.create_object_store(self._bucket, nats.js.api.ObjectStoreConfig(replicas=replicas))
            except nats.js.errors.APIError:
                if replicas == 1:
                    raise
        return None


def _read_info(payload: bytes) -> dict[str, Any]:
    """Return the JSON of an object's info; empty unless it is an object of bounded size."""
    try:
        info = json.loads(payload) if len(payload) <= _LARGEST_INFO else {}
    except (ValueError, RecursionError):
        info = {}
    return info if isinstance(info, dict) else {}


def _nuid(info: dict[str, Any]) -> str:
    """Return the last token of the chunks' subject, or empty text if it is none."""
    nuid = info.get("nuid")
    return nuid if isinstance(nuid, str) and _NUID.fullmatch(nuid) else ""


def _stored_object(info: dict[str, Any]) -> StoredObject | None:
    """Return an object from the JSON of its info, or None if it was deleted."""
    if info.get("deleted"):
        return None
    description, size = info.get("description"), info.get("size")
    described = _read_info(description.encode(errors="replace")) if isinstance(description, str) else {}
    return StoredObject(size if type(size) is int and size > 0 else 0, described)
