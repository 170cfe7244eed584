"""The OpenAPI file: every function of the app with its parameters and their types, and the status of every outcome.

All calls have one address, so a function is one form of the body of `POST /v1/call`, with an example to try.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from headrace.core.program import Entry, Program
from headrace.core.signature import Signature
from headrace.gateway.examples import example_of
from headrace.gateway.statuses import OK, table

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]

KEY: Schema = {"anyOf": [{"type": "string"}, {"type": "integer"}], "description": "The key of the entity."}
REQUEST_ID: Schema = {"type": "string", "description": "A repeat with the same id gets the same answer; it runs once."}
FAILED: Schema = {
    "status": {"type": "string"},
    "code": {"type": "string", "description": "For programs."},
    "error": {"type": "string", "description": "For people."},
}
WHERE: Schema = {"type": "string", "description": "The file and the line of the app; not for `Abort`."}
PLACE: Schema = {"type": "object", "properties": {"function": {"type": "string"}, "key": {}, "where": WHERE}}
RAN: Schema = {"request_id": {"type": "string"}, "tid": {"type": "integer"}, "epoch": {"type": "integer"}}
ANSWERS: dict[str, Schema] = {
    "ok": {"type": "object", "properties": {"status": {"const": "ok"}, **RAN, "result": {}}},
    "aborted": {
        "type": "object",
        "properties": FAILED | RAN | {"type": {"type": "string"}, "raised_in": PLACE},
    },
    "refused": {"type": "object", "properties": FAILED | {"retry": {"type": "boolean"}}},
}
STATE_ANSWER: Schema = {"type": "object", "properties": {"state": {}, "exists": {"type": "boolean"}}}


def describe(web: FastAPI, program: Program) -> None:
    """Add the app's functions, and the routes that FastAPI does not know, to what FastAPI tells."""
    made: list[Schema] = []

    def openapi() -> Schema:
        if not made:
            made.append(openapi_of(web, program))
        return made[0]

    web.openapi = openapi  # type: ignore[method-assign]


def openapi_of(web: FastAPI, program: Program) -> Schema:
    entries = [program.functions[function] for function in program.app.functions]
    types = Types(entries)
    schemas = types.components | {f"answer.{status}": schema for status, schema in ANSWERS.items()}
    schemas |= {component_of(entry): types.call_schema(entry) for entry in entries}
    names = {entry.name: reference(component_of(entry)) for entry in entries}
    schemas["call"] = {
        "oneOf": [{"$ref": ref} for ref in names.values()],
        "discriminator": {"propertyName": "function", "mapping": names},
    }
    info = get_openapi(title=web.title, version=web.version, routes=web.routes, description=program.app.name)
    examples = {entry.name: example_call(entry) for entry in entries}
    info["paths"] = call_paths(examples, program) | info.get("paths", {})
    info.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return info


def component_of(entry: Entry) -> str:
    return f"call.{entry.name}"


def reference(name: str) -> str:
    return REF.format(name=name)


def in_json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def call_paths(examples: Mapping[str, Schema], program: Program) -> Schema:
    call: Schema = {"$ref": reference("call")}
    batch = {"type": "object", "properties": {"calls": {"type": "array", "items": call}}, "required": ["calls"]}
    answered = {"oneOf": [{"$ref": reference(f"answer.{status}")} for status in ANSWERS]}
    replies = in_json({"type": "object", "properties": {"replies": {"type": "array", "items": answered}}})
    several = {"calls": [each["value"] for each in examples.values()][:2]}
    refusals = responses(lambda status: status == "refused")
    operator = {"name": "operator", "in": "path", "required": True}
    key = {"name": "key", "in": "query", "required": True, "schema": {"type": "string"}}
    int_key = {"name": "int_key", "in": "query", "schema": {"type": "boolean", "default": False}}
    int_key["description"] = "The key is an int, not a text."
    return {
        "/v1/call": {
            "post": {
                "summary": "Call a function",
                "requestBody": {"required": True, "content": with_examples(call, examples)},
                "responses": responses(lambda status: True),
            }
        },
        "/v1/batch": {
            "post": {
                "summary": "Call many functions, each in a transaction of its own",
                "requestBody": {
                    "required": True,
                    "content": with_examples(batch, {"batch": {"value": several}}),
                },
                "responses": {str(OK): {"description": "An answer to each call", "content": replies}} | refusals,
            }
        },
        "/v1/state/{operator}": {
            "get": {
                "summary": "Read the state of an entity",
                "parameters": [
                    operator | {"schema": {"type": "string", "enum": list(program.app.operators)}},
                    key,
                    int_key,
                ],
                "responses": {str(OK): {"description": "Its state", "content": in_json(STATE_ANSWER)}} | refusals,
            }
        },
    }


def with_examples(schema: Schema, examples: Mapping[str, Schema]) -> Schema:
    return {"application/json": {"schema": schema, "examples": dict(examples)}}


def responses(wanted: Callable[[str], bool]) -> Schema:
    """By status: what it may mean."""
    found: dict[str, list[Any]] = {}
    for outcome in table():
        if wanted(outcome.status):
            found.setdefault(str(outcome.http_status), []).append(outcome)
    return {
        status: {
            "description": "\n".join(f"- {each.status} {each.code}: {each.meaning}" for each in outcomes),
            "content": in_json(one_of(f"answer.{each.status}" for each in outcomes)),
        }
        for status, outcomes in sorted(found.items())
    }


def one_of(names: Iterable[str]) -> Schema:
    refs = [{"$ref": reference(name)} for name in dict.fromkeys(names)]
    return refs[0] if len(refs) == 1 else {"oneOf": refs}


class Types:
    """The types of parameters as JSON schemas."""

    def __init__(self, entries: list[Entry]) -> None:
        hints = [hint if has_schema(hint) else Any for entry in entries for hint in entry.signature.hints]
        schemas, self.components = msgspec.json.schema_components(hints, ref_template=REF)
        self._by_parameter: dict[tuple[str, str], Schema] = {}
        places = [(entry.name, name) for entry in entries for name in entry.signature.names]
        for place, schema in zip(places, schemas, strict=True):
            self._by_parameter[place] = as_read(schema)
        self.components = {name: as_read(schema) for name, schema in self.components.items()}

    def call_schema(self, entry: Entry) -> Schema:
        signature = entry.signature
        named = self._named(entry)
        properties: Schema = {"function": {"const": entry.name, "type": "string"}, "key": KEY}
        properties["args"] = {"anyOf": [named, self._by_position(entry)]}
        return {
            "type": "object",
            "title": str(signature),
            "description": description_of(entry),
            "properties": properties | {"request_id": REQUEST_ID},
            "required": ["function", "key", *(["args"] if signature.least else [])],
            "additionalProperties": False,
        }

    def _named(self, entry: Entry) -> Schema:
        signature = entry.signature
        places, defaults = signature.keywords.places, signature.keywords.defaults
        properties = {}
        for name, at in places.items():
            schema = self._by_parameter[entry.name, name]
            properties[name] = schema | {"default": msgspec.to_builtins(defaults[at])} if at in defaults else schema
        return {
            "type": "object",
            "title": "by name",
            "properties": properties,
            "required": [name for name in needed(signature) if name in places],
            "additionalProperties": False,
        }

    def _by_position(self, entry: Entry) -> Schema:
        signature = entry.signature
        items = [self._by_parameter[entry.name, name] for name in signature.names]
        rest: Any = items.pop() if signature.variadic else False
        schema = {"type": "array", "title": "by position", "minItems": signature.least, "items": rest}
        return schema | ({"prefixItems": items} if items else {})


def example_call(entry: Entry) -> Schema:
    """A call to try, with the arguments that must be given."""
    signature = entry.signature
    types = dict(zip(signature.names, (codec.type for codec in signature.codecs), strict=True))
    named = {name: example_of(types[name]) for name in needed(signature)}
    args = named if named.keys() <= signature.keywords.places.keys() else list(named.values())
    value = {"function": entry.name, "key": "a", "args": args}
    return {"summary": str(signature), "description": description_of(entry), "value": value}


def has_schema(hint: Any) -> bool:
    try:
        msgspec.json.schema_components([hint], ref_template=REF)
    except TypeError:
        return False
    return True


def needed(signature: Signature) -> list[str]:
    return [signature.names[at] for at in signature.keywords.needed]


def description_of(entry: Entry) -> str:
    text = inspect.cleandoc(entry.function.__doc__ or "")
    result = entry.signature.result.type.text
    return f"{text}\n\nReturns {result}.".strip() if result != "Any" else text


def as_read(schema: Any) -> Any:
    """Of msgspec's schemas: a Decimal may be a number, and a record takes no other fields."""
    if isinstance(schema, list):
        return [as_read(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "decimal":
        return {"anyOf": [schema, {"type": "number"}]}
    made = {name: as_read(each) for name, each in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        made["additionalProperties"] = False
    return made
