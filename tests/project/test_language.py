"""Language of the code: documentation that stands alone, unique class names, American spelling."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from documentation.language import Documented, find_mistake, parse, read_documented
from tests.support.project import ROOT

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

HTML_NAME = re.compile("aria-labelledby")
"""Name of HTML in British spelling."""
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
    for path in PYTHON:
        if path.is_relative_to(SCRIPTS / "triptych"):
            for node in ast.walk(parse(path)):
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
    texts = {path: HTML_NAME.sub("", path.read_text(encoding="utf-8")) for path in files}
    mistakes = [
        f"{path.relative_to(ROOT)}:{text[: word.start()].count(chr(10)) + 1}: {word[0]}"
        for path, text in texts.items()
        for word in BRITISH.finditer(text)
    ]
    assert not mistakes, "\n".join(mistakes)


def test_a_rule_sees_what_it_is_for() -> None:
    for kind, text, mistake in (
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
    ):
        found = find_mistake(Documented(kind, "name", 1, text))
        assert (mistake in found) if mistake else not found, text


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
