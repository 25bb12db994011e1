"""Every source that can be written keeps the same contract; NATS KV also keeps a history."""

import contextlib
import gc
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sr_assets.adapters.data import Source, open_source
from sr_assets.adapters.data.consul import ConsulSource
from sr_assets.adapters.data.interface import Change
from sr_assets.domain.errors import ConfigurationError, RunError, TransientError
from sr_assets.settings import SourceSettings
from sr_assets.settings.references import MissingValueError
from sr_assets_tests.consul import BINARY, real_consul, stand_in
from sr_assets_tests.rig import Rig, cluster, in_background
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.sourced import kv, make_data_bucket

pytestmark = pytest.mark.process
Opened = Callable[..., Source]


@pytest.fixture
def opened() -> Iterator[Opened]:
    with contextlib.ExitStack() as stack:
        yield lambda **block: stack.enter_context(open_source("ops", SourceSettings.model_validate(block)))


@pytest.fixture(params=["kv", "file", "memory", "consul", "real consul"])
def source(request: pytest.FixtureRequest, rig: Rig, tmp_path: Path, opened: Opened) -> Iterator[Source]:
    kind = request.param
    if kind == "real consul" and BINARY is None:
        pytest.skip("the host has no consul; install its package")
    with contextlib.ExitStack() as stack:
        match kind:
            case "kv":
                yield opened(**kv(rig, make_data_bucket(rig)))
            case "file":
                yield opened(type="file", path=str(tmp_path / "values.yaml"))
            case "memory":
                yield opened(type="memory")
            case "consul":
                yield opened(type="consul", url=stack.enter_context(stand_in()), prefix="sites/")
            case _:
                url = stack.enter_context(real_consul(tmp_path))
                yield opened(type="consul", url=url, prefix="sites/")


def test_source_keeps_all_keys_that_are_put_concurrently(source: Source) -> None:
    keys = [f"key{number:02}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: source.put(key, key), keys))
    assert source.keys() == keys


def test_source_stores_lists_and_deletes_values(source: Source) -> None:
    source.put("cadence", "1h")
    source.put("site.london", "on")
    assert source.get("cadence") == "1h"
    assert source.keys() == ["cadence", "site.london"]
    assert source.keys("site.") == ["site.london"]
    source.put("cadence", "2h")
    assert source.get("cadence") == "2h"
    source.delete("cadence")
    assert source.keys() == ["site.london"]


def test_missing_key_is_one_line_or_the_default(source: Source) -> None:
    source.put("other", "x")
    with pytest.raises(MissingValueError, match="has no key 'cadence'") as caught:
        source.get("cadence")
    assert "\n" not in str(caught.value)
    assert source.get("cadence", "1h") == "1h"
    with pytest.raises(MissingValueError):
        source.delete("cadence")


def test_watch_yields_the_value_and_each_change(source: Source) -> None:
    source.put("cadence", "1h")
    changes = source.watch("cadence")
    seen: list[Change] = [next(changes)]
    source.put("cadence", "2h")
    seen.append(next(changes))
    source.delete("cadence")
    seen.append(next(changes))
    assert [(change.value, change.deleted) for change in seen] == [("1h", False), ("2h", False), (None, True)]


def test_kv_keeps_the_history_of_its_bucket(rig: Rig, opened: Opened) -> None:
    source = opened(**kv(rig, make_data_bucket(rig)))
    for number in range(7):
        source.put("cadence", f"{number}h")
    source.delete("cadence")
    changes = source.history("cadence")
    assert [change.value for change in changes] == ["3h", "4h", "5h", "6h", None]
    assert [change.revision for change in changes] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("operation", ("get", "put", "keys"))
def test_missing_bucket_is_one_line_with_the_remedy(rig: Rig, opened: Opened, operation: str) -> None:
    source = opened(**kv(rig, "NONE"))
    arguments = {"get": ["x"], "put": ["x", "1"], "keys": []}[operation]
    with pytest.raises(MissingValueError, match=r"bucket NONE on .* does not exist; create it: nats kv add NONE"):
        getattr(source, operation)(*arguments)


def test_bucket_without_permission_is_one_line(tmp_path: Path, opened: Opened) -> None:
    users = 'authorization: {users: [{user: u, password: p, permissions: {publish: ["$SYS.>"]}}]}'
    with NatsServer(tmp_path / "n", "n", config=users) as server:
        source = opened(type="kv", url=f"nats://u:p@{server.address}", bucket="OPS")
        with pytest.raises(RunError, match=r"bucket OPS on .*[Pp]ermission") as caught:
            source.get("x")
    assert "\n" not in str(caught.value)


def test_kv_reads_again_after_its_server_returned(tmp_path: Path, opened: Opened) -> None:
    folder = tmp_path / "n"
    with NatsServer(folder, "n") as server:
        with cluster(server) as opened_cluster:
            opened_cluster.create_stream({"name": "KV_OPS", "subjects": ["$KV.OPS.>"]})
        source = opened(type="kv", url=server.url, bucket="OPS")
        source.put("x", "1")
        server.kill()
        with pytest.raises(RunError, match=r"bucket OPS on .* is unavailable"):
            source.get("x")
        server.start()
        assert source.get("x") == "1"


def test_watch_continues_after_an_outage(tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer(tmp_path / "n", "n") as server:
        with cluster(server) as opened_cluster:
            opened_cluster.create_stream({"name": "KV_OPS", "subjects": ["$KV.OPS.>"]})
        block = {"type": "kv", "url": server.url, "bucket": "OPS"}
        writer, warnings = opened(**block), []

        def restart(line: str) -> None:
            warnings.append(line)
            server.start()
            writer.put("x", "2")

        monkeypatch.setattr("sr_assets.adapters.data.interface.print_warning", restart)
        writer.put("x", "1")
        changes = opened(**block).watch("x")
        assert next(changes).value == "1"
        server.kill()
        assert next(changes).value == "2"
    (warning,) = warnings
    assert "the watch continues when it responds" in warning


def test_watch_of_a_deleted_consul_key_continues_after_an_outage(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(contextlib.ExitStack())
        url = first.enter_context(stand_in())
        source = opened(type="consul", url=url)

        def restart(_: str) -> None:
            servers.enter_context(stand_in(int(url.rpartition(":")[2])))
            source.put("x", "2")

        monkeypatch.setattr("sr_assets.adapters.data.interface.print_warning", restart)
        source.put("x", "1")
        changes = source.watch("x")
        assert next(changes).value == "1"
        source.delete("x")
        assert next(changes).deleted
        first.close()
        assert next(changes).value == "2"


def test_watch_of_a_file_continues_after_a_half_written_one(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, warnings = tmp_path / "values.json", []

    def complete(line: str) -> None:
        warnings.append(line)
        file.write_text('{"a": {"x": 2}}')

    monkeypatch.setattr("sr_assets.adapters.data.interface.print_warning", complete)
    file.write_text('{"a": {"x": 1}}')
    changes = opened(type="file", path=str(file)).watch("a")
    assert next(changes).value == {"x": 1}
    file.write_text('{"a": {"x": ')
    assert next(changes).value == {"x": 2}
    file.unlink()
    assert next(changes).deleted
    (warning,) = warnings
    assert "values.json: is not valid YAML" in warning


def test_kv_leaves_no_connection_open_outside_with(rig: Rig) -> None:
    source = open_source("ops", SourceSettings.model_validate(kv(rig, make_data_bucket(rig))))
    source.put("x", "1")
    assert source.get("x") == "1"
    del source
    # An open socket would be a ResourceWarning, which fails a test.
    gc.collect()


@pytest.mark.parametrize(
    "response",
    (
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n5m",
        b"HTTP/1.1 200 OK\r\nX-Consul-Index: soon\r\nContent-Length: 2\r\n\r\n5m",
        b"HTTP/1.1 500 no\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n5m",
        b"HTTP/1.1 500 no\r\n\r\n" + b"x" * 100_000,
        b"HTTP/1.1 500 " + b"x" * 60_000 + b"\r\n\r\n",
    ),
)
def test_broken_response_of_consul_is_one_line(opened: Opened, response: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client, contextlib.suppress(ConnectionError):
                client.recv(65536)
                client.sendall(response)

        source = opened(type="consul", url=f"http://127.0.0.1:{server.getsockname()[1]}")
        with in_background(answer), pytest.raises(TransientError) as raised:
            source.read("budget")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_endless_response_of_consul_is_one_line(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.adapters.data.consul._MOST_BYTES", 1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client, contextlib.suppress(ConnectionError):
                client.recv(65536)
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    client.sendall(bytes(65536))

        source = opened(type="consul", url=f"http://127.0.0.1:{server.getsockname()[1]}")
        too_long = r"budget: the response has more than 1 MiB; correct the URL"
        with in_background(answer), pytest.raises(RunError, match=too_long):
            source.read("budget")


def test_unavailable_consul_is_one_line(opened: Opened) -> None:
    source = opened(type="consul", url="http://127.0.0.1:1")
    with pytest.raises(RunError, match=r"consul http://127.0.0.1:1/v1/kv/ is unavailable: .*refused"):
        source.get("x")


@pytest.mark.parametrize("key", ("../x", "a/../../x", "a//b", "a/."))
def test_consul_key_stays_below_the_prefix(opened: Opened, key: str) -> None:
    source = opened(type="consul", url="http://127.0.0.1:1", prefix="sites/")
    for operation in (source.get, source.delete):
        with pytest.raises(ConfigurationError, match="is not a key of Consul; use no empty part"):
            operation(key)


def test_consul_without_permission_is_one_line(opened: Opened) -> None:
    with stand_in() as url:
        source = opened(type="consul", url=url, token="wrong")
        with pytest.raises(RunError, match=r"Consul denies it \(403\); set a token") as caught:
            source.get("x")
    assert "wrong" not in str(caught.value)


def test_file_has_every_key_that_is_listed(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("7: a\ntrue: b\nnull: c\nx: {y.z: d, y: {w: e}}\nx.y: {v: f}\n")
    source = opened(type="file", path=str(file))
    values = dict(zip(keys := source.keys(), map(source.get, keys), strict=True))
    assert values == {"7": "a", "null": "c", "true": "b", "x.y.v": "f", "x.y.w": "e", "x.y.z": "d"}
    for key in values:
        source.put(key, f"new {key}")
        assert source.get(key) == f"new {key}"
        source.delete(key)
    assert "new" not in file.read_text()


def test_empty_file_takes_a_value(opened: Opened, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.touch()
    source = opened(type="file", path=str(file))
    source.put("a.b", "1")
    assert source.get("a.b") == "1"


def test_environment_is_read_only(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_CADENCE", "1h")
    source = opened(type="environment", prefix="SITE_")
    assert (source.get("CADENCE"), source.keys()) == ("1h", ["CADENCE"])
    with pytest.raises(ConfigurationError, match="ops/CADENCE: a source of type environment is read-only"):
        source.put("CADENCE", "2h")


@pytest.mark.parametrize("answer", (b"[1]", b"{", b"null", b"[" * 100_000, b"\xff"))
def test_list_of_another_program_than_consul_is_refused(
    answer: bytes, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConsulSource, "_request", lambda *_: (answer, 0))
    source = opened(type="consul", url="http://127.0.0.1:1")
    with pytest.raises(RunError, match=r"not a list of keys of Consul"):
        source.keys()
