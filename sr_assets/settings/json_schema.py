"""The JSON Schema of the configuration, for editors: keys, kinds of values, and meanings, made from the blocks.

It knows keys in lower case only. The platform checks more: the form of each value, and contradictions between keys.
"""

import re
from typing import Any, Final, get_args, get_origin

from pydantic.fields import FieldInfo

from sr_assets.settings.key_tables import default_of, type_of
from sr_assets.settings.mapping import Block, alternatives, is_block
from sr_assets.settings.top_level import Settings
from sr_assets.settings.values import Value

#: The newest dialect that editors of YAML know well.
_DIALECT: Final = "http://json-schema.org/draft-07/schema#"
_REFERENCE: Final = {
    "description": "The value of a key of a data source.",
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"type": "string", "description": "source/key"},
        "default": {},
        "dynamic": {"type": "boolean"},
    },
    "additionalProperties": False,
}
#: Beginning of a type in the reference → the types in YAML; any scalar can be text, because `${NAME}` may stand in it.
_SCALARS: Final = {
    "number": ["integer", "string"],
    "percentage": ["number", "string"],
    "duration": ["string", "number"],
}
_TEXT: Final = ["string", "number", "boolean"]


def config_schema() -> dict[str, Any]:
    """Return the schema of a configuration file."""
    blocks: dict[str, Any] = {}
    whole = _block(Settings, blocks)
    return {"$schema": _DIALECT, "title": "sr-assets", **whole, "definitions": {"reference": _REFERENCE, **blocks}}


def _block(block: type[Block], blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a block; `blocks` receives those inside it."""
    fields = {key: block.model_fields[name] for key, name in block.keys().items()}
    required = [key for key, field in fields.items() if field.is_required()]
    return {
        "type": "object",
        "properties": {key: _field(field, blocks) for key, field in fields.items()},
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _field(field: FieldInfo, blocks: dict[str, Any]) -> dict[str, Any]:
    kind = type_of(field.annotation, field.metadata)
    readers = [part for part in field.metadata if isinstance(part, Value)]
    shapes = _shapes(field.annotation, kind if readers else None, blocks)
    meaning = f"{field.description}\n\nValue: {kind}. Default: {default_of(field) or 'none'}."
    return {"description": meaning, **_or_reference([*shapes, {"type": "null"}])}


def _shapes(annotation: Any, kind: str | None, blocks: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of the values that an annotation takes; `kind` is the type in the reference, if it is known."""
    options = list(alternatives(annotation))
    kind = kind or next((part.type for part in options if isinstance(part, Value)), "")
    shapes: list[dict[str, Any]] = []
    for option in options:
        origin, parts = get_origin(option), get_args(option)
        if is_block(option):
            if option.__name__ not in blocks:
                blocks[option.__name__] = {}
                blocks[option.__name__] = _block(option, blocks)
            shapes.append({"$ref": f"#/definitions/{option.__name__}"})
        elif origin in (tuple, list):
            items = _shapes(parts[0], None, blocks)
            shapes.append({"type": "array", "items": _or_reference(items)})
            # A reader takes a single value for a list.
            shapes += items if kind else []
        elif origin is dict:
            shapes.append({"type": "object", "additionalProperties": _or_reference(_shapes(parts[1], None, blocks))})
        elif option is Any:
            return [{}]
    if kind == "mapping" and not any("object" in shape.values() for shape in shapes):
        return [{"type": "object"}]
    if shapes:
        return shapes
    scalars = [option for option in options if not isinstance(option, Value) and option is not type(None)]
    if all(isinstance(option, str) for option in scalars):
        # In any case, or from the environment.
        letters = "|".join("".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in text) for text in scalars)
        return [{"enum": scalars}, {"type": "string", "pattern": rf"^({letters})$|\$\{{"}]
    if limits := re.match(r"number, (-?\d+) (?:or more|to (\d+))", kind):
        most = {} if limits[2] is None else {"maximum": int(limits[2])}
        return [{"type": "integer", "minimum": int(limits[1]), **most}, {"type": "string"}]
    return [{"type": next((types for name, types in _SCALARS.items() if kind.startswith(name)), _TEXT)}]


def _or_reference(shapes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"anyOf": [*shapes, {"$ref": "#/definitions/reference"}]}
