"""Hook of MkDocs: the pages are the Markdown files of the repository that the navigation names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from documentation import tables

ROOT = Path(__file__).resolve().parents[2]
PICTURES = (
    *(f"build_scripts/documentation/{name}.svg" for name in ("demo", "overview", "figures")),
    "docker/overload.svg",
)
"""Files that pages show."""

SEARCHED = {
    "docker/overload.md": ("overload",),
    f"{tables.GUIDES}/gateway.md": ("OpenAI",),
    f"{tables.GUIDES}/measuring.md": ("batch",),
    f"{tables.GUIDES}/precision.md": ("fp16",),
    f"{tables.GUIDES}/tasks.md": ("multi-label",),
    f"{tables.GUIDES}/tensorrt.md": ("GPU",),
}
"""Words whose search lists a page first."""
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def list_pages(nav: Any) -> Iterator[str]:
    """Yield the path of each page of a navigation, relative to the repository."""
    for entry in nav:
        (target,) = entry.values()
        if isinstance(target, str):
            yield target
        else:
            yield from list_pages(target)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages and their pictures."""
    for path in (*list_pages(config.nav), *PICTURES):
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Fill in tables; replace links to files that are no pages by their text."""
    if page.file.src_uri in tables.SITE_ONLY:
        markdown = tables.fill_page(page.file.src_uri, markdown)
    if words := SEARCHED.get(page.file.src_uri):
        page.meta["tags"] = [*words]  # The search prefers them to titles and texts.
    pages = {*list_pages(config.nav)}

    def unlink(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = target.partition("#")[0]
        if not path or ":" in path:
            return link[0]
        full = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
        is_source = full not in pages and (ROOT / full).exists()
        return f"{text} (`{full}`)" if is_source else link[0]

    return _LINK.sub(unlink, markdown)
