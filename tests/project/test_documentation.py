"""The picture of the front page, project files, and what must not be in any file."""

import re
import subprocess
from xml.etree import ElementTree

import yaml

from conftest import ROOT
from documentation import recording


def test_the_front_page_is_short_and_shows_a_run_of_the_demo() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 150
    assert str(recording.PICTURE.relative_to(ROOT)) in page
    picture = recording.PICTURE.read_text(encoding="utf-8")
    text = " ".join("".join(ElementTree.fromstring(picture).itertext()).split())
    for said in ("$ make demo", "gate", "refund please", "minilm_core", "server stopped"):
        assert said in text, said


def test_a_picture_has_the_output_and_loads_nothing() -> None:
    picture = recording.draw("$ make demo\n\x1b[1mminilm\x1b[0m <ready>\n", "2026-11-26, 3 s")
    root = ElementTree.fromstring(picture)
    text = "".join(root.itertext())
    assert "minilm" in text
    assert "<ready>" in text
    assert "2026-11-26" in text
    assert "\x1b" not in text
    assert "url(" not in re.sub(r"url\(#", "", picture)
    bold = re.findall(r"\.(demo-r\d+) \{[^}]*font-weight: bold", picture)
    assert [part.text for part in root.iter() if part.get("class") in bold] == ["minilm"]


def test_users_install_no_tools_of_developers() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"\$\(FOR_USERS\):.*?--editable \"\.\[(.*?)\]\"", recipe, re.DOTALL)
    assert {"build", "local"} <= set(extras.split(",")) <= {"build", "local", "gateway", "demo"}
    for target in ("demo", "serve"):
        assert f"\n{target}: install " in recipe


def test_issue_forms_are_complete() -> None:
    forms = list((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 4
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            assert form["name"]
            assert form["description"]
            ids = [field["id"] for field in form["body"]]
            assert len(ids) == len(set(ids)) > 0
            assert all(field["attributes"]["label"] for field in form["body"])


def test_no_file_names_a_machine_or_a_registry() -> None:
    places = r"(^|[^a-z.])/(work|root)/|/home/[a-z]+/|https?://[^ ]*/simple/?\b|--(extra-)?index-u"
    found = subprocess.run(
        ["git", "grep", "-nE", places, "--", ".", ":!tests/project/test_documentation.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1, found.stdout + found.stderr
