"""Signatures by the library and in plain Python, compared with those of NATS's own library."""

import sys

import nkeys
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters import signing
from sr_assets.adapters.security import user_seed
from sr_assets.adapters.signing import LibrarySigner, PlainSigner, UserKey


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=40))
def test_every_signature_equals_that_of_nats(raw: bytes, nonce: bytes) -> None:
    seed = user_seed(raw)
    assert seed == bytes(nkeys.encode_seed(raw, nkeys.PREFIX_BYTE_USER)).rstrip(b"=")
    key, expected = UserKey(seed), nkeys.from_seed(bytearray(seed))
    assert (key.public_key, key.sign(nonce)) == (bytes(expected.public_key), expected.sign(nonce))
    assert PlainSigner(raw).sign(nonce) == LibrarySigner(raw).sign(nonce) == expected.sign(nonce)
    assert PlainSigner(raw).public == LibrarySigner(raw).public


def test_worker_without_the_library_signs_in_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    seed = user_seed(b"7" * 32)
    assert UserKey(seed).sign(b"nonce") == nkeys.from_seed(bytearray(seed)).sign(b"nonce")


def test_steps_depend_on_neither_key_nor_text(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    add = signing._add

    def counted(*points: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        nonlocal steps
        steps += 1
        return add(*points)

    monkeypatch.setattr(signing, "_add", counted)
    counts = set()
    for number in (0, 1, 2**252, 2**255 - 1):
        steps = 0
        signing._times(number, signing._base())
        counts.add(steps)
    assert len(counts) == 1
