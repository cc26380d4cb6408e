"""Language of the code: documentation that stands alone, unique class names, American spelling."""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CONTINUES_THE_NAME = re.compile(
    r"(?:of|that|whose|whom|likewise|and|or|but|than|else|amid|told)\b",
    re.IGNORECASE,
)
_PREPOSITIONS = re.compile(
    r"(?:above|after|among|around|as|at|before|behind|below|beneath|beside|besides|between"
    r"|beyond|by|during|for|from|in|into|on|over|since|so|through|to|toward|under|until"
    r"|within|without|with)\b",
    re.IGNORECASE,
)
_PARTICIPLES = re.compile(
    r"(?:asked|given|if|sent|taken)\b",
    re.IGNORECASE,
)
_RELATIVES = re.compile(
    r"(?:how|whatever|what|when|where|whichever|which|whoever|who|why)\b",
    re.IGNORECASE,
)
_DETERMINERS = re.compile(
    r"(?:an|all|any|a|each|every|its|more|no|several|some|the|three|two)\b",
    re.IGNORECASE,
)
_PRONOUNS = re.compile(
    r"(?:he|it|its|she|their|them|these|they|this|those)\b"
    r"|(?:the same|the others?|another one|others)(?=[\s.,;:]|$)"
    r"|ones? (?:more|of|that|which|who|whose)\b",
    re.IGNORECASE,
)
_QUANTITIES = re.compile(
    r"(?:fewest|least|most|so (?:few|long|many|much|often))\b(?! of (?:all|the|these))",
    re.IGNORECASE,
)
_MEASURE = re.compile(r"how (?:far|fast|large|long|many|much|often)\b", re.IGNORECASE)
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
    sentence = _first_sentence(documented.text)
    words = re.findall(r"[A-Za-z][\w'-]*", sentence)
    if not words or not sentence[0].isalpha() or sentence.startswith("http"):
        return ""
    first = words[0].lower()
    field = documented.kind in ("entry", "comment")
    if _CONTINUES_THE_NAME.match(sentence) or (field and _PARTICIPLES.match(sentence)):
        return "continues the name"
    if _PREPOSITIONS.match(sentence) and not _VERB_AFTER_COMMA.search(sentence):
        return "is a phrase without a subject"
    if _PRONOUNS.match(sentence) and not (field and first == "its"):
        return "begins with a pronoun that refers to nothing"
    if _QUANTITIES.match(sentence):
        return "gives a quantity without a noun; write minimum, maximum or at most"
    if _RELATIVES.match(sentence) and not _MEASURE.match(sentence):
        return "begins with a relative word in place of a noun"
    if documented.kind in ("class", "function") and first != "see" and len(sentence.split()) < 3:
        return "has fewer than three words"
    if documented.kind == "function" and _DETERMINERS.match(sentence):
        return "documents a function and does not begin with a verb"
    return ""


def read_documented(path: Path) -> Iterator[Documented]:
    """Yield docstrings, their entries, docs of constants, and comments behind fields."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    fields: dict[int, str] = {}
    yield from _visit(tree, path.stem, "", fields)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            text = token.string.lstrip("#! ")
            if (
                token.type == tokenize.COMMENT
                and token.start[0] in fields
                and not text.startswith(_NO_PROSE)
            ):
                yield Documented("comment", fields[token.start[0]], token.start[0], text)


def _visit(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    scope: str,
    fields: dict[int, str],
) -> Iterator[Documented]:
    text = ast.get_docstring(node)
    if text is not None:
        line = node.body[0].lineno
        yield Documented(_kind(node), name, line, text)
        for entry, entry_text in _entries(text):
            yield Documented("entry", f"{name}.{entry}", line, entry_text)
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{scope}{statement.name}"
            yield from _visit(statement, inner, f"{inner}.", fields)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            target = (
                statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            )
            label = scope + ast.unparse(target)
            if isinstance(node, ast.ClassDef) and isinstance(statement, ast.AnnAssign):
                fields[statement.end_lineno or statement.lineno] = label
            if (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                yield Documented("constant", label, following.lineno, following.value.value)


def _kind(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(target).rpartition(".")[2] in (
            "property",
            "cached_property",
            "setter",
            "overload",
        ):
            return "property"
    return "function"


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


ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "build_scripts"
PYTHON = sorted(
    path for path in SCRIPTS.rglob("*.py") if "templates" not in path.relative_to(SCRIPTS).parts
)
SHARED_BY_INTERFACE = {
    "Decoder",  # of a task: found by its name in the module that is copied into a repository
    "Engine",  # of generated text: found by its name in the module that is copied into a repository
    "RowMaker",
    "TritonPythonModel",  # demanded by Triton's Python backend
}
"""Class names that several modules define because a caller finds the class by this name."""

FORMER_NAMES = re.compile(r"NeighbourFailed|aria-labelledby|`?\"?\w+_neighbour\w*|neighbour_\w+")
"""Former names that are still accepted, and a name of HTML."""
BRITISH = re.compile(
    r"(?:label|model|travel|signal)l(?:ed|ing)|neighbour|colour|favour|honour|behaviour|licence|catalogue"
    r"|(?:quant|normal|summar|recogn|maxim|minim|util|initial|serial|optim|organ|general|token|real|synchron)is(?:e|ed|es|ing|er|ers|ation)\b",
    re.IGNORECASE,
)


def test_every_docstring_stands_alone() -> None:
    mistakes = [
        f"{path.relative_to(ROOT)}:{documented.line}: {documented.name} {mistake}: "
        + documented.text.splitlines()[0]
        for path in PYTHON
        for documented in read_documented(path)
        if (mistake := find_mistake(documented))
    ]
    assert not mistakes, f"{len(mistakes)} texts:\n" + "\n".join(mistakes)


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for path in (SCRIPTS / "triptych").rglob("*.py"):
        if "templates" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(SCRIPTS)))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert not repeated.keys() - SHARED_BY_INTERFACE, repeated


def test_the_spelling_is_american() -> None:
    files = [
        *PYTHON,
        *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
        *ROOT.glob("pipelines/**/*.md"),
        *ROOT.glob("docker/*.md"),
    ]
    mistakes = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in BRITISH.findall(FORMER_NAMES.sub("", line))
    ]
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.parametrize(
    ("kind", "text", "mistake"),
    [
        ("function", "Of a replica.", "continues the name"),
        ("constant", "Between two looks.", "phrase without a subject"),
        ("class", "Those that wait.", "pronoun"),
        ("constant", "Most tokens of an answer.", "quantity"),
        ("entry", "what the plan derives.", "relative word"),
        ("entry", "asked of the server.", "continues the name"),
        ("function", "A line.", "fewer than three"),
        ("function", "The rows of a request.", "verb"),
        ("function", "Return the rows of a request.", ""),
        ("function", "Before a request is sent, the client measures it.", ""),
        ("property", "The rows of a request.", ""),
        ("constant", "How many tokens an answer has.", ""),
        ("entry", "Its first row.", ""),
        ("class", "`Plan` with names.", ""),
    ],
)
def test_a_rule_sees_what_it_is_for(kind: str, text: str, mistake: str) -> None:
    found = find_mistake(Documented(kind, "name", 1, text))
    assert mistake in found if mistake else not found


def test_every_kind_of_text_is_read(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        '"""Of the module."""\n'
        "LIMIT = 3\n"
        '"""Of the constant."""\n'
        "class Rows:\n"
        '    """Of the class.\n\n    Attributes:\n        count: of the entry.\n'
        '            Continued.\n    """\n\n'
        "    count: int  # of the field\n\n"
        "    @property\n"
        "    def first(self) -> int:\n"
        '        """Of the property."""\n\n'
        "    def read(self) -> int:\n"
        '        """Of the method."""\n',
        encoding="utf-8",
    )
    found = {documented.text.split()[2].strip(".") for documented in read_documented(source)}
    assert found == {"module", "constant", "class", "entry", "field", "property", "method"}
    assert all(map(find_mistake, read_documented(source)))
