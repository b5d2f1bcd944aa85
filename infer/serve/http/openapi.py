"""OpenAPI 3.1 document and HTML page of the routes, generated from the route table."""

from __future__ import annotations

import html
import re
from http import HTTPStatus
from types import UnionType
from typing import Any, get_args, get_origin

import msgspec

from .routing import BINARY, EVENTS, JSON, Payload, Route

PARAMETER = re.compile(r"{(\w+)}")
REF = "#/components/schemas/{name}"


def statuses(route: Route, *, api_key: bool) -> list[int]:
    """Return every error status of a route, sorted."""
    every = {500, *route.errors}
    if route.method == "POST":
        every |= {400, 408, 413, 415}
    if route.work:
        every |= {404, 503, 504}
    if api_key and not route.open:
        every.add(401)
    return sorted(every)


def document(routes: list[Route], version: str, *, api_key: bool = False) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document as JSON values."""
    types = {
        t
        for r in routes
        for t in (r.In, r.Out, *r.answers, r.chunk, r.error_format.schema)
        if t is not None and not isinstance(t, str)
    }
    ordered = sorted(types, key=_name)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REF)
    schema = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema, api_key)
    parts: dict[str, Any] = {"schemas": components}
    if api_key:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "infer", "version": version},
        "paths": paths,
        "components": parts,
    }


def _operation(route: Route, schema: dict[Any, Any], api_key: bool) -> dict[str, Any]:
    name = f"{route.method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', route.path)}".rstrip("_")
    error = {JSON: {"schema": schema[route.error_format.schema]}}
    done = _content(route.Out, schema, route.binary)
    if route.answers:
        done[JSON] = {"schema": {"anyOf": [schema[one] for one in (route.Out, *route.answers)]}}
    if route.chunk is not None:
        done[EVENTS] = {"schema": schema[route.chunk]}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": done}}
    for status in statuses(route, api_key=api_key):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    operation: dict[str, Any] = {"operationId": name, "summary": route.summary, "responses": responses}
    path = [
        {"name": p, "in": "path", "required": True, "schema": {"type": "string"}}
        for p in PARAMETER.findall(route.path)
    ]
    headers = [_header("X-Request-Id", {"type": "string"})]
    if route.work:
        headers.append(
            _header("X-Request-Timeout-Ms", {"type": "integer", "minimum": 1, "maximum": 999_999_999})
        )
    if route.binary:
        headers.append(_header("Inference-Header-Content-Length", {"type": "integer", "minimum": 0}))
    operation["parameters"] = path + _query(route) + headers
    if route.In is not None:
        operation["requestBody"] = {
            "required": True,
            "content": _accepted(route, _content(route.In, schema, route.binary)),
        }
    if api_key and not route.open:
        operation["security"] = [{"key": []}]
    return operation


def _query(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    (_,), components = msgspec.json.schema_components([route.query], ref_template=REF)
    properties = components[route.query.__name__]["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in properties.items()
    ]


def _accepted(route: Route, content: dict[str, Any]) -> dict[str, Any]:
    """Return the media types of a request's body with their schemas; a file itself is of `image/*` or `audio/*`."""
    files = {
        media: {"schema": {"type": "string", "format": "binary"}} for media in route.accepts if "*" in media
    }
    typed = {media: content[JSON] for media in route.accepts if "*" not in media}
    return {**content, **typed, **files} if JSON in route.accepts else {**typed, **files}


def _header(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _content(what: Payload, schema: dict[Any, Any], binary: bool) -> dict[str, Any]:
    if isinstance(what, str):
        media = what.partition(";")[0]
        return {media: {"schema": {"type": "object" if media == JSON else "string"}}}
    content: dict[str, Any] = {JSON: {"schema": schema[what]}}
    if binary:
        content[BINARY] = {"schema": {"type": "string", "format": "binary"}}
    return content


def page(routes: list[Route], version: str) -> str:
    """One self-contained HTML page; nothing is fetched from anywhere."""
    rows = "\n".join(
        f"<tr><td><code>{r.method}</code></td><td><code>{html.escape(r.path)}</code></td>"
        f"<td>{html.escape(r.summary)}</td><td>{html.escape(_name(r.In))}</td><td>{html.escape(_name(r.Out))}</td></tr>"
        for r in routes
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>infer {version}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}}
:root{{color-scheme:light dark}}table{{border-collapse:collapse;width:100%}}
td,th{{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #8884}}
</style><h1>infer {version}</h1><p>The same table as <a href="/openapi.json">/openapi.json</a>.</p>
<table><tr><th>Method<th>Path<th>What<th>In<th>Out</tr>
{rows}
</table></html>
"""


def _name(what: Payload | None) -> str:
    """Return the name of a struct or media type; of a union, its parts."""
    if isinstance(what, UnionType):
        return " | ".join(_name(part) for part in get_args(what))
    if get_origin(what) is list:
        return f"list[{', '.join(_name(part) for part in get_args(what))}]"
    return "" if what is None else what if isinstance(what, str) else what.__name__
