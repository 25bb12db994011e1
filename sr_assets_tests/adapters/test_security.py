"""Connections with TLS and every login method, through `wire` and nats-py, to real servers that require them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.connection_file import open_connection, write_connection
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import Connection, read_range
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import ClusterSettings, TlsSettings, parse_cluster
from sr_assets_tests.adapters.wire.rig import create_stream, flat, outgoing, publish
from sr_assets_tests.secured import Authority, Key, Operator, creds, new_key
from sr_assets_tests.servers import NatsServer

pytestmark = pytest.mark.process

SECRET = "hunter2secret"


@dataclass(frozen=True)
class World:
    """The trusted CA, another CA, credential files, and a server for each kind of security."""

    folder: Path
    ours: Authority
    others: Authority
    client: dict[str, Any]
    nkey: Key
    operator: Operator
    servers: dict[str, NatsServer]

    def url(self, server: str, login: str = "", query: str = "", scheme: str = "nats", host: str = "localhost") -> str:
        """Return a server's URL for the configuration."""
        return f"{scheme}://{login}{host}:{self.servers[server].port}{query and '?'}{query}"

    def cluster(self, server: str, tls: dict[str, Any] | None = None, **url: str) -> ClusterSettings:
        """Return a server's settings with this `tls` block; the default trusts our CA."""
        cluster = parse_cluster(self.url(server, **url))
        block = {"ca": str(self.ours.file)} if tls is None else tls
        return replace(cluster, tls=replace(cluster.tls or TlsSettings(), **block)) if block else cluster

    def file(self, name: str, text: str) -> str:
        """Write a file and return its path."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def user_files(self, key: Key, *, seconds: int = 3600) -> tuple[str, str, str]:
        """Write a user's .creds, JWT and seed, and return their paths."""
        jwt, stem = self.operator.user_jwt(key, seconds=seconds), key.public[-6:]
        return (
            self.file(f"{stem}.creds", creds(jwt, key.seed)),
            self.file(f"{stem}.jwt", jwt),
            self.file(f"{stem}.nk", f"\n{key.seed}\n"),
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One server of each kind for all tests."""
    folder = tmp_path_factory.mktemp("secured")
    ours, others = Authority(folder / "ours"), Authority(folder / "others")
    nkey, operator = new_key(), Operator()
    here = ours.certify("localhost", "127.0.0.1")
    users = f'authorization {{ users: [ {{user: ada, password: "{SECRET}"}}, {{nkey: {nkey.public}}} ] }}\n'
    configs = {
        "plain": "",
        "users": users,
        "token": f'authorization {{ token: "{SECRET}" }}\n',
        "operator": operator.config,
        "tls": ours.block(**here) + users,
        "optional": ours.block(**here) + "allow_non_tls: true\n",
        "mutual": ours.block(**here, verify=True),
        "first": ours.block(**here, verify=True, handshake_first=True),
        "mapped": ours.block(**here, verify_and_map=True) + 'authorization { users: [ {user: "ada@example.net"} ] }\n',
        "expired": ours.block(**ours.certify("localhost", days=-1)),
        "elsewhere": ours.block(**ours.certify("elsewhere.example.net")),
    }
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(NatsServer(folder / kind, kind, config=config))
            for kind, config in configs.items()
        }
        client = ours.certify("ada@example.net")
        yield World(folder, ours, others, client, nkey, operator, servers)


def use_wire(cluster: ClusterSettings, name: str) -> None:
    """Publish and read enough to fill many TLS records and the socket buffers."""
    with Connection(cluster) as connection:
        create_stream(connection, name)
        items = outgoing(name, 300, size_bytes=20_000)
        assert [ack.error for ack in publish(connection, items)] == [None] * 300
        for direct in (True, False):
            messages = flat(read_range(connection, name, SequenceRange(1, 301), direct=direct))
            assert [(m.sequence, m.payload) for m in messages] == [(sent.sequence, sent.payload) for sent in items]


def use_nats_py(cluster: ClusterSettings, name: str) -> None:
    """Create a stream, publish and request its info."""
    with Cluster(cluster) as opened:
        opened.create_stream({"name": name, "subjects": [f"{name}.>"]})
        assert opened.publish_many([(f"{name}.a", b"1", "1")])[0].acknowledged
        assert opened.stream_info(name).last_sequence == 1


def refusals(cluster: ClusterSettings) -> str:
    """Return the errors of both clients, one line each; assert that they contain no secret."""
    lines = []
    for opener in (Connection, Cluster):
        with pytest.raises(RunError) as caught:
            opener(cluster).__enter__()
        line = str(caught.value)
        assert "\n" not in line
        assert SECRET not in line
        lines.append(line)
    return "\n".join(lines)


both_clients = pytest.mark.parametrize("use", (use_wire, use_nats_py))


# --------------------------------------------------------------------------------------------------------- logging in


@both_clients
@pytest.mark.parametrize(
    ("server", "login", "query"),
    (
        ("users", f"ada:{SECRET}@", ""),
        ("token", f"{SECRET}@", ""),
        ("users", "", "nkey={seed}"),
        ("operator", "", "credentials={creds}"),
        ("operator", "", "jwt={jwt}&nkey={seed}"),
    ),
    ids=("password", "token", "nkey", "credentials", "jwt and nkey"),
)
def test_every_login_method_works(
    world: World,
    server: str,
    login: str,
    query: str,
    use: Callable[[ClusterSettings, str], None],
    unique: Callable[[str], str],
) -> None:
    creds_file, jwt, seed = world.user_files(world.nkey)
    use(world.cluster(server, {}, login=login, query=query.format(creds=creds_file, jwt=jwt, seed=seed)), unique("IN"))


def test_wrong_login_is_one_line_without_secret(world: World) -> None:
    stranger = new_key()
    _, _, seed = world.user_files(stranger)
    _, jwt, _ = world.user_files(world.nkey)
    expired, _, _ = world.user_files(new_key(), seconds=-60)
    for server, login, query in (
        ("users", f"ada:{SECRET}x@", ""),
        ("users", f"{SECRET}@", ""),
        ("users", "", ""),
        ("token", f"{SECRET}x@", ""),
        ("users", "", f"nkey={seed}"),
        ("operator", "", f"jwt={jwt}&nkey={seed}"),
        ("operator", "", f"credentials={expired}"),
        ("operator", "", ""),
    ):
        text = refusals(world.cluster(server, {}, login=login, query=query))
        assert all("uthorization" in line for line in text.split("\n")), text
        assert stranger.seed not in text


def test_unusable_file_is_named_without_its_content(world: World) -> None:
    creds_file, jwt, seed = world.user_files(world.nkey)
    broken = world.file("broken", f"{SECRET}\n-----BEGIN NATS USER JWT-----\nnone\n{world.nkey.seed[:-1]}")
    no_seed = world.file("no_seed", creds(world.operator.user_jwt(world.nkey), "S" + SECRET))
    for query, expected in (
        ("credentials=/nowhere", "credentials /nowhere: cannot be read: No such file or directory"),
        (f"credentials={world.folder}", "cannot be read: Is a directory"),
        (f"credentials={broken}", f"credentials {broken}: there is no user's JWT in it"),
        (f"credentials={no_seed}", f"credentials {no_seed}: there is no user's seed (SU…) in it"),
        (f"jwt={jwt}&nkey=/nowhere", "nkey /nowhere: cannot be read"),
        (f"jwt={seed}&nkey={seed}", f"jwt {seed}: there is no user's JWT in it"),
        (f"nkey={jwt}", f"nkey {jwt}: there is no user's seed"),
        (f"nkey={broken}", f"nkey {broken}: there is no user's seed"),
    ):
        text = refusals(world.cluster("operator", {}, query=query))
        assert all(line == text.split("\n")[0] for line in text.split("\n")), text
        assert expected in text
        assert world.nkey.seed[:-1] not in text
    assert creds_file


# ---------------------------------------------------------------------------------------------------------------- TLS


@both_clients
@pytest.mark.parametrize(
    ("server", "url", "certified"),
    (
        ("tls", {"login": f"ada:{SECRET}@"}, False),
        ("tls", {"login": f"ada:{SECRET}@", "scheme": "tls", "host": "127.0.0.1"}, False),
        ("optional", {}, False),
        ("mutual", {}, True),
        ("first", {"query": "tls_handshake_first=true"}, True),
        ("mapped", {}, True),
        ("elsewhere", {"query": "insecure=true"}, False),
    ),
    ids=("password", "tls://", "optional", "mutual", "first", "mapped", "insecure"),
)
def test_tls_follows_server_requirements(
    world: World,
    server: str,
    url: dict[str, str],
    certified: bool,
    use: Callable[[ClusterSettings, str], None],
    unique: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    block = {"ca": str(world.ours.file)} | (world.client if certified else {})
    use(world.cluster(server, block, **url), unique("TLS"))
    assert not caplog.records, "a successful connection logs no line"


def test_nkey_login_works_over_tls(world: World, unique: Callable[[str], str]) -> None:
    _, _, seed = world.user_files(world.nkey)
    use_wire(world.cluster("tls", query=f"nkey={seed}"), unique("NKEY"))


@pytest.mark.parametrize(
    ("server", "block", "url", "expected"),
    (
        ("tls", {}, {}, "set the CA's file in tls: ca"),
        ("tls", {}, {"scheme": "tls"}, "set the CA's file in tls: ca"),
        ("tls", {"ca": "others"}, {}, "set the CA's file in tls: ca"),
        ("expired", None, {}, "certificate has expired"),
        ("elsewhere", None, {}, "certificate is not for this name"),
        ("elsewhere", None, {"host": "127.0.0.1"}, "certificate is not for this address"),
        ("mutual", None, {}, "set cert and key in tls"),
        ("mutual", {"ca": "ours", "cert": "others"}, {}, "refuses our certificate"),
        ("first", None, {"query": "tls_handshake_first=true"}, "set cert and key in tls"),
        ("first", {}, {"query": "connect_timeout=300ms"}, "needs ?tls_handshake_first=true"),
        ("tls", None, {"query": "tls_handshake_first=true&connect_timeout=1s"}, "remove tls_handshake_first"),
        ("plain", None, {}, "the server has no TLS"),
        ("plain", {}, {"scheme": "tls"}, "the server has no TLS"),
    ),
)
def test_untrusted_connection_is_one_line_with_remedy(
    world: World, server: str, block: dict[str, str] | None, url: dict[str, str], expected: str
) -> None:
    files: dict[str, str] | None = None
    if block is not None:
        authorities = {"ours": world.ours, "others": world.others}
        files = {"ca": str(authorities[block["ca"]].file)} if "ca" in block else {}
        files |= authorities[block["cert"]].certify("eve@example.net") if "cert" in block else {}
    text = refusals(world.cluster(server, files, **({"login": f"ada:{SECRET}@"} | url)))
    assert all(expected in line for line in text.split("\n")), text


def test_unusable_pem_file_is_named(world: World) -> None:
    ca, cert, key = str(world.ours.file), world.client["cert"], world.client["key"]
    other = world.others.certify("eve@example.net")["key"]
    nonsense = world.file("nonsense.pem", SECRET)
    locked = world.file(
        "locked.key",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\n"
        "MIGrMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAjkbFn4qqDsWQICCAAw\n-----END ENCRYPTED PRIVATE KEY-----\n",
    )
    for block, expected in (
        ({"ca": "/nowhere"}, "tls: ca /nowhere: cannot be read: No such file or directory"),
        ({"ca": nonsense}, f"tls: ca {nonsense}: contains no PEM certificate"),
        ({"ca": ca, "cert": "/nowhere", "key": key}, "tls: cert /nowhere: cannot be read"),
        ({"ca": ca, "cert": cert, "key": "/nowhere"}, "tls: key /nowhere: cannot be read"),
        ({"ca": ca, "cert": cert, "key": other}, "the key does not match the certificate"),
        ({"ca": ca, "cert": cert, "key": nonsense}, "need a PEM certificate and its PEM key without a password"),
        ({"ca": ca, "cert": cert, "key": locked}, "need a PEM certificate and its PEM key without a password"),
    ):
        text = refusals(world.cluster("mutual", block))
        assert all(expected in line for line in text.split("\n")), text


def test_renewed_file_applies_to_next_connection(world: World) -> None:
    ca, file = str(world.ours.file), world.file("renewed.pem", world.others.file.read_text())
    assert "CA" in refusals(world.cluster("tls", {"ca": file}, login=f"ada:{SECRET}@"))
    Path(file).write_text(Path(ca).read_text())
    with Connection(world.cluster("tls", {"ca": file}, login=f"ada:{SECRET}@")) as connection:
        assert connection.server_version.startswith("2.")


def test_connection_file_has_paths_without_contents(world: World, tmp_path: Path) -> None:
    creds_file, _, _ = world.user_files(world.nkey)
    block = {"ca": str(world.ours.file), **world.client}
    for server, query in (("operator", f"credentials={creds_file}"), ("first", "tls_handshake_first=true")):
        cluster = world.cluster(server, block if server == "first" else {}, query=query)
        file = write_connection(tmp_path / server, cluster)
        written = file.read_text()
        assert world.nkey.seed not in written
        assert "PRIVATE KEY" not in written
        assert file.stat().st_mode & 0o777 == 0o600
        with open_connection(str(file), "test") as connection:
            assert connection.request_api("INFO")["limits"]
