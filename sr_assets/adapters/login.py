"""A client's login to a NATS server, for `CONNECT` and for nats-py."""

import base64
import binascii
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters.signing import UserKey
from sr_assets.domain.errors import RunError

_SEED_PREFIX: Final = 18 << 3
_USER_PREFIX: Final = 20 << 3


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """A user with a password, a token, or an nkey pair that signs the server's nonce, alone or with a JWT.

    Responses arrive below `inbox_prefix`. `seed` is the nkey's seed, set only without a JWT.
    """

    inbox_prefix: str
    user: str | None = None
    password: str | None = None
    token: str | None = None
    jwt: str | None = None
    seed: str | None = None
    pair: UserKey | None = None

    def connect_options(self, nonce: str | None) -> dict[str, Any]:
        """Return the login as options of CONNECT, with a signature if the server sent a nonce."""
        options: dict[str, Any] = {"user": self.user, "pass": self.password, "auth_token": self.token}
        if self.pair and nonce:
            options["sig"] = _signature(self.pair, nonce).decode()
            options |= {"jwt": self.jwt} if self.jwt else {"nkey": self.pair.public_key.decode()}
        return {key: value for key, value in options.items() if value}

    def client_options(self) -> dict[str, Any]:
        """Return the login as options of nats-py."""
        options: dict[str, Any] = {"user": self.user, "password": self.password, "token": self.token}
        if self.jwt and self.pair:
            options |= {"user_jwt_cb": self.jwt.encode, "signature_cb": partial(_signature, self.pair)}
        return options | {"nkeys_seed_str": self.seed, "inbox_prefix": self.inbox_prefix, "no_echo": True}


def _signature(pair: UserKey, nonce: str) -> bytes:
    """Return the signature of a server's nonce: base64 for URLs without padding, as Go's client encodes it.

    Choria's broker refuses every other form.
    """
    return base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=")


def read_text(key: str, file: str) -> str:
    """Return the text of the file that a key of the configuration names; raises RunError if it cannot be read."""
    try:
        return Path(file).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise RunError(f"{key} {file}: cannot be read: {error.strerror}") from None


def user_seed(raw: bytes) -> bytes:
    """Return 32 bytes as the encoded seed of a user (`SU…`): prefix, seed and checksum in base32."""
    # The first five bits are the S of a seed, the next eight the U of a user.
    prefixed = bytes([_SEED_PREFIX | _USER_PREFIX >> 5, (_USER_PREFIX & 31) << 3]) + raw
    return base64.b32encode(prefixed + binascii.crc_hqx(prefixed, 0).to_bytes(2, "little")).rstrip(b"=")
