"""`triptych lint` of manifests: each check finds its mistake, and nothing in what is fine."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate.utils import schema_contents
from typer.testing import CliRunner

from deploy_cases import (
    ENGINE,
    KUBERNETES,
    kustomized,
    options,
    write_bench,
    write_built,
    write_generation,
)
from triptych.base.errors import Finding, UserError
from triptych.deploy.checks import CHECKS, check_manifests
from triptych.deploy.checks.pods import FIELDS, Known
from triptych.deploy.targets import known_of, make_manifests
from triptych.interface.cli import app

DATA = Path(__file__).parents[1] / "data/lint"
CASES = yaml.safe_load((DATA / "manifests.yaml").read_text())


def fine() -> list[dict[str, Any]]:
    return spoiled({})


def spoiled(mistake: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of manifests.yaml with a mistake."""
    objects: list[dict[str, Any]] = copy.deepcopy(CASES[mistake.get("of", "manifests")])

    def parent_of(path: str) -> tuple[Any, Any]:
        place, *names = path.split(".")
        keys: list[Any] = CASES["places"][place] + names
        parent: Any = objects
        for key in keys[:-1]:
            parent = parent[key]
        return parent, keys[-1]

    for path, value in mistake.get("set", {}).items():
        parent, last = parent_of(path)
        parent[last] = value
    for path, value in mistake.get("append", {}).items():
        parent, last = parent_of(path)
        parent[last].append(value)
    for path in mistake.get("remove", []):
        parent, last = parent_of(path)
        del parent[last]
    objects += mistake.get("add", [])
    return objects


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Of a pipeline with an engine of an H200 that used 701 MiB."""
    folder = tmp_path_factory.mktemp("known")
    repository = write_built(folder, engine=ENGINE, core={"backend": "tensorrt"})
    return known_of(repository, "minilm", write_bench(folder / "reports"))


def found_in(folder: Path, text: str, known: Known | None = None) -> list[Finding]:
    folder.mkdir(exist_ok=True)
    (folder / "all.yaml").write_text(text)
    return check_manifests(folder, known=known)


def test_each_check_finds_its_mistake_and_no_other_one(tmp_path: Path, known: Known) -> None:
    assert found_in(tmp_path, yaml.safe_dump_all(fine()), known) == []
    mistakes = [(check, one) for check, several in CASES["mistakes"].items() for one in several]
    for check, mistake in mistakes:
        said = mistake["says"]
        found = found_in(tmp_path, yaml.safe_dump_all(spoiled(mistake)), known)
        assert [one.id for one in found].count(check) == 1, (check, said, found)
        (first,) = (one for one in found if one.id == check)
        assert said in f"{first.given} {first.remedy}", (check, first)
        assert first.remedy, check
        assert first.file.startswith("all.yaml") or check == "serves-triton", first
        others = {one.id for one in found} - {check}
        # A misspelled field is missing under its right name; a predictor without ports has none.
        also = {"field-known": {"readiness-probe"}, "canary-percent": {"grpc-port"}}
        assert others <= also.get(check, set()), (check, said, others)
    assert CASES["mistakes"].keys() | {"manifest-readable"} == {one.id for one in CHECKS}


def test_the_mistakes_of_public_charts_are_found(tmp_path: Path) -> None:
    for chart, case in yaml.safe_load((DATA / "charts.yaml").read_text()).items():
        found = {finding.id for finding in found_in(tmp_path, case["text"])}
        assert found == {*case["finds"]}, chart


def test_other_gpus_and_names_of_metrics_are_found_in_manifests_of_generation(
    tmp_path: Path,
) -> None:
    repository = write_generation(tmp_path, "core.tensor_parallel_size=2")
    made = make_manifests(repository, "talk", options(name="talk"), repository)
    text = yaml.safe_dump_all(kustomized(tmp_path / "out", made))
    for old, new in (
        ("nvidia.com/gpu: 2", "nvidia.com/gpu: 1"),
        ("triptych_generation_waiting", "triptych_generation_wait"),
    ):
        assert old in text
        text = text.replace(old, new)
    found = found_in(tmp_path / "spoilt", text, known_of(repository, "talk", tmp_path))
    assert {one.id for one in found} == {"engine-gpu", "metric-known"}
    assert any("nvidia.com/gpu: 1; it has 2" in one.given for one in found)
    assert any("Did you mean `triptych_generation_waiting`?" in one.remedy for one in found)


def test_what_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    cases = {
        "kind: {{ .Values.kind }}\n  x: [": "helm template",
        "kind: [": "Fix the YAML",
    }
    for text, remedy in cases.items():
        (finding,) = found_in(tmp_path, text)
        assert finding.id == "manifest-readable"
        assert remedy in finding.remedy
    (tmp_path / "kustomization.yaml").write_text("resources: [none.yaml]\n")
    (finding,) = check_manifests(tmp_path)
    assert finding.id == "manifest-readable"
    with pytest.raises(UserError, match="a folder of manifests"):
        check_manifests(tmp_path / "none")
    # Broken in every place: findings, no traceback.
    for value in (None, 3, "text", [], [3]):
        objects = fine()
        for one in objects:
            one["spec"] = value
        found_in(tmp_path / "odd", yaml.safe_dump_all(objects))
        objects = fine()
        for key in list(objects[0]["spec"]["template"]["spec"]["containers"][0]):
            if key != "image":
                objects[0]["spec"]["template"]["spec"]["containers"][0][key] = value
        found_in(tmp_path / "odd", yaml.safe_dump_all(objects))


def test_fields_are_those_of_the_newest_kubernetes() -> None:
    folder = f"kubernetes-json-schema/v{KUBERNETES[0]}.0-local-strict"
    for kind, names in FIELDS.items():
        schema = schema_contents(f"{folder}/{kind.lower()}-v1.json", KUBERNETES[0])
        assert sorted(names.split()) == sorted(schema["properties"]), kind


def test_the_command_line_tells_findings_and_ends_as_lint_does(tmp_path: Path) -> None:
    found_in(tmp_path / "fine", yaml.safe_dump_all(fine()))
    done = CliRunner().invoke(app, ["lint", str(tmp_path / "fine")])
    assert (done.exit_code, done.stdout) == (0, "0 errors, 0 other findings\n")
    objects = fine()
    objects[0]["spec"]["replicas"] = 3
    found_in(tmp_path / "broken", yaml.safe_dump_all(objects))
    words = ["lint", str(tmp_path / "broken"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert [finding["id"] for finding in json.loads(done.stdout)] == ["replicas-autoscaled"]
    done = CliRunner().invoke(app, [*words[:2], "--triton", "26.11", "--upgrade-from", "26.05"])
    assert "--upgrade-from` is only supported for a model repository" in str(done.exception)
    # With a pipeline: what was measured of it counts.
    repository = write_built(tmp_path)
    write_bench(tmp_path / "reports/minilm")
    options = ["--repository", str(repository), "--reports", str(tmp_path / "reports")]
    words = ["lint", str(tmp_path / "fine"), "minilm", *options]
    assert CliRunner().invoke(app, words).exit_code == 0
    # The former verb takes the same options.
    words = ["deploy", "minilm", *options, "--check", str(tmp_path / "fine")]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (0, "0 errors, 0 other findings\n")
    assert "`deploy --check` is now called `lint`" in done.stderr
