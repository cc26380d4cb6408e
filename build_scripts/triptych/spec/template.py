"""Templates of pipelines: the built-in ones, and folders of a company.

A template ``NAME/`` has the files of a new folder, and in ``NAME/hooks/`` those that are added with
hooks. In text files ``@name@`` and ``@folder@`` stand for the pipeline's name and folder. Python
files of built-in templates end in ``.py.txt``, so that they are not modules of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from triptych.base.errors import UserError, closest
from triptych.base.files import expand_home

SPEC_FILE = "pipeline.yaml"
"""File of each pipeline and each template."""
BUILT_IN = Path(__file__).parent / "templates"
HOOKS = "hooks"
ROW_TESTS = BUILT_IN / "test_hooks.py.txt"
"""Tests of the hooks of every task, with ``@rows@`` in place of the rows in its `ROWS_FILE`."""
ROWS_FILE = "test_rows.txt"
LEFT_OUT = (".git", "__pycache__")
"""Folders of a template that are not part of a pipeline."""


@dataclass(frozen=True)
class Template:
    """A template that `new --template` finds by its name.

    Attributes:
        folder: Folder of the template.
        description: Sentence in the first line of the spec, which says what a pipeline does.
    """

    name: str
    folder: Path
    description: str

    @property
    def is_built_in(self) -> bool:
        """Whether the template is one of this package."""
        return self.folder.parent == BUILT_IN

    def as_dict(self) -> dict[str, object]:
        """Return plain data for ``--json``."""
        return {**asdict(self), "folder": str(self.folder), "built_in": self.is_built_in}


PAIR = "image-text-embedding"
"""Name for two pipelines with one vector space, a template for each."""
SIDES = {"text": "text-embedding", "image": "image-embedding"}
"""Template of each of them, by the ending of its name."""


def tasks() -> list[str]:
    """Return the names of the built-in templates."""
    return sorted(path.parent.name for path in BUILT_IN.glob(f"*/{SPEC_FILE}"))


def list_templates(folder: Path | None = None) -> list[Template]:
    """Return the templates of `folder` and the built-in ones, sorted by name.

    A template of `folder` replaces a built-in one of the same name.

    Raises:
        UserError: The folder is missing.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(
            "--templates", "must be an existing folder", given=folder, remedy="Correct the path"
        )
    found = {}
    for parent in (BUILT_IN, *([] if folder is None else [folder.resolve()])):
        for spec in parent.glob(f"*/{SPEC_FILE}"):
            first = spec.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
            description = re.sub(r"^#\s*(?:@name@: )?", "", first).strip()
            found[spec.parent.name] = Template(spec.parent.name, spec.parent, description)
    return [found[name] for name in sorted(found)]


def find_template(given: str, folder: Path | None = None) -> Path:
    """Return the folder of a template by its name or path.

    Args:
        given: Name or path.
        folder: Folder with templates of a company. None: only the built-in ones have names.

    Raises:
        UserError: There is no such template.
    """
    path = expand_home(given)
    if re.search(r"[/:\\]", given) or given.startswith((".", "~")):
        if (path / SPEC_FILE).is_file():
            return path.resolve()
        raise UserError(
            "--template",
            f"must be a folder with a {SPEC_FILE}",
            given=given,
            remedy="Correct the path; clone a git repository first, and give the folder",
        )
    known = {template.name: template.folder for template in list_templates(folder)}
    if given not in known:
        raise UserError(
            "--template",
            "is not a known template",
            given=given or "an empty text",
            remedy=f"{closest(given, known)}List them with `triptych templates`; a folder needs a "
            f"slash: ./{given}",
        )
    return known[given]


def fill(template: Path, target: Path, *, with_hooks: bool, marks: Mapping[str, str]) -> None:
    """Write the files of a template into the folder `target`.

    Args:
        template: Folder of the template.
        target: Folder that is written.
        with_hooks: Whether to write the files of its folder `HOOKS`.
        marks: Text in place of each mark, such as ``@name@``, in the text files.

    Raises:
        UserError: The template has a link, no files of hooks to write, or a spec in another
            encoding than UTF-8.
    """
    is_built_in = template.parent == BUILT_IN
    if with_hooks and not is_built_in and not (template / HOOKS).is_dir():
        raise UserError(
            "--hooks",
            f"is only supported for a template with a folder `{HOOKS}`",
            given=str(template),
            remedy="Omit the option",
        )
    for source in _list_files(template):
        path, content = source.relative_to(template), source.read_bytes()
        if path.parts[0] == HOOKS:
            path = path.relative_to(HOOKS)
            if not with_hooks:
                continue
        if is_built_in and path.name == ROWS_FILE:
            path = path.with_name(ROW_TESTS.name)
            content = ROW_TESTS.read_bytes().replace(b"@rows@\n", content)
        name = path.as_posix()
        file = target / (name.removesuffix(".txt") if name.endswith(".py.txt") else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_replace(content, marks))
    try:
        (target / SPEC_FILE).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            "--template",
            f"must have a {SPEC_FILE} in UTF-8",
            given=f"{template}: {error}",
            remedy="Convert the file",
        ) from error


def _list_files(template: Path) -> Iterator[Path]:
    for path in sorted(template.rglob("*")):
        if path.is_symlink():
            raise UserError(
                "--template",
                "must not contain links, which may lead out of the folder",
                given=str(path),
                remedy="Put the file itself into the template",
            )
        if path.is_file() and not set(LEFT_OUT) & {*path.relative_to(template).parts}:
            yield path


def _replace(content: bytes, marks: Mapping[str, str]) -> bytes:
    """Return the content of a file with its marks replaced; other files than texts stay."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.encode()
