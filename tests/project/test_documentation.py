"""The site, its generated tables, the picture of the front page, and files for contributors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import yaml
from pydantic import create_model

from documentation import pictures, recording, site_pages, tables
from tests.support.family_table import LIMIT, OUTCOMES, PAGE, read_record, render_page, turn
from tests.support.project import ROOT


def test_the_front_page_is_short_and_shows_a_run_of_the_demo() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 150
    assert str(recording.PICTURE.relative_to(ROOT)) in page
    picture = recording.PICTURE.read_text(encoding="utf-8")
    text = " ".join("".join(ElementTree.fromstring(picture).itertext()).split())
    for said in ("$ make demo", "gate", "refund please", "minilm_core", "server stopped"):
        assert said in text, said
    assert "(cached)" not in text
    assert "building minilm" not in text


def test_the_pictures_of_the_front_page_show_its_table() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rates = pictures.read_rates(page)
    assert len(rates) == 3
    for path, drawn in (
        (pictures.OVERVIEW, pictures.draw_overview()),
        (pictures.CHART, pictures.draw_chart(rates)),
    ):
        assert str(path.relative_to(ROOT)) in page
        assert path.read_text(encoding="utf-8") == drawn, "run pictures.py"
        text = "".join(ElementTree.fromstring(drawn).itertext())
        assert "://" not in text
    assert all(f"{rate.low:.0f}" in text for rate in rates)


def test_reference_tables_are_those_of_the_code() -> None:
    other = create_model("Custom", __doc__="A class of another library with the name of ours.")
    for page in {page for page, _ in tables.TABLES.values()}:
        text = (ROOT / page).read_text(encoding="utf-8")
        filled = tables.fill_page(page, text)
        if page in tables.SITE_ONLY:
            assert len(filled) > 2 * len(text)
            assert "|" not in text.split("<!-- begin: ")[1]
        else:
            assert filled == text, f"{page}: run `make tables` (not {other})"


def test_the_page_of_model_families_shows_the_results_on_record() -> None:
    results = read_record()
    assert PAGE.read_text(encoding="utf-8") == render_page(results)
    for result in results:
        assert result.outcome in OUTCOMES
        assert bool(result.message) == (result.outcome in ("refused", "not built")), result
        if result.outcome in ("served", "differs"):
            assert result.difference is not None
            assert (result.difference <= LIMIT) == (result.outcome == "served"), result
    # Each commit measures others.
    assert len(set(turn(600, 20))) == 20
    assert all(0 <= index < 7 for index in turn(7, 3))


def test_the_site_builds_with_every_page_and_loads_nothing(tmp_path: Path) -> None:
    """Strict: a link to a page or heading that is not there is an error."""
    config = ROOT / "build_scripts/documentation/mkdocs.yml"
    words: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    words += ["-f", config, "-d", tmp_path]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    assert set(settings["validation"]["links"].values()) == {"warn"}
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    others = {"model_repository/README.md", "tests/data/crds/README.md"}
    assert {*site_pages.list_pages(settings["nav"])} == {*tracked.stdout.split()} - others
    index = json.loads((tmp_path / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"]: entry.get("tags") for entry in index["docs"]}
    for path, searched in site_pages.SEARCHED.items():
        assert found[path.replace(".md", ".html")] == [*searched]
    assert {
        "build_scripts/documentation/guides/commands.html#triptych-build",
        "docker/runbook.html#saturated",
    } <= {*found}
    page = (tmp_path / "build_scripts/documentation/guides/fields.html").read_text(encoding="utf-8")
    assert "core.max_batch_size" in page
    assert re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"(?:https?:)?//", page) == []


def test_a_link_to_source_code_is_text_and_any_other_stays() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="docker/a.md"))
    config = SimpleNamespace(nav=[{"A": "docker/a.md"}, {"B": "SECURITY.md"}])
    for text, shown in (
        ("[code](../Makefile)", "code (`Makefile`)"),
        *((link, link) for link in ("[b](../SECURITY.md#x)", "[c](none.md)", "[d](#e)")),
    ):
        assert site_pages.on_page_markdown(text, page=page, config=config) == shown


def test_a_picture_has_the_output_and_loads_nothing() -> None:
    picture = recording.draw("$ make demo\n\x1b[1mminilm\x1b[0m <ready>\n", "2026-11-26, 3 s")
    root = ElementTree.fromstring(picture)
    text = "".join(root.itertext())
    assert "\x1b" not in text
    for part in ("minilm", "<ready>", "2026-11-26"):
        assert part in text
    assert "url(" not in re.sub(r"url\(#", "", picture)
    bold = re.findall(r"\.(demo-r\d+) \{[^}]*font-weight: bold", picture)
    assert [part.text for part in root.iter() if part.get("class") in bold] == ["minilm"]


def test_a_picture_has_what_stays_on_a_terminal() -> None:
    spinner = "\x1b[?25l\r\x1b[2K\x1b[1mbuilding 0:00:01\x1b[0m\n"
    shown = f"one\r\n{spinner}{spinner[:6]}\x1b[1A\x1b[2Ktwo\r\n"
    assert recording.fold(shown) == "one\ntwo\n"


def test_users_install_no_tools_of_developers() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"\$\(FOR_USERS\):.*?--editable \"\.\[(.*?)\]\"", recipe, re.DOTALL)
    assert set(extras.split(",")) == {"gateway", "page", "demo"}
    for target in ("demo", "serve"):
        assert f"\n{target}: install " in recipe


def test_no_file_names_a_registry() -> None:
    words = ["git", "grep", "-nE", r"https?://[^ ]*/simple/?\b|--(extra-)?index-ur[l]"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1, found.stdout + found.stderr
