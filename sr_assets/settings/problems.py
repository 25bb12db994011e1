"""The text of a mistake that pydantic found."""

from collections.abc import Mapping
from typing import Any


def problem_of(error: Mapping[str, Any]) -> str:
    """Return the message for a value that pydantic refused; messages of our validators stay unchanged."""
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "is required"
        case "tuple_type":
            return "must be a list, each entry beginning with '- '"
        case "too_short":
            return "is empty; add at least one entry"
        case "dict_type":
            return "must be a mapping of keys to values"
    return str(error["msg"])
