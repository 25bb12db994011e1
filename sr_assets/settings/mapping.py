"""The base class of every mapping of the file."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from sr_assets.settings.values import shown


class Raw(BaseModel):
    """A mapping of the file: case-insensitive keys, none twice, none unknown; null and empty text count as unset."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a mapping of keys to values")  # noqa: TRY004  as in read_text
        known: dict[str, Any] = {}
        for key, value in data.items():
            name = key.lower() if isinstance(key, str) else key
            if name not in cls.model_fields:
                near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(f"unknown key {shown(key)}; {hint}allowed: {', '.join(cls.model_fields)}")
            if name in known:
                raise ValueError(f"key {shown(key)} appears twice (keys match in any case)")
            known[name] = value
        return {key: value for key, value in known.items() if value is not None and value != ""}
