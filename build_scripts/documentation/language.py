"""Rules for the documentation in code: a docstring, an entry or a comment stands alone."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

# Each is matched at the beginning of the first sentence.
_CONTINUES_THE_NAME = r"of|that|whose|whom|likewise|and|or|but|than|else|amid|told"
_PARTICIPLES = r"asked|given|if|sent|taken"
_PREPOSITIONS = (
    r"above|after|among|around|as|at|before|behind|below|beneath|besides?|between|beyond|by|during"
    r"|for|from|in|into|on|over|since|so|through|to|toward|under|until|within|without|with"
)
_PRONOUNS = (
    r"(?:he|its?|she|their|them|these|they|this|those)\b"
    r"|(?:the same|the others?|another one|others)(?=[\s.,;:]|$)"
    r"|ones? (?:more|of|that|which|who|whose)"
)
_QUANTITIES = r"(?:fewest|least|most|so (?:few|long|many|much|often))\b(?! of (?:all|the|these))"
_RELATIVES = (
    r"how\b(?! (?:far|fast|large|long|many|much|often)\b)"
    r"|whatever|what|when|where|whichever|which|whoever|who|why"
)
_DETERMINERS = r"an|all|any|a|each|every|its|more|no|several|some|the|three|two"
_VERB_AFTER_COMMA = re.compile(
    r", (?:[\w`.'-]+ ){0,6}(?:are|is|was|were|can|cannot|could|do|does|did|had|has|have|may|might"
    r"|must|will|would|should|\w{3,}s)\b"
)
_SECTIONS = frozenset(("Args:", "Arguments:", "Attributes:"))
_SECTION = re.compile(
    r"^(?:Args|Arguments|Attributes|Examples?|Notes?|Raises|Returns|Usage|Yields):$"
)
_ENTRY = re.compile(
    r"^(?P<indent> +)(?P<name>\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_]\w*)*)(?: \([^)]*\))?:"
    r"(?: (?P<text>.*))?$"
)
_NO_PROSE = ("noqa", "type:", "pragma", "fmt:", "mypy:", "ruff:")


Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Documented:
    """A text that documents something.

    Attributes:
        kind: "module", "class", "function", "property", "constant", "entry" or "comment".
        name: Dotted name within the module; the file's stem for a module.
        line: Line number, from 1.
        text: The text, without quotes.
    """

    kind: str
    name: str
    line: int
    text: str


def find_mistake(documented: Documented) -> str:
    """Return the rule that the text breaks, as a phrase; "" where none is broken."""
    sentence, kind = _first_sentence(documented.text), documented.kind
    words = re.findall(r"[A-Za-z][\w'-]*", sentence)
    if not words or not sentence[0].isalpha() or sentence.startswith("http"):
        return ""

    def begins(pattern: str) -> bool:
        return re.match(rf"(?:{pattern})\b", sentence, re.IGNORECASE) is not None

    field, first = kind in ("entry", "comment"), words[0].lower()
    is_named = kind in ("class", "function") and first != "see"
    rules = {
        "continues the name": begins(_CONTINUES_THE_NAME) or (field and begins(_PARTICIPLES)),
        "is a phrase without a subject": begins(_PREPOSITIONS)
        and not _VERB_AFTER_COMMA.search(sentence),
        "begins with a pronoun that refers to nothing": begins(_PRONOUNS)
        and not (field and first == "its"),
        "gives a quantity without a noun; write minimum, maximum or at most": begins(_QUANTITIES),
        "begins with a relative word in place of a noun": begins(_RELATIVES),
        "has fewer than three words": is_named and len(sentence.split()) < 3,
        "documents a function and does not begin with a verb": kind == "function"
        and begins(_DETERMINERS),
    }
    return next((mistake for mistake, is_broken in rules.items() if is_broken), "")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def read_documented(path: Path) -> Iterator[Documented]:
    """Yield docstrings, their entries, docs of constants, and comments behind fields."""
    fields: dict[int, str] = {}
    yield from _visit(parse(path), path.stem, "", fields)
    lines = path.read_text(encoding="utf-8").splitlines()
    for line, name in fields.items():
        _, _, text = lines[line - 1].partition("  # ")
        if text and not text.startswith(_NO_PROSE):
            yield Documented("comment", name, line, text)


def _visit(node: Scope, name: str, scope: str, fields: dict[int, str]) -> Iterator[Documented]:
    """Yield the texts of a node and of those in it; put the names of fields by line in `fields`."""
    text = ast.get_docstring(node)
    if text is not None:
        line = node.body[0].lineno
        yield Documented(_kind(node), name, line, text)
        for entry, entry_text in _entries(text):
            yield Documented("entry", f"{name}.{entry}", line, entry_text)
    for statement, following in zip_longest(node.body, node.body[1:]):
        match statement:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                inner = f"{scope}{statement.name}"
                yield from _visit(statement, inner, f"{inner}.", fields)
            case ast.AnnAssign(target=target) | ast.Assign(targets=[target, *_]):
                label = scope + ast.unparse(target)
                if isinstance(node, ast.ClassDef) and isinstance(statement, ast.AnnAssign):
                    fields[statement.end_lineno or statement.lineno] = label
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield Documented("constant", label, following.lineno, text)


def _kind(node: Scope) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "module" if isinstance(node, ast.Module) else "class"
    decorators = {ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list}
    is_property = decorators & {"property", "cached_property", "setter", "overload"}
    return "property" if is_property else "function"


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each entry in the sections for arguments and attributes."""
    in_section, indent = False, ""
    for line in text.splitlines():
        if _SECTION.match(line):
            in_section, indent = line in _SECTIONS, ""
        elif in_section and (entry := _ENTRY.match(line)) and indent in ("", entry["indent"]):
            indent = entry["indent"]
            yield entry["name"], entry["text"] or ""
        elif line and not line.startswith(" "):
            in_section = False


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.match(r".+?(?<!e\.g)(?<!i\.e)[.!?](?=\s|$)", paragraph)
    return sentence[0] if sentence else paragraph
