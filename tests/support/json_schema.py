"""A validator for the part of JSON Schema that docs/schema/ uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def violations(value: Any, schema: Any, root: Any, path: str = "$") -> Iterator[str]:
    """Yield what of a value does not fit; unknown members of an object do not fit either."""
    if "$ref" in schema:
        yield from violations(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, path)
    if "anyOf" in schema:
        tries = [list(violations(value, one, root, path)) for one in schema["anyOf"]]
        if all(tries):
            yield from min(tries, key=len)
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r} is not {schema['const']!r}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    kinds = schema.get("type", [])
    allowed = [
        kind for name in ([kinds] if isinstance(kinds, str) else kinds) for kind in TYPES[name]
    ]
    if allowed and type(value) not in allowed:
        yield f"{path}: {value!r} is not {kinds}"
        return
    if isinstance(value, dict) and "properties" in schema:
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name}: missing"
        for name, item in value.items():
            if name in schema["properties"]:
                yield from violations(item, schema["properties"][name], root, f"{path}.{name}")
            else:
                yield f"{path}.{name}: unknown"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), root, f"{path}[{number}]")
