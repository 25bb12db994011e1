"""Choria's published schemas of advisories, and a check of documents against them without a schema library.

In both schemas all fields are required; readers accept unknown fields.
"""

import json
from typing import Any

_TEXT: dict[str, Any] = {"type": str, "shortest": 1}
_SECONDS: dict[str, Any] = {"type": int}

#: `https://choria.io/schemas/sr/v1/age_advisory.json`
V1: dict[str, dict[str, Any]] = {
    "$schema": {"type": str, "enum": ["https://choria.io/schemas/sr/v1/age_advisory.json"]},
    "inspect": _TEXT,
    "value": _TEXT,
    "age": _SECONDS,
    "seen": _SECONDS,
    "replicator": _TEXT,
    "timestamp": _SECONDS,
    "event": {"type": str, "enum": ["timeout", "recover", "expire"]},
}
#: `io.choria.sr.v2.age_advisory`
V2: dict[str, dict[str, Any]] = {
    "protocol": {"type": str, "enum": ["io.choria.sr.v2.age_advisory"]},
    "event_id": _TEXT,
    "inspect_field": _TEXT,
    "age": _SECONDS,
    "seen": _SECONDS,
    "replicator": _TEXT,
    "timestamp": _SECONDS,
    "event": {"type": str, "enum": ["new", "timeout", "recover", "expire"]},
    "value": _TEXT,
}


def problems(payload: bytes, schema: dict[str, dict[str, Any]]) -> list[str]:
    """Return the contradictions to the schema, or an empty list if the payload is valid."""
    document = json.loads(payload)
    contradictions = [f"{key} is missing" for key in schema if key not in document]
    for key, rule in schema.items():
        value = document.get(key)
        if type(value) is not rule["type"]:
            contradictions.append(f"{key}: {value!r} is not a {rule['type'].__name__}")
        elif value not in rule.get("enum", [value]) or (isinstance(value, str) and not value):
            contradictions.append(f"{key}: {value!r} is not allowed")
    return contradictions
