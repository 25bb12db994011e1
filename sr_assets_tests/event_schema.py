"""The schema of published messages, and a check against it."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft7Validator


@cache
def events_schema() -> dict[str, Any]:
    """Return `schemas/events.json`, in which every object may have further fields."""
    schema: dict[str, Any] = json.loads(files("sr_assets").joinpath("schemas/events.json").read_text())
    return schema


def unknown_or_wrong(payload: bytes) -> list[str]:
    """Return why a published message is not one of the schema with exactly its fields; an empty list if it is."""
    document = json.loads(payload)
    problems = [error.message for error in Draft7Validator(events_schema()).iter_errors(document)]
    kinds = [
        kind
        for kind in events_schema()["definitions"].values()
        if not list(Draft7Validator(kind).iter_errors(document))
    ]
    return problems or [f"{len(kinds)} kinds"] * (len(kinds) != 1) or sorted(document.keys() - kinds[0]["properties"])
