"""Tool declarations as Kimi K2.5 and K2.6 expect them: TypeScript types made from JSON Schemas.

The model was trained on this text, so its spacing, order and comments are part of the format: keys sorted,
required parameters first, descriptions as `//` comments, two spaces of indentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


class SchemaError(ValueError):
    """A JSON Schema that Kimi's TypeScript declarations cannot express."""


def typescript_declaration(functions: Sequence[Mapping[str, Any]]) -> str:
    """TypeScript namespace declaring `functions`, as Kimi's `tools_ts_str`.

    Args:
        functions: OpenAI function definitions: `name`, optional `description` and `parameters` (JSON Schema).

    Raises:
        SchemaError: a schema uses what the format cannot express (for example `oneOf`).
    """
    body = "\n".join(_function(sort_keys(function)) for function in functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


def sort_keys(value: Any) -> Any:
    """`value` with the keys of every mapping in it sorted; lists keep their order."""
    if isinstance(value, Mapping):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [sort_keys(item) for item in value]
    return value


class _Definitions:
    """`$defs` met so far, and whether the schema refers to itself (`$ref: "#"`)."""

    def __init__(self):
        self.schemas: dict[str, Any] = {}
        self.refers_to_root = False

    def resolve(self, reference: Any) -> str:
        """TypeScript name of a `$ref`."""
        if reference == "#":
            self.refers_to_root = True
            return "parameters"
        name = str(reference).rpartition("/")[2]
        if reference != f"#/$defs/{name}":
            raise SchemaError(f"$ref {reference!r} is neither '#' nor '#/$defs/NAME'")
        if name not in self.schemas:
            raise SchemaError(f"$ref {reference!r} has no definition before it")
        return name


def _function(function: Mapping[str, Any]) -> str:
    definitions = _Definitions()
    schema = _mapping(function.get("parameters") or {}, "parameters")
    members = _members(schema, definitions, "")
    parameters = _braces([text for _, _, text in _by_need(members)] + _index_signature(schema, definitions, ""), "")
    lines = []
    if definitions.refers_to_root:
        # Members of a self-referring schema stay in key order, and additionalProperties is not shown.
        lines.append("interface parameters " + _braces([text for _, _, text in members], ""))
        parameters = "parameters"
    for name, definition in list(definitions.schemas.items()):
        lines.append(_description(_mapping(definition, f"definition {name}").get("description", ""), ""))
        lines.append(f"interface {name} {_type(definition, definitions, '')}")
    lines.append(_description(function.get("description") or "", ""))
    lines.append(f"type {function['name']} = (_: {parameters}) => any;")
    return "\n".join(line for line in lines if line)


def _type(schema: Any, definitions: _Definitions, indent: str) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    schema = _mapping(schema, "schema")
    if "$ref" in schema:
        return definitions.resolve(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(option, definitions, indent) for option in schema["anyOf"])
    if "enum" in schema:
        return _enum(schema)
    kind = schema.get("type")
    if kind is None and schema:
        raise SchemaError(f"schema with keys {sorted(schema)} has none of type, enum, anyOf, $ref")
    if kind is None:
        return "any"
    if isinstance(kind, list):
        unknown = [name for name in kind if name not in _UNION_NAMES]
        if unknown:
            raise SchemaError(f"unknown type {unknown[0]!r}")
        return " | ".join(_UNION_NAMES[name] for name in kind)
    if kind == "object":
        members = _by_need(_members(schema, definitions, indent))
        signature = _index_signature(schema, definitions, indent)
        return _braces([text for _, _, text in members] + signature, indent)
    if kind == "array":
        return _array(schema, definitions, indent)
    return "number" if kind == "integer" else str(kind)


def _members(schema: Mapping[str, Any], definitions: _Definitions, indent: str) -> list[tuple[bool, str, str]]:
    """Properties in key order, each as (optional, name, text)."""
    definitions.schemas.update(_mapping(schema.get("$defs") or {}, "$defs"))
    inner = indent + _INDENT
    required = schema.get("required", [])
    members = []
    for name, value in _mapping(schema.get("properties", {}), "properties").items():
        body = _type(value, definitions, inner)
        comment = _comment(value, inner)
        default = value.get("default") if isinstance(value, Mapping) else None
        if default is not None:
            shown = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            comment += f"{inner}// Default: {shown}\n"
        mark = "" if name in required else "?"
        members.append((name not in required, name, f"{comment}{inner}{name}{mark}: {body}"))
    return members


def _by_need(members: list[tuple[bool, str, str]]) -> list[tuple[bool, str, str]]:
    return sorted(members, key=lambda member: member[:2])


def _index_signature(schema: Mapping[str, Any], definitions: _Definitions, indent: str) -> list[str]:
    extra = schema.get("additionalProperties")
    if extra is None:
        return []
    inner = indent + _INDENT
    return [f"{inner}[k: string]: {'never' if extra is False else _type(extra, definitions, inner)}"]


def _braces(members: list[str], indent: str) -> str:
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else "{}"


def _array(schema: Mapping[str, Any], definitions: _Definitions, indent: str) -> str:
    item = schema.get("items") or {}
    inner = indent + _INDENT
    comment = _comment(item, inner)
    if comment:
        return f"Array<\n{comment}{inner}{_type(item, definitions, inner)}\n{indent}>"
    return f"Array<{_type(item, definitions, indent)}>"


def _enum(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        named = [name for name in kind if name != "null"]
        if len(named) != 1 or len(kind) > 2:
            raise SchemaError(f"enum of type {kind} is not one type, with or without null")
        kind = named[0]
    for value in schema["enum"]:
        if value is not None and not isinstance(value, _ENUM_TYPES.get(kind or "", (object,))):
            raise SchemaError(f"enum value {value!r} is not a {kind}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])


def _comment(schema: Any, indent: str) -> str:
    """Comment lines above a type: its description and its constraints."""
    if not isinstance(schema, Mapping):
        return ""
    lines = ""
    if schema.get("description"):
        lines += _description(schema["description"], indent) + "\n"
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    kind = schema.get("type")
    keys = _CONSTRAINTS.get(kind, ()) if plain and isinstance(kind, str) else ()
    limits = [f"{key}: {schema[key]}" for key in sorted(keys) if key in schema]
    if limits:
        lines += f"{indent}// {', '.join(limits)}\n"
    return lines


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SchemaError(f"{what} is {value!r}, not an object")
    return value


def _description(text: Any, indent: str) -> str:
    if not isinstance(text, str):
        raise SchemaError(f"description {text!r} is not a string")
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))
