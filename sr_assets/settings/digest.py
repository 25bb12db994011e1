"""A digest of settings: equal digests mean equal behaviour. It excludes hidden fields and secrets."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

#: Fields of any block that differ between hosts and do not affect a run.
_OF_THE_HOST: Final = frozenset({"leader_election_name"})


def digest_of(record: Any, without: Collection[str]) -> str:
    """Return the sha256 of a record's fields except those in `without`."""
    effective = {key: value for key, value in _plain(record).items() if key not in without}
    return hashlib.sha256(json.dumps(effective, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Convert records to JSON, without hidden fields; of a record with a public part, only that part."""
    if hasattr(value, "public"):
        return value.public
    if isinstance(value, BaseModel):
        names = (name for name, field in type(value).model_fields.items() if field.repr and name not in _OF_THE_HOST)
        return {"is": type(value).__name__, **{name: _plain(getattr(value, name)) for name in names}}
    if is_dataclass(value):
        visible = {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.repr}
        return {"is": type(value).__name__, **visible}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value
