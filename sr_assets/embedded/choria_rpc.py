"""Choria's network protocol, version 1, without signatures: subjects, requests, replies, the protocol adapter's output.

A message has three layers, each JSON: transport (its data in base64), secure request or reply, request or reply.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import orjson

MAIN_COLLECTIVE: Final = "mcollective"
DISCOVERY: Final = "discovery"
REGISTRATION_SUBJECT: Final = f"{MAIN_COLLECTIVE}.broadcast.agent.registration"
ADAPTER_PROTOCOL: Final = "choria:adapters:choria_streams:output:1"
#: Status codes of a reply, as in SimpleRPC.
OK: Final = 0
UNKNOWN_ACTION: Final = 2
INVALID_DATA: Final = 4
_TTL_SECONDS: Final = 60


def agent_names(count: int) -> list[str]:
    """Return a node's agents: `discovery`, `emulated0`, `emulated1` …; a daemon has at least two."""
    return [DISCOVERY, *(f"emulated{number}" for number in range(max(count, 2) - 1))]


def collective_names(count: int) -> list[str]:
    """Return a node's collectives: `mcollective`, `collective1` …."""
    return [MAIN_COLLECTIVE, *(f"collective{number}" for number in range(1, count))]


def node_subject(collective: str, identity: str) -> str:
    """Return the subject of requests to one node."""
    return f"{collective}.node.{identity}"


def agent_subject(collective: str, agent: str) -> str:
    """Return the subject of requests to an agent of all nodes."""
    return f"{collective}.broadcast.agent.{agent}"


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """A request; `body` is the agent's payload, `reply_to` the subject of replies. A bare one has no Choria layers."""

    agent: str
    body: bytes
    reply_to: str = ""
    request_id: str = ""
    collective: str = MAIN_COLLECTIVE
    caller: str = ""
    identities: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    #: Whether it has a filter on classes, facts or data, which no emulated node matches.
    filtered: bool = False
    bare: bool = False
    time: int = field(default=0, compare=False)

    def concerns(self, identity: str, agents: list[str]) -> bool:
        """Return whether a node with these agents matches the filter."""
        if self.filtered or not set(self.agents) <= set(agents):
            return False
        return not self.identities or any(_is_identity(wanted, identity) for wanted in self.identities)


def _is_identity(wanted: str, identity: str) -> bool:
    if len(wanted) > 1 and wanted[0] == wanted[-1] == "/":
        try:
            return re.search(wanted[1:-1], identity) is not None
        except re.error:
            return False
    return wanted == identity


def encode_request(request: RpcRequest, sender: str, *, plain: bool = False) -> bytes:
    """Return a request as a transport message; `plain`: without base64 around the payload, as registrations are sent."""
    message = request.body.decode() if plain else base64.b64encode(request.body).decode()
    criteria = {"fact": [], "cf_class": [], "agent": request.agents, "identity": request.identities, "compound": []}
    envelope = {
        "requestid": request.request_id,
        "senderid": sender,
        "callerid": request.caller or f"choria={sender}",
        "collective": request.collective,
        "agent": request.agent,
        "ttl": _TTL_SECONDS,
        "time": request.time,
        "filter": criteria,
    }
    inner = {"protocol": "choria:request:1", "message": message, "envelope": envelope}
    secure = {
        "protocol": "choria:secure:request:1",
        "message": _dump(inner),
        "signature": "insecure",
        "pubcert": "insecure",
    }
    return _transport(secure, {"reply-to": request.reply_to or "dev.null", "mc_sender": sender})


@lru_cache(maxsize=64)
def decode_request(payload: bytes, agent: str = "") -> RpcRequest | None:
    """Return the request in a message, or None if it contains none; a broadcast is decoded once for all nodes.

    Text that is not a transport message is a bare request to `agent`: `ping`, or JSON such as
    `{"action": "generate", "data": {"size": 100}}`. Its replies have no layers either.
    """
    transport = _object(payload)
    if transport is None or transport.get("protocol") != "choria:transport:1":
        return RpcRequest(agent, payload, bare=True) if agent else None
    try:
        secure = orjson.loads(base64.b64decode(transport["data"]))
        inner = orjson.loads(secure["message"])
        envelope, headers = inner["envelope"], transport["headers"]
        criteria = envelope.get("filter") or {}
        return RpcRequest(
            str(envelope["agent"]),
            _payload(inner["message"]),
            str(headers.get("reply-to") or ""),
            str(envelope["requestid"]),
            str(envelope["collective"]),
            str(envelope["callerid"]),
            tuple(criteria.get("identity") or ()),
            tuple(criteria.get("agent") or ()),
            any(criteria.get(key) for key in ("fact", "cf_class", "compound")),
            time=int(envelope.get("time") or 0),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def encode_reply(request: RpcRequest, identity: str, body: bytes, time_seconds: int) -> bytes:
    """Return a node's reply as a transport message."""
    envelope = {"requestid": request.request_id, "senderid": identity, "agent": request.agent, "time": time_seconds}
    inner = _dump({"protocol": "choria:reply:1", "message": body.decode(), "envelope": envelope})
    hashed = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
    secure = {"protocol": "choria:secure:reply:1", "message": inner, "hash": hashed}
    return _transport(secure, {"mc_sender": identity})


def decode_reply(payload: bytes) -> tuple[str, bytes] | None:
    """Return the identity and the body of a node's reply, or None if the message is not a reply."""
    transport = _object(payload)
    try:
        assert transport is not None
        inner = orjson.loads(orjson.loads(base64.b64decode(transport["data"]))["message"])
        return str(inner["envelope"]["senderid"]), str(inner["message"]).encode()
    except (AssertionError, ValueError, KeyError, TypeError):
        return None


def answer(request: RpcRequest, limit_bytes: int) -> bytes | None:
    """Return an emulated agent's answer, or None if it gives none: `pong`, or the JSON of an action's reply.

    `generate` returns as many digits as the request's `size`, at most `limit_bytes`.
    """
    if request.agent == DISCOVERY or request.body == b"ping":
        return b"pong" if b"ping" in request.body else None
    asked = _object(request.body)
    if asked is None:
        return _reply("", INVALID_DATA, "Could not process request: not JSON", {})
    action, wanted = str(asked.get("action") or ""), asked.get("data") or {}
    if action != "generate":
        return _reply(action, UNKNOWN_ACTION, f"Unknown action {action} for agent {request.agent}", {})
    size = wanted.get("size", asked.get("size", 0)) if isinstance(wanted, dict) else None
    if not isinstance(size, int) or not 0 <= size <= limit_bytes:
        return _reply(action, INVALID_DATA, f"size must be from 0 to {limit_bytes}", {})
    return _reply(action, OK, "OK", {"message": ("0123456789" * (size // 10 + 1))[:size]})


def registration_request(output: bytes) -> bytes:
    """Return the request with which a daemon sends a registration, from the message that an adapter stores for it."""
    stored = orjson.loads(output)
    sent = int(datetime.fromisoformat(stored["time"]).timestamp())
    request = RpcRequest("registration", stored["data"].encode(), request_id=stored["requestid"], time=sent)
    return encode_request(request, stored["sender"], plain=True)


def adapter_output(payload: bytes) -> tuple[str, bytes] | None:
    """Return the sender of a request, and the message that Choria's protocol adapter stores for it; None if it is none."""
    transport = _object(payload)
    try:
        assert transport is not None
        inner = orjson.loads(orjson.loads(base64.b64decode(transport["data"]))["message"])
        envelope = inner["envelope"]
        sent = datetime.fromtimestamp(int(envelope["time"]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        stored = {
            "protocol": ADAPTER_PROTOCOL,
            "data": inner["message"],
            "sender": envelope["senderid"],
            "time": sent,
            "requestid": envelope["requestid"],
        }
        return str(envelope["senderid"]), orjson.dumps(stored)
    except (
        AssertionError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        OSError,
    ):  # OSError: a year that C cannot count
        return None


def _reply(action: str, code: int, text: str, data: dict[str, Any]) -> bytes:
    return orjson.dumps({"action": action, "statuscode": code, "statusmsg": text, "data": data})


def _transport(secure: dict[str, Any], headers: dict[str, str]) -> bytes:
    data = base64.b64encode(orjson.dumps(secure)).decode()
    return orjson.dumps({"protocol": "choria:transport:1", "data": data, "headers": headers})


def _payload(message: str) -> bytes:
    """Return a request's payload, which clients send in base64 and daemons as text."""
    try:
        return base64.b64decode(message, validate=True)
    except ValueError:
        return message.encode()


def _object(payload: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
