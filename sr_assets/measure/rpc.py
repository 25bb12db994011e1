"""The suite `rpc`: a request to every node of a fleet, until all replies have arrived."""

import itertools
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import orjson

from sr_assets.adapters import times
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.wire import Connection
from sr_assets.adapters.wire.frames import encode_pub
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError
from sr_assets.embedded.choria_rpc import (
    DISCOVERY,
    MAIN_COLLECTIVE,
    OK,
    RpcRequest,
    agent_subject,
    decode_reply,
    encode_request,
    node_subject,
)
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.measure.results import Trial, listed

AGENT: Final = "emulated0"
_CALLER: Final = "choria=sr-assets-measure"
#: Discovery ends after this time without a further reply, a request after this time in total.
_QUIET_SECONDS: Final = 2.0
_REPLY_SECONDS: Final = 10.0
_LATE_SECONDS: Final = 0.05


def measure_rpc(
    cluster: ClusterSettings,
    nodes: Sequence[int],
    *,
    interval_seconds: float,
    for_seconds: float,
    payload_bytes: int,
    tests: list[Trial],
) -> None:
    """Append one test per number of nodes: requests every interval, to all nodes or to the first ones by name.

    The times are those from a request to each of its replies. Raises RunError if fewer nodes answer a ping.
    """
    with closing(_Client(cluster)) as client:
        with LongWork("finding nodes"):
            known = client.discover()
        for number in nodes:
            test = Trial("request → all replies", number, 0)
            tests.append(test)
            if len(known) < number:
                test.expected, test.times_ns = number, []
                test.missing = _missing_nodes(known, number)
                raise RunError(
                    f"rpc: found {len(known)} of {number} nodes at {cluster.label}{listed(test.missing)}; start them, as with"
                    f" `sr-assets emulate --rpc --nodes {number}`"
                )
            deadline = times.monotonic() + for_seconds
            with LongWork(f"requests to {number} nodes", max(1, math.ceil(for_seconds / interval_seconds))) as progress:
                for requests in itertools.count(1):
                    due = times.monotonic() + interval_seconds
                    client.generate(test, known[:number], len(known), payload_bytes)
                    progress.reached(requests)
                    if due >= deadline or test.missing:
                        break
                    times.sleep(max(0.0, due - times.monotonic()))


def _missing_nodes(known: Sequence[str], number: int) -> list[str]:
    """Return the names of missing nodes, if the fleet is emulated, else their count."""
    emulated = FleetPlan(number, 1).senders()
    if set(known) <= set(emulated):
        return [name for name in emulated if name not in set(known)]
    return [f"{number - len(known)} unknown nodes"]


class _Client:
    """A client of Choria's protocol."""

    def __init__(self, cluster: ClusterSettings) -> None:
        self._connection = Connection(cluster, "sr-assets measure")
        self._connection.open()

    def close(self) -> None:
        self._connection.close()

    def discover(self) -> list[str]:
        """Return the nodes with the agent `emulated0`, sorted."""
        request, inbox = self._request(DISCOVERY, b"ping")
        self._connection.send(encode_pub(agent_subject(MAIN_COLLECTIVE, DISCOVERY), b"", b"", request))
        found_names: set[str] = set()
        deadline = times.monotonic() + _REPLY_SECONDS
        while arrived := [
            node for node, _, _ in self._replies(inbox, min(_QUIET_SECONDS, deadline - times.monotonic()))
        ]:
            found_names.update(arrived)
        return sorted(found_names)

    def generate(self, test: Trial, nodes: Sequence[str], known: int, payload_bytes: int) -> None:
        """Request a payload of all nodes and add their replies to the test."""
        body = orjson.dumps({"agent": AGENT, "action": "generate", "data": {"size": payload_bytes}})
        request, inbox = self._request(AGENT, body)
        subjects = [node_subject(MAIN_COLLECTIVE, node) for node in nodes]
        if len(nodes) == known:
            subjects = [agent_subject(MAIN_COLLECTIVE, AGENT)]
        frames = b"".join(encode_pub(subject, b"", b"", request) for subject in subjects)
        awaited = set(nodes)
        test.expected += len(nodes)
        began_ns = time.perf_counter_ns()
        self._connection.send(frames)
        while awaited and (left := _REPLY_SECONDS - (time.perf_counter_ns() - began_ns) / 1e9) > 0:
            for node, reply, at_ns in self._replies(inbox, left):
                if node not in awaited:
                    test.unexpected += 1
                    continue
                awaited.discard(node)
                test.times_ns.append(at_ns - began_ns)
                test.failed += not _is_whole(reply, payload_bytes)
        # A second reply of a node, or one of another node, may follow the last one.
        test.unexpected += sum(1 for _ in self._replies(inbox, _LATE_SECONDS))
        test.missing += sorted(awaited)

    def _request(self, agent: str, body: bytes) -> tuple[bytes, bytes]:
        """Return a request, and the subject of its replies."""
        inbox = self._connection.new_inbox()
        agents = (AGENT,) if agent == DISCOVERY else ()
        request = RpcRequest(
            agent, body, inbox.decode(), secrets.token_hex(16), caller=_CALLER, agents=agents, time=int(times.time())
        )
        return encode_request(request, "sr-assets-measure"), inbox

    def _replies(self, inbox: bytes, timeout_seconds: float) -> Iterator[tuple[str, bytes, int]]:
        """Yield the replies that arrive next: the node, its body, and the time of arrival."""
        frames = self._connection.receive(max(0.0, timeout_seconds))
        at_ns = time.perf_counter_ns()
        for frame in frames:
            reply = decode_reply(frame.payload) if frame.subject == inbox else None
            if reply is not None:
                yield reply[0], reply[1], at_ns


def _is_whole(reply: bytes, payload_bytes: int) -> bool:
    try:
        answer = orjson.loads(reply)
        return answer["statuscode"] == OK and len(answer["data"]["message"]) == payload_bytes
    except (ValueError, KeyError, TypeError):
        return False
