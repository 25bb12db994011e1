"""Masking of values that look like secrets, by their key or their form."""

import hashlib
import json
import re
from typing import Final

MASK: Final = "***"
_QUOTED_CHARACTERS: Final = 80
_KEY_WORD: Final = r"(?:secret|passw|passphrase|token|credential|seed|(?:private|api|access|signing)[_.-]?key)"
_SECRET_KEY: Final = re.compile(_KEY_WORD, re.IGNORECASE)
_SECRET_FORM: Final = re.compile(
    # A login in a URL, a PEM file, a JSON Web Token, and the seed of an nkey; a secret key inside the value, and a webhook,
    # whose path is a secret. Each in linear time for a long value.
    r"://[^/\s@]+@|-----BEGIN |(?<![\w-])eyJ[\w-]+\.[\w-]+\.[\w-]+|\bS[AUOCNX][A-Z2-7]{56}\b"
    rf"|{_KEY_WORD}[\w.-]{{0,40}}[\\\"']{{0,4}}\s{{0,9}}[:=]|https?://\S{{0,200}}hook",
    re.IGNORECASE,
)


def as_text(value: object) -> str:
    """Return a value as text; one that is not text, as JSON. YAML also has values that JSON lacks, such as a set."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def looks_secret(key: str, text: str) -> bool:
    """Return whether the key or the form of a value suggests a secret."""
    return bool(_SECRET_KEY.search(key) or _SECRET_FORM.search(text))


def masked(key: str, value: object, *, secret: bool = False) -> str:
    """Return a value as text, or `***` if it looks like a secret; a `secret` has a digest too, which shows a change.

    The digest is too short to find a password by trying.
    """
    text = as_text(value)
    if secret:
        return f"{MASK} ({hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:4]})"
    return MASK if looks_secret(key, text) else text


def quoted(key: str, value: object, *, secret: bool = False) -> str:
    """Return a value for a message: in quotes on one line, shortened, or `'***'` if it looks like a secret."""
    text = repr(masked(key, value, secret=secret))
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…'"
