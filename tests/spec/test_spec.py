"""Bad specs end in field, rule, given, remedy; good ones have every default."""

from pathlib import Path
from typing import Any

import pytest

from conftest import write_pipeline
from mistakes import check_refused
from triptych.base.errors import RenamedWarning
from triptych.base.files import parse_yaml
from triptych.runtime.request_errors import RequestError
from triptych.runtime.triton_io import check_parameters
from triptych.spec import spec as spec_module
from triptych.spec.any_spec import load_any_spec
from triptych.spec.spec import PipelineSpec, load_spec
from triptych.spec.tasks import find_task
from triptych.spec.traffic import Lengths, read_traffic


def test_two_fields_suffice_and_overrides_reach_nested_ones(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a")
    spec = load_spec(folder)
    assert (spec.name, spec.core.layout, spec.core.max_batch_size) == ("a", "packed", 32)
    overrides = ["core.layout=bucketed", "serving.queue.max_in_flight=7"]
    spec = load_spec(folder, [*overrides, "accuracy.max_difference=1e-5"])
    assert (spec.core.layout, spec.serving.queue.max_in_flight) == ("bucketed", 7)
    assert spec.accuracy.max_difference == 1e-5


def test_former_names_are_read_with_a_warning(tmp_path: Path) -> None:
    former: dict[str, Any] = {
        "serving": {"queue": {"max_size": 7}},
        "accuracy": {"neighbour_effect": 0.5},
        "parameters": {"labels": ["a"]},
    }
    folder = write_pipeline(tmp_path / "a", **former)
    with pytest.warns(RenamedWarning) as caught:
        spec = load_spec(folder, ["serving.max_inflight=3", "core={share: b}"])
    assert [str(one.message).split(". ")[0] for one in caught] == [
        f"`{folder}/pipeline.yaml: serving.queue.max_size` is now called "
        "`serving.queue.max_in_flight`",
        f"`{folder}/pipeline.yaml: accuracy.neighbour_effect` is now called "
        "`accuracy.batch_sensitivity`",
        f"`{folder}/pipeline.yaml: parameters.labels` is now called `parameters.candidate_labels`",
        "`--set serving.max_inflight` is now called `serving.max_inflight_requests`",
        "`--set core.share` is now called `core.shared_from`",
    ]
    assert spec.serving.queue.max_in_flight == 7
    assert (spec.serving.max_inflight_requests, spec.core.shared_from) == (3, "b")
    assert spec.accuracy.batch_sensitivity == 0.5
    assert spec.parameters == {"candidate_labels": ["a"]}
    stored = spec.model_dump(mode="json", exclude={"folder"})
    stored["serving"]["queue"]["max_size"] = stored["serving"]["queue"].pop("max_in_flight")
    assert PipelineSpec.model_validate(stored) == spec.model_copy(update={"folder": Path()})

    former["serving"]["queue"]["max_in_flight"] = 8
    folder = write_pipeline(tmp_path / "b", **former)
    check_refused("is the former name of", load_spec, folder)


def test_former_names_of_request_parameters_are_accepted() -> None:
    rules = {"candidate_labels": {"type": "list"}}
    with pytest.warns(FutureWarning, match="`labels` is now called `candidate_labels`"):
        assert check_parameters('{"labels": "a, b"}', rules, {}) == {"candidate_labels": ["a", "b"]}
    with pytest.raises(RequestError, match="`parameter labels` is not known"):
        check_parameters('{"labels": "a"}', {}, {})


MISTAKES: list[tuple[str, list[str]]] = [
    ("core.layoot=packed", ["`--set core.layoot`", "not a field", "mean `layout`?"]),
    ("layout=packed", ["`--set layout`", "Did you mean `core.layout`?", "task, model"]),
    ("core.max_delay_us=3", ["Did you mean `serving.queue.max_delay_us`?"]),
    ("servng.gpus=[0]", ["Did you mean `serving`?"]),
    ("nonsense=1", ["Given: nonsense. Fields here"]),
    ("core.layout=ragged", ["core.layout", "'packed', 'bucketed' or 'auto'", "ragged"]),
    ("core.precision=int9", ["--set core.precision", "or 'auto'. Given: int9", "mean `int8`?"]),
    ("parameters={top_k: {a: 1}}", ["parameters.top_k` must be true or false or"]),
    ("core.max_batch_size=0", ["core.max_batch_size", "greater than or equal to 1", "0"]),
    ("core.max_batch_size=yes", ["core.max_batch_size` must be a whole number. Given: True"]),
    ("core=5", ["core` must be a mapping with the fields backend, device,", "Given: 5"]),
    ("model=org/name", ["model` must be a mapping", "Write `source: ...` below `model:`"]),
    ("core.layout=a & core.layout.x=5", ["--set core.layout.x"]),
    ("tokenizer.truncation=cut", ["truncation", "truncate", "cut"]),
    ("serving.triton=24.13", ["serving.triton", "24.13", "in quotes", "as a number"]),
    ("serving.triton='24.09'", ["serving", "must be 24.10 or later"]),
    ("serving.gpus=[]", ["serving.gpus"]),
    ("serving.gpus=every", ["serving.gpus", "every"]),
    ("core.device=gpu & core.session.inter_threads=2", ["core.session is only supported"]),
    ("core.session.memory_arena=off", ["memory_arena", "'shrink', 'keep' or 'none'"]),
    ("serving.priority={levels: 1}", ["serving.priority.levels", "greater than or equal to 2"]),
    ("serving.priority={levels: 2, default: 3}", ["default must be at most levels (2)"]),
    ("core.shared_from=other & serving.priority={levels: 2}", ["Set it in other"]),
    ("model.source=5", ["model.source", "a text. Given: 5", "quotes"]),
    ("name=x", ["name", "folder"]),
    ("core.layout", ["--set", "KEY=VALUE", "core.layout"]),
    ("=5", ["--set", "KEY=VALUE"]),
    ("core.layout=[", ["--set core.layout", "YAML"]),
    ("core.backend=tensorrt & core.device=cpu", ["core.device must be gpu"]),
    ("core.device=gpu & core.accelerator_options.workspace_mib=9", ["core.accelerator: tensorrt"]),
    ("core.accelerator_options.arena=as_requested", ["core.accelerator_options is only"]),
    ("core.backend=openvino & core.device=gpu", ["core.device must be cpu"]),
    ("core.backend=openvino & core.layout=packed", ["core.layout must be bucketed"]),
    ("core.backend=openvino & core.session.inter_threads=2", ["core.session is only supported"]),
    ("core.engine.refit=true", ["core.engine is only supported for the tensorrt"]),
    ("core.accelerator=tensorrt", ["onnxruntime backend on a gpu"]),
    ("core.backend=tensorrt & core.accelerator=tensorrt", ["onnxruntime backend on a gpu"]),
    ("core.device=gpu & core.threads=2", ["only supported for device cpu"]),
    ("core.backend=tensorrt & core.engine.optimization_level=6", ["optimization_level"]),
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
    (b"\n\n", ["has no rows"]),
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
    check_refused("Choose one of: text-embedding", find_task, "text-embeding")


def test_a_spec_is_parsed_once_for_all_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def parse(text: str) -> Any:
        parsed.append(text)
        return parse_yaml(text)

    monkeypatch.setattr(spec_module, "parse_yaml", parse)
    spec_module._parse.cache_clear()
    folder = write_pipeline(tmp_path / "a", core={"threads": 3})
    assert load_any_spec(folder) == load_any_spec(folder)
    assert len(parsed) == 1


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
