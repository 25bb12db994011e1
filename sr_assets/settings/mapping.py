"""The base class of every block of the file, and the definition of a key."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sr_assets.domain.errors import did_you_mean
from sr_assets.settings.values import shown


def file_key(
    meaning: str, default: Any = ..., *, name: str | None = None, default_text: str = "", secret: bool = False
) -> Any:
    """Define a key of the file, which is required without a `default`.

    `name` is the key if it differs from the field. A default is written as in the file and read like a value of the
    file, unless it is None or empty text. `default_text` replaces it in the reference. A secret is in no repr and no digest.
    """
    return Field(
        default,
        alias=name,
        description=meaning,
        repr=not secret,
        validate_default=default not in (..., None, ""),
        json_schema_extra={"default_text": default_text},
    )


class Block(BaseModel):
    """A mapping of the file: case-insensitive keys, none twice, none unknown; null and empty text count as unset.

    Every field with a `file_key` is a key of the file; the other fields are filled in from the surrounding blocks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Return the names of the keys with the names of their fields, in the order of definition."""
        return {field.alias or name: name for name, field in cls.model_fields.items() if field.description}

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a mapping of keys to values")  # noqa: TRY004  pydantic requires ValueError
        keys = cls.keys()
        known: dict[str, Any] = {}
        for key, value in data.items():
            name = key.lower() if isinstance(key, str) else key
            if name not in keys:
                hint = did_you_mean(str(name), keys)
                raise ValueError(f"unknown key {shown(key)}; {hint}allowed: {', '.join(keys)}")
            if name in known:
                raise ValueError(f"key {shown(key)} appears twice (keys match in any case)")
            known[name] = value
        return {key: value for key, value in known.items() if value is not None and value != ""}

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values of some fields; properties that depend on them are computed anew."""
        copy = self.model_copy()
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        object.__setattr__(copy, "__dict__", fields | values)
        return copy
