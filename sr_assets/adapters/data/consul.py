"""The data source `consul`: the key-value store of Consul's HTTP API."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from sr_assets.adapters import times
from sr_assets.adapters.data.interface import Change, Json, Source
from sr_assets.adapters.security import tls_context
from sr_assets.domain.clusters import TlsSettings
from sr_assets.domain.errors import ConfigurationError, RunError, TransientError
from sr_assets.settings.references import MissingValueError

if TYPE_CHECKING:
    from sr_assets.settings import SourceSettings

_SECONDS: Final = 5.0
#: How long Consul holds a request for a change.
_WAIT_SECONDS: Final = 30
_PAUSE_SECONDS: Final = 0.5
#: Consul's own limit for a value is 512 KiB; a list of keys may be longer.
_MOST_BYTES: Final = 16 << 20
#: What is read and shown of an error's text.
_LONGEST_ERROR: Final = 300


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the token and read another key."""

    def redirect_request(self, *_: object) -> None:
        """Return no request to follow."""


class ConsulSource(Source):
    """Consul's key-value store below `prefix`. Consul keeps no history."""

    def __init__(self, name: str, settings: SourceSettings) -> None:
        super().__init__(name, settings)
        files = settings.tls.files if settings.tls else (None, None, None)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
        if (settings.url or "").startswith("https"):
            handlers.append(urllib.request.HTTPSHandler(context=tls_context(TlsSettings(*files))))
        self._opener = urllib.request.build_opener(*handlers)

    def read(self, key: str) -> Json:
        return self._request("GET", key, "raw")[0].decode("utf-8", "replace")

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        try:
            answer = self._request("GET", prefix, "keys")[0]
        except MissingValueError:
            return []
        try:
            return sorted(key.removeprefix(self.settings.prefix) for key in json.loads(answer))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise RunError(f"{self.settings.label}: not a list of keys of Consul: {answer[:80]!r}") from None

    def put(self, key: str, value: Json) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        if self._request("PUT", key, body=text.encode())[0].strip() != b"true":
            raise RunError(f"{self.settings.label}{key}: Consul did not store the value; see its log")

    def delete(self, key: str) -> None:
        self.read(key)
        self._request("DELETE", key)

    def watch(self, key: str) -> Iterator[Change]:
        """Yield the value of a key, and each later change, by Consul's blocking queries."""
        index, before, responded = 0, None, False
        while True:
            query = f"raw&index={index}&wait={_WAIT_SECONDS}s" if index else "raw"
            try:
                request = partial(self._request, "GET", key, query)
                body, index = self._until_available(request) if responded else request()
                value: str | None = body.decode("utf-8", "replace")
            except MissingValueError:
                value, index = None, 0
                times.sleep(_PAUSE_SECONDS)
            responded = True
            if value != before:
                before = value
                yield Change(key, value, times.time_ns(), deleted=value is None)

    def _request(self, method: str, key: str, query: str = "", body: bytes | None = None) -> tuple[bytes, int]:
        """Return the body of a response and its `X-Consul-Index`."""
        settings = self.settings
        if not {"", ".", ".."}.isdisjoint(key.removesuffix("/").split("/")) and key:
            raise ConfigurationError(
                f"{self.name}/{key}: is not a key of Consul; use no empty part, '.' or '..' between '/'"
            )
        url = f"{(settings.url or '').rstrip('/')}/v1/kv/{quote(settings.prefix + key)}" + (
            f"?{query}" if query else ""
        )
        headers = {"X-Consul-Token": settings.token} if settings.token else {}
        seconds = _SECONDS + (_WAIT_SECONDS * 1.1 if "index=" in query else 0)
        request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310  the settings allow http and https
        try:
            with self._opener.open(request, timeout=seconds) as response:
                content = response.read(_MOST_BYTES + 1)
                if len(content) > _MOST_BYTES:
                    raise RunError(
                        f"{settings.label}{key}: the response has more than {_MOST_BYTES >> 20} MiB; correct the URL"
                    )
                if response.length:  # a limited read takes a lost connection for the end
                    raise http.client.IncompleteRead(content)
                return content, int(response.headers.get("X-Consul-Index") or 0)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(key, error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            # The text of an HTTPException quotes the response.
            named = type(error).__name__ if isinstance(error, http.client.HTTPException) else error
            reason = getattr(error, "reason", None) or named
            raise TransientError(f"{settings.label} is unavailable: {reason}") from None

    def _refused(self, key: str, error: urllib.error.HTTPError) -> RunError:
        match error.code:
            case HTTPStatus.NOT_FOUND:
                return MissingValueError(f"{self.settings.label} has no key {key!r}; put it")
            case HTTPStatus.FORBIDDEN | HTTPStatus.UNAUTHORIZED:
                return RunError(f"{self.settings.label}{key}: Consul denies it ({error.code}); set a token that may")
        lines: list[str] = []
        with contextlib.suppress(OSError, http.client.HTTPException):
            lines = error.read(_LONGEST_ERROR).decode("utf-8", "replace").strip().splitlines()
        lines = lines or [str(error.reason)]
        return TransientError(f"{self.settings.label}{key}: Consul answered {error.code}: {lines[0][:_LONGEST_ERROR]}")
