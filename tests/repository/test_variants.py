"""Plans for other machines in a repository: their files, settings, and lint."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.plan_cases import facts
from tests.support.project import write_pipeline
from triptych.base.errors import UserError
from triptych.container.serving_machine import variants_in
from triptych.deploy.numbers import count_extra_instances
from triptych.repository.config import parse_config
from triptych.repository.lint.checks import run_checks
from triptych.repository.render import Content, CoreFiles, StepFiles, render
from triptych.runtime.triton_io import read_settings
from triptych.spec.plan import make_plan
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths
from triptych.tasks.catalog import text_embedding

LENGTHS = Lengths.of([12, 20, 30, 52], max_length=256)
GPU = ("core.device=gpu", "core.precision=fp16")


def files_of(folder: Path, *overrides: str) -> dict[str, Content]:
    """Return the rendered files of a pipeline ``a``."""
    place = folder / str(len(list(folder.iterdir()))) / "a"
    spec = load_spec(write_pipeline(place), overrides)
    plan = make_plan(spec, facts(), text_embedding.TASK, {}, LENGTHS)
    graph = folder / "model.onnx"
    return render(plan, [CoreFiles(plan, graph, folder)], StepFiles(), question={"text": "a"})


def text(content: Content) -> str:
    assert isinstance(content, bytes)
    return content.decode()


def configs(files: dict[str, Content]) -> dict[str, str]:
    return {path: text(content) for path, content in files.items() if path.endswith(".pbtxt")}


def test_the_configs_of_the_build_do_not_depend_on_variants(tmp_path: Path) -> None:
    none, usual = files_of(tmp_path, "serving.variants=[]"), files_of(tmp_path)
    assert not variants_in(none)
    assert variants_in(usual) == {"cpu1", "cpu2", "cpu4", "cpu8", "cpu16", "cpu32"}
    assert {path: usual[path] for path in none} == none


def test_a_variant_has_only_the_files_that_differ(tmp_path: Path) -> None:
    files = configs(files_of(tmp_path))
    assert "a_core/configs/cpu8.pbtxt" in files
    assert "a_preprocess/configs/cpu8.pbtxt" not in files  # one process is enough
    assert not [path for path in files if path.startswith("a/configs/")]
    config = parse_config(files["a_core/configs/cpu32.pbtxt"])
    assert config.instance_group[0].count == 4
    assert config.parameters["intra_op_thread_count"].string_value == "8"
    assert "On cpu32: one for each 8 cores" in files["a_core/configs/cpu32.pbtxt"]


def test_settings_that_depend_on_the_core_are_in_the_config(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    config = parse_config(text(files["a_preprocess/configs/cpu32.pbtxt"]))
    changed = config.parameters["settings"].string_value
    assert json.loads(changed) == {"core_instances": 4, "core_rows": 128}
    (tmp_path / "settings.json").write_text(text(files["a_preprocess/1/settings.json"]))
    as_json = json.dumps({"parameters": {"settings": {"string_value": changed}}})
    here, there = read_settings(tmp_path), read_settings(tmp_path, as_json)
    assert there == {**here, "core_instances": 4, "core_rows": 128}
    assert here["max_core_rows"] == there["max_core_rows"] == 32


def test_a_start_lowers_the_batch_but_not_below_a_request(tmp_path: Path) -> None:
    files = configs(files_of(tmp_path, *GPU, "serving.machine=h200x16", "serving.variants=[l4x4]"))
    built = parse_config(files["a_core/config.pbtxt"])
    lower = parse_config(files["a_core/configs/l4x4.pbtxt"])
    assert 32 <= lower.max_batch_size < built.max_batch_size
    assert max(one.batch_size for one in lower.model_warmup) == lower.max_batch_size
    assert parse_config(files["a/config.pbtxt"]).max_batch_size == 32


def test_equal_plans_are_written_once_and_a_smaller_one_hides_none(tmp_path: Path) -> None:
    fixed = [f"serving.instances.{step}=1" for step in ("preprocess", "core", "postprocess")]
    files = files_of(tmp_path, *fixed, "core.threads=2")
    assert not variants_in(files)
    machines = "serving.variants=[l4x4, h100x16]"
    files = files_of(tmp_path, *GPU, "serving.machine=h200x16", machines)
    # Without a file of h100x16, which equals the build's, a server there would use that of l4x4.
    assert variants_in(files) == {"l4x4", "h100x16"}


def test_the_texts_of_the_user_win(tmp_path: Path) -> None:
    own = (
        'parameters { key: "intra_op_thread_count" value { string_value: "3" } } '
        "instance_group { count: 2 kind: KIND_CPU }"
    )
    files = configs(files_of(tmp_path, f"serving.config.core='{own}'"))
    for path, config in files.items():
        if path.startswith("a_core/"):
            parsed = parse_config(config)
            assert parsed.parameters["intra_op_thread_count"].string_value == "3"
            assert parsed.instance_group[0].count == 2


def test_a_release_with_configs_of_its_own_has_them_for_each_machine(tmp_path: Path) -> None:
    newer = ("serving.triton='25.01'", "serving.slo.p99_ms=50", "serving.variants=[cpu16]")
    files = configs(files_of(tmp_path, *newer))
    assert files["a/configs/cpu16-24.10.pbtxt"] == files["a/configs/24.10.pbtxt"]
    for model in ("a_core", "a_preprocess"):
        assert files[f"{model}/configs/cpu16-24.10.pbtxt"] == files[f"{model}/configs/cpu16.pbtxt"]


def test_machines_that_cannot_run_the_core_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the name of a machine"):
        files_of(tmp_path, "serving.variants=[h900x2]")
    with pytest.raises(UserError, match="the GPU and the memory that the core needs"):
        files_of(tmp_path, *GPU, "serving.variants=[cpu8]")


def test_lint_checks_what_each_machine_sees(tmp_path: Path) -> None:
    files = {**files_of(tmp_path), "a_core/1/model.onnx": b"none"}
    repository = tmp_path / "repository"
    for path, content in files.items():
        if isinstance(content, bytes):
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_bytes(content)
    before = run_checks(repository)
    variant = repository / "a_core/configs/cpu8.pbtxt"
    variant.write_text(variant.read_text().replace("max_batch_size: 32", "max_batch_size: 8"))
    after = [finding for finding in run_checks(repository) if finding not in before]
    assert [(each.id, each.given.endswith("; on cpu8")) for each in after] == [
        ("ensemble-batch", True)
    ]
    preprocess = repository / "a_preprocess/configs/cpu32.pbtxt"
    preprocess.write_text(preprocess.read_text().replace('{\\"core', '[\\"core'))
    found = run_checks(repository)
    assert any(each.file == "a_preprocess/configs/cpu32.pbtxt" for each in found)


def test_a_deployment_counts_the_processes_of_the_plans_that_its_cores_allow(
    tmp_path: Path,
) -> None:
    files = configs(files_of(tmp_path))
    for path, config in files.items():
        (tmp_path / "r" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / path).write_text(config)
    build: Any = SimpleNamespace(files=files)
    assert count_extra_instances(build, tmp_path / "r", 8) == (0, 0)
    assert count_extra_instances(build, tmp_path / "r", 16) == (0, 1)
    assert count_extra_instances(build, tmp_path / "r", 64) == (1, 3)
