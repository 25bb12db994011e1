"""A broker like Choria's: a real nats-server with TLS, whose auth callout checks token and signature and grants
Choria's permissions.
"""

import asyncio
import base64
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import nkeys
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from nats.aio.msg import Msg

from sr_assets_tests.rig import PATIENCE_SECONDS, in_background
from sr_assets_tests.secured import Authority, Key, encoded, new_key, signed_jwt
from sr_assets_tests.servers import NatsServer

COLLECTIVE = "mcollective"
_CALLOUT = "$SYS.REQ.USER.AUTH"


def decoded(part: str) -> bytes:
    """Decode base64 for URLs without padding; raises ValueError for any other form."""
    if not re.fullmatch(r"[\w-]*", part, re.ASCII):
        raise ValueError("not base64 for URLs without padding")
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


class Issuer:
    """An organisation's issuer of tokens; `block` writes a holder's files and returns the block `choria`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = Ed25519PrivateKey.generate()
        self.public = self._key.public_key()
        self.secrets: list[str] = []

    def block(
        self, name: str, *, collective: str = COLLECTIVE, seed: bytes | None = None, **claims: Any
    ) -> dict[str, str]:
        """Write a client's token and its seed, and return the block `choria`; `claims` replace the default claims."""
        seed = seed or os.urandom(32)
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
        hexadecimal = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()
        now = int(time.time())
        known: dict[str, Any] = {
            "purpose": "choria_client_id",
            "callerid": name,
            "public_key": hexadecimal,
            "ou": "choria",
            "jti": "x",
        }
        known |= {"iat": now, "nbf": now - 60, "exp": now + 3600, "iss": "I-0", **claims}
        parts = [{"alg": "EdDSA", "typ": "JWT"}, {key: value for key, value in known.items() if value is not None}]
        text = ".".join(encoded(json.dumps(part).encode()) for part in parts)
        token = f"{text}.{encoded(self._key.sign(text.encode()))}"
        stem = self._folder / f"{name}-{len(self.secrets)}"
        files = {"seed_file": stem.with_suffix(".seed"), "jwt_file": stem.with_suffix(".jwt")}
        for file, content in zip(files.values(), (seed.hex(), token), strict=True):
            file.write_text(content)
            file.chmod(0o600)
        self.secrets += [seed.hex(), token]
        return {**{key: str(file) for key, file in files.items()}, "collective": collective}


@dataclass
class Broker:
    """A running broker: the options of each CONNECT, and the reason for each refusal."""

    server: NatsServer
    logins: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


@contextmanager
def broker(home: Path, authority: Authority, issuer: Issuer) -> Iterator[Broker]:
    """Start a broker that requires TLS and accepts the holders of the issuer's tokens."""
    account, service = new_key(nkeys.PREFIX_BYTE_ACCOUNT), new_key()
    config = authority.block(**authority.certify("localhost", "127.0.0.1")) + (
        f"accounts {{ AUTH {{ users: [{{nkey: {service.public}}}] }}, CHORIA {{ jetstream: enabled }}, SYS {{}} }}\n"
        "system_account: SYS\n"
        f"authorization {{ timeout: 5, auth_callout {{ issuer: {account.public}, account: AUTH, "
        f"auth_users: [{service.public}] }} }}\n"
    )
    with NatsServer(home, "broker", config=config) as server:
        made = Broker(server)
        loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
        work = _answer(made, authority, issuer, account, service, ready, ended)
        with closing(loop), in_background(lambda: loop.run_until_complete(work)):
            try:
                assert ready.wait(PATIENCE_SECONDS), "the callout does not begin"
                yield made
            finally:
                loop.call_soon_threadsafe(ended.set)


async def _answer(
    made: Broker,
    authority: Authority,
    issuer: Issuer,
    account: Key,
    service: Key,
    ready: threading.Event,
    ended: asyncio.Event,
) -> None:
    client = await nats.connect(
        f"nats://localhost:{made.server.port}", nkeys_seed_str=service.seed, tls=authority.client_context()
    )

    async def on_request(message: Msg) -> None:
        claims = json.loads(decoded(message.data.decode().split(".")[1]))["nats"]
        user: str = claims["user_nkey"]
        answer: dict[str, Any] = {}
        try:
            answer["jwt"] = _user(account, user, _verified(issuer, claims))
            made.logins.append(claims["connect_opts"])
        except (ValueError, KeyError, InvalidSignature) as error:
            answer["error"] = str(error) or "bad signature"
            made.refusals.append(answer["error"])
        body = {"aud": claims["server_id"]["id"]}
        text = signed_jwt(account, user, "authorization_response", body, **answer)
        await message.respond(text.encode())

    await client.subscribe(_CALLOUT, cb=on_request)
    await client.flush()
    ready.set()
    await ended.wait()
    await client.close()


def _verified(issuer: Issuer, request: dict[str, Any]) -> dict[str, Any]:
    """Return the claims of a token that Choria's broker would accept; raises ValueError or InvalidSignature."""
    options = request["connect_opts"]
    token = options["auth_token"]
    head, body, signature = token.split(".")
    issuer.public.verify(decoded(signature), f"{head}.{body}".encode())
    claims: dict[str, Any] = json.loads(decoded(body))
    if claims["exp"] < time.time():
        raise ValueError("expired")
    nonce = request.get("request_nonce") or request["client_info"]["nonce"]
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(claims["public_key"])).verify(
        decoded(options["sig"]), nonce.encode()
    )
    return claims


def _user(account: Key, user: str, claims: dict[str, Any]) -> str:
    """Return the user of a token: its inbox, and the permissions from its claims."""
    name = claims.get("callerid") or claims["identity"]
    inbox = f"*.reply.{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}.>"
    permitted: dict[str, Any] = {
        "pub": {"allow": claims.get("pub_subjects", [">"])},
        "sub": {"allow": [inbox, *claims.get("sub_subjects", [])]},
    }
    limits = dict.fromkeys(("subs", "data", "payload"), -1)
    return signed_jwt(account, user, "user", {"aud": "CHORIA"}, **permitted, **limits)
