"""Pages for people: the endpoints, and Swagger UI. They are static and name no pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from html import escape
from importlib.metadata import distribution
from pathlib import Path

from triptych.gateway.http import Operation, Reply

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Triptych gateway</title>
<style>body { font: 16px sans-serif; margin: 2em } td { padding: 0.2em 1em 0.2em 0 }</style>
"""
_DOCS = f"""{_HEAD}<link rel="stylesheet" href="docs/swagger-ui.css">
<form>API key, if the gateway needs one: <input type="password" autocomplete="off">
<button>Show</button></form><div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
const form = document.forms[0], key = form.elements[0];
const withKey = request => {{
  if (key.value) request.headers.authorization = "Bearer " + key.value;
  return request;
}};
const show = () => SwaggerUIBundle(
  {{url: "openapi.json", dom_id: "#page", requestInterceptor: withKey, validatorUrl: null}}
);
form.onsubmit = event => {{ event.preventDefault(); show(); }};
show();
</script>
</html>
"""
_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}


def make_pages(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations of the pages; the first page lists `operations`."""
    rows = "".join(
        f"<tr><td>{each.method}<td><code>{escape(each.path)}</code><td>{escape(each.summary)}\n"
        for each in operations
    )
    index = (
        f'{_HEAD}<h1>Triptych gateway</h1><p><a href="docs">Try requests</a>, '
        f'<a href="openapi.json">OpenAPI document</a></p><table>\n{rows}</table></html>\n'
    )
    pages: list[tuple[str, str, str, Callable[[], bytes]]] = [
        ("/", "Show the endpoints.", "text/html", index.encode),
        ("/docs", "Try the endpoints.", "text/html", _DOCS.encode),
    ]
    for file, kind in _FILES.items():
        path = f"/docs/{file}"
        pages.append((path, "Return a file of Swagger UI.", kind, partial(_read, file)))
    return [
        Operation(
            path,
            summary=summary,
            tag="Pages",
            handler=partial(_reply, read, kind),
            is_open=True,
            media_type=kind,
        )
        for path, summary, kind, read in pages
    ]


async def _reply(read: Callable[[], bytes], kind: str) -> Reply:
    return Reply(read(), f"{kind}; charset=utf-8")


@cache
def _read(file: str) -> bytes:
    # The package itself loads FastAPI, which is not needed.
    found = distribution("fastapi-swagger").locate_file(f"fastapi_swagger/resources/{file}")
    return Path(str(found)).read_bytes()
