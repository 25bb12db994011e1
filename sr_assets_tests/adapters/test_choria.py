"""Choria's login through `wire` and nats-py, to a real server whose auth callout checks token and signature."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sr_assets.adapters.connection_file import open_connection, write_connection
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.security import read_choria
from sr_assets.adapters.wire import Connection
from sr_assets.domain.errors import RunError
from sr_assets.settings import ChoriaSettings, ClusterSettings, TlsSettings
from sr_assets_tests.adapters.test_security import refusals, use_nats_py, use_wire
from sr_assets_tests.choria_broker import Broker, Issuer, broker
from sr_assets_tests.secured import Authority


@dataclass(frozen=True)
class World:
    """A broker, the issuer of its tokens, another issuer, and the broker's CA."""

    ours: Issuer
    others: Issuer
    authority: Authority
    broker: Broker

    def cluster(self, block: dict[str, str], **tls: bool | str | None) -> ClusterSettings:
        """Return the broker's settings with this login; by default its CA verifies it."""
        secured = TlsSettings(**{"ca": str(self.authority.file), **tls})  # type: ignore[arg-type]
        return ClusterSettings((self.broker.server.address,), tls=secured, choria=ChoriaSettings(**block))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A broker and two issuers."""
    folder = tmp_path_factory.mktemp("choria")
    authority, ours = Authority(folder / "ca"), Issuer(folder / "ours")
    with broker(folder / "broker", authority, ours) as made:
        yield World(ours, Issuer(folder / "others"), authority, made)


def login_error(block: dict[str, str]) -> str:
    """Return the one-line error of an unusable login; assert that it contains no file content."""
    with pytest.raises(RunError) as caught:
        read_choria(ChoriaSettings(**block))
    line = str(caught.value)
    assert "\n" not in line
    for key in ("seed_file", "jwt_file"):
        content = Path(block[key]).read_text() if Path(block[key]).is_file() else ""
        assert len(content) < 20 or content not in line
    return line


@pytest.mark.process
@pytest.mark.parametrize("use", (use_wire, use_nats_py))
@pytest.mark.parametrize("purpose", ("choria_client_id", "choria_server"))
def test_token_logs_in_and_uses_its_own_inbox(
    world: World, use: Callable[[ClusterSettings, str], None], purpose: str, unique: Callable[[str], str]
) -> None:
    server = purpose == "choria_server"
    name, identity = (None, "sr.example.net") if server else ("sr.example.net", None)
    block = world.ours.block("sr", purpose=purpose, callerid=name, identity=identity)
    use(world.cluster(block), unique("CHORIA"))
    seen = world.broker.logins[-1]
    assert seen["auth_token"] == Path(block["jwt_file"]).read_text()
    assert len(seen["sig"]) == 86
    assert "=" not in seen["sig"]


@pytest.mark.process
def test_refused_token_is_one_line_without_the_token(world: World) -> None:
    for block, verified, expected in (
        (world.others.block("eve"), {}, "uthorization"),
        (world.ours.block("sr", public_key="00" * 32), {}, "does not match the token"),
        (world.ours.block("sr"), {"ca": None}, "set the CA's file in tls: ca"),
    ):
        text = refusals(world.cluster(block, **verified))
        assert all(expected in line for line in text.split("\n")), text
        assert not any(secret in text for secret in (*world.ours.secrets, *world.others.secrets))
    with Connection(world.cluster(world.ours.block("sr"), ca=None, insecure=True)) as opened:
        assert opened.server_version


@pytest.mark.process
def test_connection_file_has_only_paths_of_token_files(world: World, tmp_path: Path) -> None:
    cluster = world.cluster(world.ours.block("sr"))
    file = write_connection(tmp_path / "0.json", cluster)
    assert not any(secret in file.read_text() for secret in world.ours.secrets)
    with open_connection(str(file), "test") as opened:
        assert opened.request_api("INFO")["limits"]


def test_invalid_token_is_refused_before_connecting(tmp_path: Path) -> None:
    issuer, now = Issuer(tmp_path / "issuer"), int(time.time())
    nowhere = ClusterSettings(
        ("127.0.0.1:1",), tls=TlsSettings(), choria=ChoriaSettings(**issuer.block("a", exp=now - 5))
    )
    for opener in (Connection, Cluster):
        with pytest.raises(RunError, match=r"the token expired at 20.*UTC; replace it"):
            opener(nowhere).__enter__()
    for claims, expected in (
        ({"issexp": now - 5}, "the token expired at"),
        ({"nbf": now + 500}, "the token is valid from"),
        (
            {"purpose": "choria_provisioning"},
            "the token's purpose is 'choria_provisioning'; use a client's or a server's",
        ),
        ({"purpose": None}, "the token's purpose is 'None'"),
        ({"callerid": None}, "the token has no callerid"),
        ({"public_key": None}, "the token has no public_key"),
        ({"purpose": "choria_server"}, "the token has no identity"),
    ):
        assert expected in login_error(issuer.block("sr", **claims))


def test_unusable_file_is_named_with_problem(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "issuer")
    good = issuer.block("sr")
    token = Path(good["jwt_file"]).read_text()
    none = base64.urlsafe_b64encode(json.dumps({"alg": "none"}).encode()).rstrip(b"=").decode()
    for key, content, expected in (
        ("jwt_file", None, "cannot be read: No such file or directory"),
        ("jwt_file", "", "contains no token"),
        ("jwt_file", token[: len(token) // 2], "contains no token"),
        ("jwt_file", "hunter2.hunter2.hunter2secret", "contains no token"),
        ("jwt_file", none + token[token.index(".") :], "is not a token of Choria"),
        ("seed_file", None, "cannot be read: No such file or directory"),
        ("seed_file", Path(good["seed_file"]).read_text()[:-1], "it needs 64 hexadecimal digits"),
        ("seed_file", "-----BEGIN PRIVATE KEY-----", "contains no seed"),
        ("seed_file", "00" * 32, "does not match the token"),
    ):
        bad = tmp_path / "bad"
        bad.unlink(missing_ok=True)
        if content is not None:
            bad.write_text(content)
        assert f"{key} {bad}: " in login_error({**good, key: str(bad)})
        assert expected in login_error({**good, key: str(bad)})
    Path(good["seed_file"]).write_text(Path(good["seed_file"]).read_text() + "\n")
    assert read_choria(ChoriaSettings(**good)).inbox_prefix.startswith("mcollective.reply.")
