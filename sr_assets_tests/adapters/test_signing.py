"""Signatures in plain Python, compared with the library's."""

import nkeys
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.login import user_seed
from sr_assets.adapters.signing import PlainKey


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=40))
def test_python_signature_equals_library_signature(raw: bytes, nonce: bytes) -> None:
    seed = user_seed(raw)
    assert seed == bytes(nkeys.encode_seed(raw, nkeys.PREFIX_BYTE_USER)).rstrip(b"=")
    plain, expected = PlainKey.decode(seed), nkeys.from_seed(bytearray(seed))
    assert (plain.public_key, plain.sign(nonce)) == (bytes(expected.public_key), expected.sign(nonce))
