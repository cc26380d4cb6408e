"""Hostile JSON for each field of each endpoint of a gateway."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2

_MARK = "@hostile@"
HOSTILE = (
    *("null", "true", "0", "-1", "1.5", "1e999", "1e-400", "NaN", "Infinity", "9" * 400),
    *("4294967296", "-9223372036854775809", '""', '"\\u0000"', '"\\ud800"', '"a"', "[]", "{}"),
    *("[[]]", "[{}]", "[null]", "[true]", '["a", 1]', "[1, 2]", "[[1, 2], [3]]", '["\\u0000"]'),
    *('{"": ""}', f'"{"x" * 70_000}"', '{"a":' * 150 + "1" + "}" * 150, "[" * 150 + "]" * 150),
)
"""Values in JSON."""


def send_hostile(client: httpx2.Client, path: str, name: str) -> int:
    """Put each value of `HOSTILE` at each place of an example; return the number of requests.

    Args:
        client: Client of the gateway.
        path: Path of the OpenAPI document.
        name: Name of the pipeline.
    """
    document = client.get("/openapi.json").json()
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    properties = _properties(content["schema"], document["components"]["schemas"])
    example = content["example"] | ({"model": name} if "model" in properties else {})
    bodies = list(_bodies(example, set(properties)))
    for body in bodies:
        headers = {"content-type": "application/json"}
        response = client.post(path.format(name=name), content=body, headers=headers)
        shown = f"{path} {body[:300]!r}: {response.status_code} {response.text[:300]}"
        assert response.status_code in (200, 400, 404, 413, 422), shown
        if response.status_code != 200:
            assert len(response.text) < 1000, shown
        if not response.text.startswith("data: "):
            response.json()
    return len(bodies)


def _properties(schema: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Properties of a type, or of the members of a union."""
    found = known[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    members = [_properties(each, known) for each in found.get("anyOf", ())]
    own: dict[str, Any] = found.get("properties", {})
    return own | {name: each[name] for each in members for name in each}


def _bodies(example: dict[str, Any], fields: set[str]) -> Iterator[bytes]:
    """Yield the example with each value at each of its places, and in each other field."""
    places = [*_places(example, ()), *((name,) for name in sorted(fields - example.keys()))]
    for place in places:
        body = json.loads(json.dumps(example))
        parent = body
        for part in place[:-1]:
            parent = parent[part]
        parent[place[-1]] = _MARK
        text = json.dumps(body)
        for value in HOSTILE:
            yield text.replace(f'"{_MARK}"', value).encode()


def _places(value: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _places(part, (*above, name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _places(part, (*above, index))
