"""The base class of every block of the file, and the definition of a key."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from sr_assets.domain.errors import did_you_mean
from sr_assets.settings.values import Value, read_secret, shown


def file_key(
    meaning: str,
    default: Any = ...,
    *,
    name: str | None = None,
    default_text: str = "",
    secret: bool = False,
    local: bool = False,
) -> Any:
    """Define a key of the file, which is required without a `default`.

    `name` is the key if it differs from the field. A default is written as in the file and read like a value of the
    file, unless it is None or empty text. `default_text` replaces it in the reference. A secret is in no repr and no digest.

    A `local` key executes or locates something: its value does not come from a remote source of `data`. So are secrets, paths
    and URLs.
    """
    return Field(
        default,
        alias=name,
        description=meaning,
        repr=not secret,
        validate_default=default not in (..., None, ""),
        json_schema_extra={"default_text": default_text, "local": local},
    )


class Block(BaseModel):
    """A mapping of the file: case-insensitive keys, none twice, none unknown; null and empty text count as unset.

    Every field with a `file_key` is a key of the file; the other fields are filled in from the surrounding blocks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    #: Whether the whole block is `local`, see `file_key`.
    is_local: ClassVar[bool] = False

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


class Key(NamedTuple):
    """What the schema says about a location: its type, or None if it is unknown, and whether it is `local` or secret."""

    annotation: Any = None
    local: bool = False
    secret: bool = False

    def at(self, *loc: str | int) -> "Key":
        """Return the key at a location inside this one."""
        key = self
        for part in loc:
            key = next(
                (inner for option in key._options() if (inner := key._inside(option, part))), Key(None, *key[1:])
            )
        return key

    def inside(self, value: object, path: str = "") -> Iterator[tuple[str, "Key"]]:
        """Yield the path and the key of a value, and of each value inside it."""
        yield path, self
        if self.annotation is None:
            return
        if isinstance(value, list):
            for number, item in enumerate(value):
                yield from self.at(number).inside(item, path)
        elif isinstance(value, dict):
            for name, item in value.items():
                part = str(name).lower()
                yield from self.at(part).inside(item, f"{path}.{part}".lstrip("."))

    @property
    def is_structured(self) -> bool:
        """Whether a value is a list or a mapping."""
        return any(get_origin(option) in (tuple, list, dict) or is_block(option) for option in self._options())

    @property
    def holds_secret(self) -> bool:
        """Whether the key, or one inside its blocks, is secret."""
        return self.secret or any(
            _key_of(block.model_fields[name], self).holds_secret
            for block in _blocks(self.annotation)
            for name in block.keys().values()
        )

    def _options(self) -> Iterator[Any]:
        return (option for option in alternatives(self.annotation) if not isinstance(option, Value))

    def _inside(self, option: Any, part: str | int) -> "Key | None":
        if is_block(option):
            name = option.keys().get(part)
            return None if name is None else _key_of(option.model_fields[name], self)
        arguments = get_args(option)
        match get_origin(option):
            case origin if origin in (tuple, list):
                item = Key(arguments[0], *self[1:])
                # A single value may stand for a list.
                return item if isinstance(part, int) else item.at(part)
            case origin if origin is dict:
                return Key(arguments[1], *self[1:])
        return None


def _key_of(field: FieldInfo, outer: Key) -> Key:
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    readers = [part for part in alternatives(annotation) if isinstance(part, Value)]
    secret = outer.secret or not field.repr or any(reader.func is read_secret for reader in readers)
    extra = field.json_schema_extra
    local = secret or outer.local or (isinstance(extra, dict) and bool(extra.get("local")))
    local = local or any(is_block(option) and option.is_local for option in alternatives(annotation))
    return Key(annotation, local or any(re.search(r"URL|^path$", reader.type) for reader in readers), secret)


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of an annotation, and the readers of its values."""
    arguments = get_args(annotation)
    if get_origin(annotation) in (tuple, list, dict) or not arguments:
        yield annotation
        return
    for argument in arguments:
        yield from alternatives(argument)


def _blocks(annotation: Any) -> Iterator[type[Block]]:
    """Yield the blocks of a type, also those in its lists and mappings."""
    if is_block(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _blocks(argument)


def is_block(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Block)


def blocks_by_path(whole: type[Block]) -> Iterator[tuple[str, type[Block]]]:
    """Yield a block and each block inside it, each once, with the path of its key; `[]` follows the key of a list."""
    seen = set[type[Block]]()

    def inside(block: type[Block], path: str) -> Iterator[tuple[str, type[Block]]]:
        if block in seen:
            return
        seen.add(block)
        yield path, block
        for key, name in block.keys().items():
            field = block.model_fields[name]
            listed = any(get_origin(option) in (tuple, list) for option in alternatives(field.annotation))
            for inner in _blocks(field.annotation):
                yield from inside(inner, f"{path}.{key}".lstrip(".") + ("[]" if listed else ""))

    yield from inside(whole, "")
