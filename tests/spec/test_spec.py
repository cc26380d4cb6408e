"""Specifications and what tuning sets: mistakes end in field, rule, given, remedy."""

import math
from pathlib import Path

import pytest

from tests.support import generation_cases
from tests.support.mistakes import check_refused
from tests.support.project import write_pipeline
from triptych.base.cache import sha256_of
from triptych.spec.generation_fields import load_generation_spec
from triptych.spec.slo import GenerationSlo, Slo, parse_generation_slo, parse_slo
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths, read_traffic
from triptych.spec.tuned import (
    TUNABLE,
    TUNED_FILE,
    Tuned,
    describe_tuned,
    read_tuned,
    write_tuned,
)
from triptych.tasks.catalog import find_task

MISTAKES: list[tuple[str, list[str]]] = [
    ("core.layoot=packed", ["`--set core.layoot`", "not a field", "mean `layout`?"]),
    ("layout=packed", ["`--set layout`", "Did you mean `core.layout`?", "task, model"]),
    ("nonsense=1", ["Given: nonsense. Fields here"]),
    ("core.layout=ragged", ["core.layout", "'packed', 'bucketed' or 'auto'", "ragged"]),
    ("core.precision=int9", ["--set core.precision", "or 'auto'. Given: int9", "mean `int8`?"]),
    ("parameters={top_k: {a: 1}}", ["parameters.top_k` must be true or false or"]),
    ("core.max_batch_size=0", ["core.max_batch_size", "at least 1", "0"]),
    ("core.max_batch_size=2000", ["must be at most 1024. Given: 2000"]),
    ("core.max_batch_size=yes", ["core.max_batch_size` must be a whole number. Given: true"]),
    ("core.threads=''", ['must be a whole number. Given: "".']),
    ("core.layout=null", ["or 'auto'. Given: null"]),
    ("serving.priority=5", ["serving.priority` must be a mapping with the fields levels, default"]),
    ("serving.machine=5", ["serving.machine` must be a text or a mapping. Given: 5"]),
    ("outputs=[5]", ["outputs.0` must be a mapping. Given: 5. Write `FIELD: ...` below"]),
    ("core=5", ["core` must be a mapping with the fields backend, device,", "Given: 5"]),
    ("model=org/name", ["model` must be a mapping", "Write `source: ...` below `model:`"]),
    ("core.layout=a & core.layout.x.y=5", ["core.layout.x.y`", "itself: --set core.layout=V"]),
    ("serving.triton=24.13", ["serving.triton", "24.13", "in quotes", "as a number"]),
    ("serving.triton='24.09'", ["serving", "must be 24.10 or later"]),
    ("serving.gpus=[]", ["serving.gpus"]),
    ("serving.gpus=every", ["serving.gpus", "every"]),
    ("core.device=gpu & core.session.inter_threads=2", ["core.session is only supported"]),
    ("core.session.memory_arena=off", ["memory_arena", "'shrink', 'keep' or 'none'"]),
    ("serving.priority={levels: 2, default: 3}", ["default must be at most levels (2)"]),
    ("core.shared_from=other & serving.priority={levels: 2}", ["Set it in other"]),
    ("model.source=5", ["model.source", "a text. Given: 5", "quotes"]),
    ("name=x", ["name", "folder"]),
    ("core.layout", ["--set", "KEY=VALUE", "core.layout"]),
    ("core.layout=[", ["--set core.layout", "YAML"]),
    ("core.backend=tensorrt & core.device=cpu", ["core.device must be gpu"]),
    ("core.device=gpu & core.accelerator_options.workspace_mib=9", ["core.accelerator: tensorrt"]),
    ("core.accelerator_options.arena=as_requested", ["core.accelerator_options is only"]),
    ("core.backend=openvino & core.device=gpu", ["core.device must be cpu"]),
    ("core.backend=openvino & core.layout=packed", ["core.layout must be bucketed"]),
    ("core.backend=openvino & core.session.inter_threads=2", ["core.session is only supported"]),
    ("core.engine.refit=true", ["core.engine is only supported for the tensorrt"]),
    ("core.accelerator=tensorrt", ["onnxruntime backend on a gpu"]),
    ("core.device=gpu & core.threads=2", ["only supported for device cpu"]),
    ("tuned={core.threads: 2}", ["it is taken from the folder"]),
]
"""Overrides of the spec, separated by ``&``, and words of the error."""
FILES: list[tuple[str, list[str]]] = [
    ("task: text-embedding", ["model", "required"]),
    ("- a\n- b", ["mapping", "list"]),
    ("task: [", ["YAML", "(line 1, column "]),
    ("", ["mapping", "an empty file"]),
    (
        "task: text-embedding\nmodel: {sauce: a}\ncore: {threads: x}",
        [
            "model.sauce",
            "Did you mean `source`?",
            "Other problems of this file: `core.threads` must be a whole number",
            "`model.source` is required",
        ],
    ),
    ("task: text-embedding\ntask: x", ["'task' is given twice", "line 2"]),
    ("task: text-embedding\nmodel: {source: a, sauce: b}", ["model.sauce", "source, revision"]),
    ("".join(f"key{i}: 1\n" for i in range(30_000)), ["at most 256 KiB", "Given: 340 KiB"]),
]
TRAFFIC: list[tuple[bytes, list[str]]] = [
    (b"", ["has no rows"]),
    (b'{"text": "a"}\nnope\n', [":2", "JSON object"]),
    (b'{"text": 5}', [":1", "string"]),
    (b'{"txt": "a"}', [":1", '"text"']),
    (b'["a"]', [":1"]),
    (b'{"text": "\xff"}', [":1"]),
    (b'{"text": "\\ud800"}', [":1"]),
]


def test_each_mistake_is_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a")
    for overrides, words in MISTAKES:
        check_refused(words, load_spec, folder, overrides.split(" & "))
    for text, words in FILES:
        (folder / "pipeline.yaml").write_text(text, encoding="utf-8")
        check_refused(words, load_spec, folder)
    check_refused('{"text": "…"}', read_traffic, tmp_path, ["text"])
    for content, words in TRAFFIC:
        (tmp_path / "traffic.jsonl").write_bytes(content)
        check_refused(words, read_traffic, tmp_path, ["text"])
    check_refused("Pipelines here: a", load_spec, tmp_path / "nope")
    for name in ("Upper", "1st", "with space", "ä", "a" * 65):
        check_refused("lower-case", load_spec, write_pipeline(tmp_path / name))
    check_refused("Choose one of: fill-mask", find_task, "text-embeding")


def test_traffic_may_hold_other_line_separators(tmp_path: Path) -> None:
    (tmp_path / "traffic.jsonl").write_text('{"text": "a\u2028b\x85c"}\n\n{"text": ""}\n')
    rows = [row.inputs for row in read_traffic(tmp_path, ["text"])]
    assert rows == [{"text": "a\u2028b\x85c"}, {"text": ""}]


def test_lengths_count_truncated_rows_and_quantiles() -> None:
    lengths = Lengths.of([2, 4, 4, 9, 30], max_length=10)
    assert lengths.counts == {2: 1, 4: 2, 9: 1, 10: 1}
    assert lengths.truncated_share == 0.2
    assert lengths.mean == 29 / 5
    assert [lengths.quantile(q) for q in (0.0, 0.2, 0.5, 0.61, 1.0)] == [2, 2, 4, 9, 10]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pipeline(tmp_path / "texts", core={"max_batch_size": 16})


def test_what_is_written_is_read_and_wins_over_the_spec(folder: Path) -> None:
    assert read_tuned(folder) is None
    assert load_spec(folder).tuned == {}
    overrides = {"core.max_batch_size": 64, "core.threads": None, "core.layout": "bucketed"}
    assert overrides.keys() <= set(TUNABLE)
    tuned = Tuned(overrides, {"slo": "p99 <= 5 ms"})
    path = write_tuned(folder, tuned)
    assert "Delete this file" in path.read_text(encoding="utf-8")
    assert read_tuned(folder) == tuned
    spec = load_spec(folder)
    assert (spec.core.max_batch_size, spec.core.layout) == (64, "bucketed")
    assert spec.tuned == overrides
    assert load_spec(folder, ["core.max_batch_size=8"]).core.max_batch_size == 8
    other = load_spec(folder, untuned=True)
    assert (other.core.max_batch_size, other.core.layout) == (16, "packed")
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_a_pipeline_that_generates_text_is_tuned_alike(tmp_path: Path) -> None:
    folder = generation_cases.write_pipeline(tmp_path / "talk", tmp_path / "model")
    overrides = {"core.max_num_seqs": 4, "core.enable_prefix_caching": False}
    tuned = Tuned(overrides, {"spec_sha256": sha256_of(folder / "pipeline.yaml")})
    write_tuned(folder, tuned)
    spec = load_generation_spec(folder, ["core.max_num_seqs=8"])
    assert (spec.core.max_num_seqs, spec.core.enable_prefix_caching) == (8, False)
    assert spec.tuned == overrides
    assert load_generation_spec(folder, untuned=True).tuned == {}
    said = describe_tuned(folder, tuned)
    assert said == "core.max_num_seqs=4, core.enable_prefix_caching=False (tuned.yaml)"
    (folder / "pipeline.yaml").write_text("task: text-generation")
    said = describe_tuned(folder, tuned)
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
    for text in ("p99", "50ms", "p98=5ms", "p99=5", "p99=0ms", "p99=-1ms", "p99=2h", "p99=3601s"):
        check_refused("must have the form", parse_slo, [text], None, Slo())
        of_generation = [f"ttft_{text}"]
        check_refused(
            "must have the form", parse_generation_slo, of_generation, None, GenerationSlo()
        )
    check_refused("must be greater than 0", parse_slo, [], math.nan, Slo())


def test_an_slo_is_read_from_the_command_line_else_from_the_spec() -> None:
    own = Slo(p95_ms=20.0)
    assert parse_slo([], None, own) is own
    assert parse_slo(["p99=50ms", "p50 < 2.5 ms"], 100.0, own) == Slo(
        p99_ms=50.0, p50_ms=2.5, throughput=100.0
    )
    assert parse_slo(["p99.9=1s"], None, own).limits_us == {"p99_9": 1e6}
    assert str(parse_slo(["p99=500us"], 3, own)) == "p99 <= 0.5 ms, at least 3/s"
