"""`tuned.yaml` is read after the spec, wins over it, and says no to what it may not set."""

from pathlib import Path

import pytest

import generation_cases
from conftest import write_pipeline
from mistakes import check_refused
from triptych.base.cache import sha256_of
from triptych.base.errors import RenamedWarning
from triptych.core.inputs import read_inputs
from triptych.interface.cli.plan_text import describe_plan
from triptych.spec.generation_fields import load_generation_spec
from triptych.spec.slo import Slo, parse_slo
from triptych.spec.spec import load_spec
from triptych.spec.tuned import (
    TUNABLE,
    TUNED_FILE,
    Tuned,
    describe_tuned,
    read_tuned,
    tuned_text,
    write_tuned,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pipeline(tmp_path / "texts", core={"max_batch_size": 16})


def test_what_is_written_is_read_and_wins_over_the_spec(folder: Path) -> None:
    assert read_tuned(folder) is None
    assert load_spec(folder).tuned == {}
    overrides = {"core.max_batch_size": 64, "core.threads": None, "core.layout": "bucketed"}
    assert overrides.keys() <= set(TUNABLE)
    tuned = Tuned(overrides, {"slo": "p99 <= 5 ms"})
    before = load_spec(folder, tuned=overrides)  # proposed, as if it stood in the file
    path = write_tuned(folder, tuned, spec_file="pipeline.yaml")
    assert "Delete this file" in path.read_text(encoding="utf-8")
    assert read_tuned(folder) == tuned
    spec = load_spec(folder)
    assert (spec.core.max_batch_size, spec.core.layout) == (64, "bucketed")
    assert spec.tuned == overrides
    assert spec == before
    assert load_spec(folder, ["core.max_batch_size=8"]).core.max_batch_size == 8
    for other in (load_spec(folder, untuned=True), load_spec(folder, tuned={})):
        assert (other.core.max_batch_size, other.core.layout) == (16, "packed")
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    text = tuned_text(folder.name, tuned, spec_file="pipeline.yaml", measured=False)
    assert "not measured" in text
    (folder / TUNED_FILE).write_text(text, encoding="utf-8")
    assert (read_tuned(folder), load_spec(folder)) == (tuned, before)


def test_a_pipeline_that_generates_text_is_tuned_alike(tmp_path: Path) -> None:
    folder = generation_cases.write_pipeline(tmp_path / "talk", tmp_path / "model")
    overrides = {"core.max_num_seqs": 4, "core.enable_prefix_caching": False}
    tuned = Tuned(overrides, {"spec_sha256": sha256_of(folder / "pipeline.yaml")})
    write_tuned(folder, tuned, spec_file="pipeline.yaml")
    spec = load_generation_spec(folder, ["core.max_num_seqs=8"])
    assert (spec.core.max_num_seqs, spec.core.enable_prefix_caching) == (8, False)
    assert spec.tuned == overrides
    assert load_generation_spec(folder, untuned=True).tuned == {}
    said = describe_tuned(folder, tuned, spec_file="pipeline.yaml")
    assert said == "core.max_num_seqs=4, core.enable_prefix_caching=False (tuned.yaml)"
    old = "{core.max_sequences: 4, core.prefix_caching: false, core.kv_cache.precision: fp8}"
    (folder / TUNED_FILE).write_text(f"set: {old}")
    with pytest.warns(RenamedWarning) as caught:
        spec = load_generation_spec(folder)
    assert len(caught) == 3
    assert spec.tuned == {**overrides, "core.kv_cache.dtype": "fp8"}
    (folder / "pipeline.yaml").write_text("task: text-generation")
    said = describe_tuned(folder, tuned, spec_file="pipeline.yaml")
    assert "has changed since: run `triptych tune talk` again" in said
    (folder / TUNED_FILE).write_text("set: {core.max_batch_size: 8}")
    check_refused(
        ["is not a field that tuning may set", "max_num_seqs"], load_generation_spec, folder
    )


def test_a_file_or_an_slo_of_another_form_is_refused(folder: Path) -> None:
    for text, words in (
        ("set: [", "is not valid YAML"),
        ("[]", "must have a mapping `set`"),
        ("set: 3", "must have a mapping `set`"),
        ("set: {task: reranking}", "is not a field that tuning may set"),
        (
            "set: {core.max_batch_size: many}",
            "tuned.yaml: core.max_batch_size` must be a whole number",
        ),
    ):
        (folder / TUNED_FILE).write_text(text, encoding="utf-8")
        check_refused(words, load_spec, folder)
    for text in ("p99", "50ms", "p98=5ms", "p99=5", "p99=0ms", "p99=-1ms"):
        check_refused("must have the form", parse_slo, [text], None, Slo())


def test_an_slo_is_read_from_the_command_line_else_from_the_spec() -> None:
    own = Slo(p95_ms=20.0)
    assert parse_slo([], None, own) is own
    assert parse_slo(["p99=50ms", "p50 < 2.5 ms"], 100.0, own) == Slo(
        p99_ms=50.0, p50_ms=2.5, throughput=100.0
    )
    assert parse_slo(["p99.9=1s"], None, own).limits_us == {"p99_9": 1e6}
    assert str(parse_slo(["p99=500us"], 3, own)) == "p99 <= 0.5 ms, at least 3/s"


def test_a_build_says_what_was_tuned_and_whether_it_still_fits(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = write_pipeline(tmp_path / "texts", model={"source": str(tiny_model)})
    overrides = {"core.max_batch_size": 64}
    provenance = {"spec_sha256": sha256_of(folder / "pipeline.yaml")}
    write_tuned(folder, Tuned(overrides, provenance), spec_file="pipeline.yaml")

    def told() -> list[str]:
        lines: list[str] = []
        plan = read_inputs(
            load_spec(folder), lambda stage, line: lines.append(f"{stage} {line}")
        ).plan
        assert describe_plan(plan)["tuned"] == overrides
        return [line for line in lines if line.startswith("tuned")]

    assert told() == ["tuned core.max_batch_size=64 (tuned.yaml)"]
    path = folder / "pipeline.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "\n# another day\n", encoding="utf-8")
    (line,) = told()
    assert "has changed since: run `triptych tune texts` again" in line
