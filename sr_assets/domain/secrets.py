"""Masking of values that look like secrets, by their key or their form."""

import json
import re
from typing import Final

MASK: Final = "***"
_SECRET_KEY: Final = re.compile(
    r"secret|passw|passphrase|token|credential|seed|(?:private|api|access|signing)[_.-]?key", re.IGNORECASE
)
_SECRET_FORM: Final = re.compile(
    # A login in a URL, a PEM file, a JSON Web Token, and the seed of an nkey.
    r"[a-z][a-z0-9+.-]*://[^/\s@]+@|-----BEGIN |\beyJ[\w-]+\.[\w-]+\.[\w-]+|\bS[AUOCNX][A-Z2-7]{56}\b",
    re.IGNORECASE,
)


def as_text(value: object) -> str:
    """Return a value as text; one that is not text, as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def looks_secret(key: str, text: str) -> bool:
    """Return whether the key or the form of a value suggests a secret."""
    return bool(_SECRET_KEY.search(key) or _SECRET_FORM.search(text))


def masked(key: str, value: object) -> str:
    """Return a value as text, or `***` if it looks like a secret."""
    text = as_text(value)
    return MASK if looks_secret(key, text) else text
