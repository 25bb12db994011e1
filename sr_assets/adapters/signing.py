"""Signing with an nkey (Ed25519, RFC 8032, section 5.1): by the library `cryptography`, or in plain Python.

The plain form is for Spark's workers without the library. Its steps are the same for every key and text, but Python's
integers take their own time: install `cryptography` on workers where a false server could measure logins.
"""

import base64
import binascii
import hashlib
from typing import Final

_P: Final = 2**255 - 19
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, _P) % _P
_USER: Final = 20 << 3
#: More than any secret or nonce has.
_BITS: Final = 256

#: A point in extended coordinates: x = X/Z, y = Y/Z, T = XY/Z.
_Point = tuple[int, int, int, int]


def _add(a: _Point, b: _Point) -> _Point:
    e, f = (a[1] - a[0]) * (b[1] - b[0]) % _P, (a[1] + a[0]) * (b[1] + b[0]) % _P
    g, h = 2 * a[3] * b[3] * _D % _P, 2 * a[2] * b[2] % _P
    i, j, k, m = f - e, h - g, h + g, f + e
    return i * j % _P, k * m % _P, j * k % _P, i * m % _P


def _times(number: int, point: _Point) -> _Point:
    result: _Point = (0, 1, 1, 0)
    for bit in range(_BITS):
        result = (result, _add(result, point))[number >> bit & 1]
        point = _add(point, point)
    return result


def _encoded(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _base() -> _Point:
    y = 4 * pow(5, -1, _P) % _P
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    x = _P - x if x & 1 else x
    return x, y, 1, x * y % _P


def _number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


class PlainSigner:
    """A private key in plain Python; `raw` has 32 bytes."""

    def __init__(self, raw: bytes) -> None:
        digest = hashlib.sha512(raw).digest()
        clamped = bytes([digest[0] & 248, *digest[1:31], digest[31] & 127 | 64])
        self._secret, self._prefix = int.from_bytes(clamped, "little"), digest[32:]
        self.public = _encoded(_times(self._secret, _base()))

    def sign(self, text: bytes) -> bytes:
        nonce = _number(self._prefix, text)
        commitment = _encoded(_times(nonce, _base()))
        answer = (nonce + _number(commitment, self.public, text) * self._secret) % _ORDER
        return commitment + answer.to_bytes(32, "little")


class LibrarySigner:
    """A private key of `cryptography`; `raw` has 32 bytes. Raises ImportError without that library."""

    def __init__(self, raw: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(raw)
        self.public, self.sign = key.public_key().public_bytes_raw(), key.sign


class UserKey:
    """A user's key pair from its encoded seed (`SU…`). Raises ValueError if that is invalid."""

    def __init__(self, seed: bytes) -> None:
        raw = base64.b32decode(seed + b"=" * (-len(seed) % 8))
        if binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]:
            raise ValueError("not a seed")
        try:
            self._signer: LibrarySigner | PlainSigner = LibrarySigner(raw[2:-2])
        except ImportError:
            self._signer = PlainSigner(raw[2:-2])

    @property
    def public_key(self) -> bytes:
        """The public half, as the server knows the user (`U…`)."""
        raw = bytes([_USER]) + self._signer.public
        return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).rstrip(b"=")

    def sign(self, text: bytes) -> bytes:
        return self._signer.sign(text)
