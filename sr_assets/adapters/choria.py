"""Choria's login: a token and its ed25519 seed, read from their files for each connection.

The broker verifies the token's signature; this module only reads the claims.
"""

import base64
import binascii
import datetime as dt
import hashlib
import json
import re
from typing import Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.login import Login, read_text, user_seed
from sr_assets.adapters.signing import UserKey
from sr_assets.domain.clusters import ChoriaSettings
from sr_assets.domain.errors import RunError

_PURPOSES: Final = {"choria_client_id": "callerid", "choria_server": "identity"}
_SEED: Final = re.compile(r"[0-9a-fA-F]{64}")


def read_choria(choria: ChoriaSettings) -> Login:
    """Read and check both files; raises RunError, one line without their content, if the broker would refuse them.

    The broker permits subscriptions to this inbox prefix only.
    """
    where = f"choria: jwt_file {choria.jwt_file}"
    token = read_text("choria: jwt_file", choria.jwt_file).strip()
    claims = _claims(where, token)
    purpose = claims.get("purpose")
    if purpose not in _PURPOSES:
        known = " or ".join(_PURPOSES)
        raise RunError(
            f"{where}: the token's purpose is {str(purpose)[:40]!r}; use a client's or a server's token ({known})"
        )
    name, key = claims.get(_PURPOSES[purpose]), claims.get("public_key")
    for claim, value in ((_PURPOSES[purpose], name), ("public_key", key)):
        if not isinstance(value, str) or not value:
            raise RunError(f"{where}: the token has no {claim}; request another one from the issuer")
    _refuse_untimely(where, claims)
    pair = _pair(choria.seed_file)
    if base64.b32decode(bytes(pair.public_key) + b"=" * (-len(pair.public_key) % 8))[1:33].hex() != str(key).lower():
        raise RunError(f"choria: seed_file {choria.seed_file}: does not match the token in jwt_file {choria.jwt_file}")
    holder = hashlib.md5(str(name).encode(), usedforsecurity=False).hexdigest()
    return Login(f"{choria.collective}.reply.{holder}", token=token, jwt=token, pair=pair)


def _claims(where: str, token: str) -> dict[str, Any]:
    try:
        header, claims, signature = (_decoded(part) for part in token.split("."))
        algorithm, read = json.loads(header)["alg"], json.loads(claims)
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{where}: contains no token; it needs a JWT of three parts") from None
    if algorithm != "EdDSA" or not signature or not isinstance(read, dict):
        raise RunError(f"{where}: is not a token of Choria; its tokens are signed with EdDSA")
    return read


def _refuse_untimely(where: str, claims: dict[str, Any]) -> None:
    """Raise RunError if the token or its issuer has expired, or the token is not valid yet."""
    now = times.time()
    ends = [
        claims[claim] for claim in ("exp", "issexp") if isinstance(claims.get(claim), (int, float)) and claims[claim]
    ]
    if ends and min(ends) <= now:
        raise RunError(f"{where}: the token expired at {_at(min(ends))}; replace it")
    begins = claims.get("nbf")
    if isinstance(begins, (int, float)) and begins > now:
        raise RunError(f"{where}: the token is valid from {_at(begins)} on: wait, or check the clocks")


def _pair(file: str) -> UserKey:
    # A file may end with a line break, although Choria writes none.
    seed = read_text("choria: seed_file", file).strip()
    if not _SEED.fullmatch(seed):
        raise RunError(f"choria: seed_file {file}: contains no seed; it needs 64 hexadecimal digits")
    return UserKey(user_seed(bytes.fromhex(seed)))


def _decoded(part: str) -> bytes:
    try:
        return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise ValueError(part) from None


def _at(seconds: float) -> str:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return str(seconds)
