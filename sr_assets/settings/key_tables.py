"""The reference of the configuration's keys, as Markdown tables made from the blocks."""

from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from sr_assets.settings.mapping import Block
from sr_assets.settings.values import Value


def key_table(block: type[Block]) -> str:
    """Return the Markdown table of a block's keys with their types, defaults and meanings, required keys first."""
    fields = {key: block.model_fields[name] for key, name in block.keys().items()}
    rows = [
        f"| `{key}` | {type_of(field.annotation, field.metadata)} | {default_of(field)} | {field.description} |"
        for key, field in sorted(fields.items(), key=lambda item: not item[1].is_required())
    ]
    return "\n".join(("| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows, ""))


def type_of(annotation: Any, metadata: Iterable[Any]) -> str:
    """Return the type of a key: of its Value, else of the parts of its annotation."""
    for item in metadata:
        if isinstance(item, Value):
            return item.type
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "block"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(parts[0], parts[1:])
    if origin is tuple:
        return _of_block("list of blocks", parts[0]) or f"list: {type_of(parts[0], ())}"
    if origin is dict:
        return _of_block("blocks by name", parts[1]) or "mapping"
    return type_of(parts[0], ())


def _of_block(name: str, part: Any) -> str | None:
    return name if type_of(part, ()) == "block" else None


def default_of(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra["default_text"]:
        return str(extra["default_text"])
    if field.is_required():
        return "required"
    match field.default:
        case None | "" | []:
            return "none"
        case {}:
            return ""
        case bool():
            return str(field.default).lower()
        case int():
            return f"{field.default:,}"
    return str(field.default)
