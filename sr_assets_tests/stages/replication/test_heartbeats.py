"""Heartbeats through a tree of three servers: copied, never tracked, and timed at each hop."""

import socket
import threading
from pathlib import Path

import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.embedded.nats_server import HOST
from sr_assets.operate.metrics import Exposition
from sr_assets.settings import HeartbeatSubject
from sr_assets.stages.heartbeat_publisher import publish_heartbeat
from sr_assets_tests.rig import Rig, Sent, address
from sr_assets_tests.servers import NatsServer


class DelayingProxy:
    """A proxy that delays the first bytes of each client by `seconds`."""

    def __init__(self, server: NatsServer) -> None:
        self.seconds = 0.0
        self._server, self._ended = server, threading.Event()
        self._listener = socket.create_server((HOST, 0))
        self.url = f"nats://{HOST}:{self._listener.getsockname()[1]}?connect_timeout=60s"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more clients and release the delayed ones."""
        self._ended.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((HOST, self._server.port))
            threading.Thread(target=self._pass, args=(client, server, self.seconds), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, 0.0), daemon=True).start()

    def _pass(self, sender: socket.socket, receiver: socket.socket, seconds: float) -> None:
        self._ended.wait(seconds)
        try:
            while data := sender.recv(65536):
                receiver.sendall(data)
        except OSError:
            pass
        finally:
            for end in (sender, receiver):
                end.close()


@pytest.mark.process
def test_heartbeat_table_shows_which_hop_of_a_tree_is_delayed(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make("BEATS")
    with NatsServer(tmp_path, "centre") as centre:
        proxy = DelayingProxy(centre)
        rig.create(stream, rig.target)
        rig.create(stream, centre)
        tracked = {"inspect_subject_token": -1, "inspect_duration": "1h"}
        rig.add(stream, name="city", **tracked)
        rig.add(stream, name="region", source_url=rig.target.url, target_url=proxy.url)
        with Cluster(address(rig.source), "test") as opened:
            for _ in range(3):
                publish_heartbeat(opened, HeartbeatSubject(subject=f"{stream}.beat"))
        rig.drain("city")
        first = rig.row("heartbeats")
        assert (first["name"], first["stream"], first["subject"]) == ("city", stream, f"{stream}.beat")
        assert first["originator"] == socket.gethostname()
        sent = rig.row("hops")
        assert (sent["name"], sent["stream"], sent["copies"]) == ("city", stream, 3)
        copies = rig.copies(stream)
        assert len(copies) == 3, "always copied"
        assert rig.rows("last_seen_nodes") == [], "never tracked"
        assert rig.row("replication")["no_sender_messages"] == 0
        latencies_ns = [
            copy.stored_ns - sent.stored_ns // 10**6 * 10**6
            for copy, sent in zip(copies, rig.stored(stream), strict=True)
        ]
        assert first["seconds"] == pytest.approx(latencies_ns[-1] / 1e9, abs=0.001)
        assert first["max_seconds"] == pytest.approx(max(latencies_ns) / 1e9, abs=0.001)
        assert first["p50_seconds"] <= first["p95_seconds"] <= first["max_seconds"]
        assert first["sent_at"] <= first["stored_at"] <= first["arrived_at"]
        proxy.seconds = first["max_seconds"] + 1.0
        rig.drain("region")
        proxy.close()
        hops = {row["name"]: row for row in rig.rows("heartbeats")}
        assert hops["city"] == first | {"arrived_at": hops["city"]["arrived_at"], "seconds": hops["city"]["seconds"]}
        assert hops["region"]["seconds"] > proxy.seconds > hops["city"]["max_seconds"]
        assert hops["region"]["sent_at"] == first["sent_at"]
        measured = {row["name"]: row for row in rig.rows("hops")}
        assert measured["city"] == sent, "from the headers alone"
        region = measured["region"]
        assert region["copies"] == 3
        assert region["p50_seconds"] > proxy.seconds > sent["p95_seconds"] > 0
        replicated = {row["name"]: row for row in rig.rows("replication")}
        assert replicated["region"]["latency_p95_seconds"] == region["p95_seconds"]
        assert replicated["city"]["latency_p50_seconds"] == sent["p50_seconds"]
        exposition = Exposition(rig.settings())
        exposition.renew()
        exposed = exposition.text()
        for name in ("age_seconds", "latency_seconds"):
            for hop in ("city", "region"):
                assert f'sr_assets_heartbeat_{name}{{name="{hop}",stream="{stream}",subject="{stream}.beat"' in exposed


def test_heartbeat_with_an_impossible_time_is_copied(rig: Rig) -> None:
    stream = rig.make()
    forged = b"NATS/1.0\r\nChoria-SR-Subject: m\r\nChoria-SR-Source: S 5 N C 9223372036854775807\r\n\r\n"
    rig.publish(stream, [Sent(b"1700000000", headers=forged), Sent(b"last")])
    rig.add(stream)
    rig.drain()
    assert [copy.payload for copy in rig.copies(stream)] == [b"1700000000", b"last"]
