"""Objects in a JetStream object store, through nats-py."""

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import nats.errors
import nats.js.api
import nats.js.errors
from nats.js.object_store import ObjectStore

from sr_assets.adapters.nats.client import ANY, ClientThread
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError, TransientError

T = TypeVar("T")
_REPLICAS: Final = (3, 1)
_SECONDS: Final = 60.0


class StoredObject(NamedTuple):
    """An object's size, and its description: a JSON object, empty if another program stored it."""

    size_bytes: int
    description: dict[str, Any]


class ObjectBucket:
    """One object store through its own connection; a context manager.

    Every method raises TransientError, one line, if the server does not respond, and RunError if it refuses.
    """

    def __init__(self, cluster: ClusterSettings, bucket: str) -> None:
        self._cluster, self._bucket = cluster, bucket
        self._thread = ClientThread(cluster, "sr-assets checkpoint", ANY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def put(self, name: str, file: Path, description: dict[str, Any]) -> None:
        """Store a file's content; the previous object stays valid until the new one is complete."""
        self._run(lambda: self._put(name, file.read_bytes(), json.dumps(description)))

    def get(self, name: str, file: Path) -> StoredObject | None:
        """Write an object's content into a file and return its description; None if there is none."""
        return self._run(lambda: self._get(name, file))

    def find(self, name: str) -> StoredObject | None:
        """Return an object's description, or None if there is none."""
        return self._run(lambda: self._get(name, None))

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        where = f"{self._cluster.label}: object store {self._bucket}"

        async def attempt() -> T:
            try:
                return await self._thread.heed(f"object store {self._bucket}", work())
            except (nats.errors.TimeoutError, TimeoutError, nats.errors.ConnectionClosedError):
                raise TransientError(f"{where}: {self._thread.complaint or 'no response'}") from None
            except (nats.errors.Error, nats.js.errors.Error) as error:
                raise RunError(f"{where}: {error}") from None

        return self._thread.run(attempt(), _SECONDS)

    async def _put(self, name: str, content: bytes, description: str) -> None:
        store = await self._store(creates=True)
        assert store is not None
        await store.put(name, content, nats.js.api.ObjectMeta(description=description))

    async def _get(self, name: str, file: Path | None) -> StoredObject | None:
        store = await self._store(creates=False)
        if store is None:
            return None
        try:
            info = await store.get_info(name)
            if file is not None:
                with file.open("wb") as content:
                    await store.get(name, content)
        except (nats.js.errors.NotFoundError, nats.js.errors.ObjectNotFoundError):
            return None
        try:
            description = json.loads(info.description or "{}")
        except ValueError:
            description = {}
        return StoredObject(info.size or 0, description if isinstance(description, dict) else {})

    async def _store(self, *, creates: bool) -> ObjectStore | None:
        context = self._thread.opened().jetstream(prefix=self._cluster.api_prefix, timeout=10.0)
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
