"""`/docs`: routes and their fields as one page, made from the OpenAPI document; nothing is fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:0 .2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #8886;padding:.2em .6em;text-align:left;vertical-align:top}"
)


def docs_page(document: Mapping[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    schemas = document["components"]["schemas"]
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"]
    parts.append("<p>The whole document for programs: <a href=openapi.json>openapi.json</a>.</p>")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.extend(_operation(method, path, operation, schemas))
    return "".join(parts)


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    if "requestBody" not in operation:
        yield f"<p>{escape(operation.get('summary', ''))}</p>"
        return
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    body = schemas[_name((schema.get("allOf") or [schema])[0])]
    yield "<table><tr><th>field<th>type</tr>"
    for name, field in body["properties"].items():
        must = " (required)" if name in body.get("required", ()) else ""
        yield f"<tr><td><code>{escape(name)}</code>{must}<td>{escape(_kind(field))}</tr>"
    yield "</table>"


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _name(schema)
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
