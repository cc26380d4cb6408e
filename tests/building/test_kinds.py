"""The contract of every kind of pipeline: each verb does its part, and the results have one form.

One tiny pipeline of each kind is built into a repository of its own and served, once. What is
special to a kind has tests of its own.
"""

import ast
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import generation_cases, own_models, text2text_cases
from tests.support.demo_pages import ask, open_demo
from tests.support.project import ROOT, quiet, write_pipeline
from triptych.building.build import BuildOutcome
from triptych.building.pipeline import AnyPipeline, open_pipeline
from triptych.building.stages import BuildOptions
from triptych.client import Client
from triptych.core.gate.verify import LiveOptions, describe_verification, verification_data
from triptych.deploy.options import DeployOptions
from triptych.deploy.targets import make_manifests, read_build_info
from triptych.interface import api
from triptych.interface.cli.plan_text import describe_pipeline
from triptych.repository.lint.checks import run_checks
from triptych.repository.manifest import BuildManifest, build_id, kind_of_build, read_manifest
from triptych.serving.bench.bench import Bench, BenchOptions
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.endpoint import Endpoint
from triptych.serving.server import Server
from triptych.spec.any_spec import SPECS, AnySpec, kind_in, load_any_spec, parse_any_slo
from triptych.spec.kind import Kind, kind_of_task

pytestmark = pytest.mark.server

VERIFY_KEYS = {
    *("pipeline", "url", "precision", "rows", "edge_case_rows", "accepted", "clients"),
    *("mean_batch", "seconds", "verdicts", "by_way", "edge_values", "failures", "notes"),
    *("counts", "worst", "finite", "faults", "passed", "gate"),
}
SLO = {
    Kind.ENCODER: "p99=2s",
    Kind.MODEL: "p99=2s",
    Kind.TEXT_GENERATION: "e2e_p99=20s",
    Kind.TEXT2TEXT: "e2e_p99=20s",
}
MEASURED = {"rps_per_replica": 10.0, "cpu_cores": 1.0, "memory_mib": 1024, "startup_seconds": 30.0}
CAPACITY: dict[Kind, dict[str, Any]] = {
    Kind.ENCODER: MEASURED,
    Kind.MODEL: MEASURED,
    Kind.TEXT_GENERATION: {},
    Kind.TEXT2TEXT: {},
}
"""Options of `deploy` in place of a result of `bench`, where one is needed."""
ANSWERS: dict[Kind, Callable[[Client], Any]] = {
    Kind.ENCODER: lambda client: client.embed(["a text"]),
    Kind.MODEL: lambda client: client.infer({"features": [[0.5, -1.0, 2.0, 0.0]]}),
    Kind.TEXT_GENERATION: lambda client: client.generate("a text", max_tokens=4).whole(),
    Kind.TEXT2TEXT: lambda client: client.generate("a text", max_tokens=4).whole(),
}


@dataclass(frozen=True)
class Case:
    """A pipeline that is built and served.

    Attributes:
        outcome: Outcome of its build.
    """

    kind: Kind
    folder: Path
    repository: Path
    pipeline: AnyPipeline
    outcome: BuildOutcome
    url: str = ""

    @property
    def spec(self) -> AnySpec:
        return self.pipeline.spec


SEVERAL = "several cores"
CASES: dict[str, Kind] = {**{kind.name.lower(): kind for kind in Kind}, SEVERAL: Kind.MODEL}


def write(name: str, folder: Path, tiny_model: Path) -> Path:
    """Write the folder of a tiny pipeline of a case."""
    kind = CASES[name]
    if name == SEVERAL:
        return own_models.write_cores(folder / "cores", serving={"slo": {"p99_ms": 2000}})
    if kind is Kind.ENCODER:
        source = {"source": str(tiny_model)}
        return write_pipeline(folder / "embed", model=source, serving={"slo": {"p99_ms": 2000}})
    if kind is Kind.MODEL:
        return own_models.write_table(folder / "table", serving={"slo": {"p99_ms": 2000}})
    if kind is Kind.TEXT2TEXT:
        model = text2text_cases.write_model("t5", folder / "model")
        return text2text_cases.write_pipeline(folder / "summary", model)
    model = generation_cases.write_tiny_model(folder / "model")
    return generation_cases.write_pipeline(folder / "talk", model)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[dict[str, Case]]:
    """Each case in a repository of its own; one server has the models of all."""
    base = tmp_path_factory.mktemp("kinds")
    built = {}
    for name, kind in CASES.items():
        folder, repository = write(name, base / name, tiny_model), base / name / "repository"
        pipeline = open_pipeline(load_any_spec(folder))
        outcome = pipeline.build(BuildOptions(repository=repository, progress=quiet))
        built[name] = Case(kind, folder, repository, pipeline, outcome)
        shutil.copytree(repository, base / "served", symlinks=True, dirs_exist_ok=True)
    with Server(base / "served") as server:
        yield {name: replace(case, url=server.grpc_url) for name, case in built.items()}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def test_each_layer_has_one_entry_for_each_kind() -> None:
    assert set(SPECS) == set(Kind)


def test_nothing_else_asks_for_the_class_of_a_spec_or_of_inputs() -> None:
    classes = {
        *("EncoderSpec", "GenerationSpec", "Text2TextSpec", "GeneratingSpec", "ModelSpec"),
        *("PipelineInputs", "GenerationInputs", "Text2TextInputs", "GeneratingInputs"),
    }
    paths = set((ROOT / "build_scripts/triptych").rglob("*.py"))
    asks = {
        path for path in paths if path.name == "model_fields.py"
    }  # `is_own`, for a type checker
    assert len(asks) == 1
    for path in sorted(paths - asks):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                named = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                assert not named & classes, f"{path.name}:{node.lineno}"


def test_it_is_read_checked_described_and_tuned(case: Case) -> None:
    assert kind_in(case.folder) is kind_of_task(case.spec.task) is case.kind
    slo = parse_any_slo(case.spec, [SLO[case.kind]], None)
    assert max(slo.limits_ms.values()) in (2000.0, 20000.0)
    checks = case.pipeline.check_files()
    assert not [check for check in checks if check.severity == "error"]
    described = describe_pipeline(case.spec, case.repository, quiet)
    assert json.loads(json.dumps(described))["task"] == case.spec.task
    assert set(described["models"]) == {path.parent.name for path in case.repository.glob("*/1")}


def test_it_is_built_once_by_the_command_line_and_by_python(case: Case) -> None:
    name = case.spec.name
    ends = {"", "_preprocess", "_core", "_postprocess"}
    if name == "cores":
        ends = ends - {"_core"} | {".vectors_core", ".classes_core", ".rank_step", ".risks_core"}
    assert set(case.outcome.changed) == {name + end for end in ends}
    assert case.outcome.gate.passed
    again = case.pipeline.build(BuildOptions(repository=case.repository, progress=quiet))
    assert again.changed == ()
    assert set(again.as_dict()) >= {"pipeline", "changed", "gate", "findings"}
    assert json.loads(json.dumps(again.as_dict()))["pipeline"] == name
    assert kind_of_build(case.repository, name) is case.kind
    assert read_manifest(case.repository, name, BuildManifest).spec.model_dump(
        exclude={"folder"}
    ) == case.spec.model_dump(exclude={"folder"})
    assert len(build_id(case.repository, name)) == 64
    assert run_checks(case.repository) == []
    result = api.build(
        name,
        pipelines=case.folder.parent,
        repository=case.repository,
        overrides={"serving.triton": case.spec.serving.triton},
    )
    assert result.built.changed == ()
    assert result.built.gate == case.outcome.gate
    assert set(result.figures) == {verdict.metric for verdict in case.outcome.gate.verdicts}
    assert (result.built.plan is not None) is (case.kind in (Kind.ENCODER, Kind.MODEL))
    for plot in (result.plot_differences(), result.plot_lengths()):
        assert plot.svg.startswith("<svg ")


def test_it_answers_and_passes_its_gate_where_it_is_served(case: Case) -> None:
    with Client(case.spec.name, case.url, timeout_s=60.0) as client:
        assert ANSWERS[case.kind](client) is not None
    options = LiveOptions(
        case.repository, nullcontext(Endpoint(case.url)), quiet, clients=4, timeout_s=60.0
    )
    result = case.pipeline.verify(options)
    lines = [line for line, _ in describe_verification(result)]
    assert result.passed, lines
    assert lines[0].startswith(f"{case.spec.name} at {case.url}")
    assert lines[-1] == "passed"
    data = json.loads(json.dumps(verification_data(result), allow_nan=False))
    assert set(data) >= VERIFY_KEYS
    assert (data["clients"], data["passed"], data["gate"]["failures"]) == (4, True, [])


def test_it_is_measured(case: Case) -> None:
    slo = parse_any_slo(case.spec, [SLO[case.kind]], None)
    bench = Bench(loads=(OfferedLoad("concurrency", 2.0),), rounds=1, seconds=0.5, slo=slo)
    options = BenchOptions(repository=case.repository, progress=quiet, bench=bench, url=case.url)
    result = case.pipeline.bench(options)
    assert (result.subject.pipeline, result.subject.task) == (case.spec.name, case.spec.task)
    assert result.points[0].median("throughput_per_s") > 0
    assert result.subject.requests > 0
    assert math.isfinite(result.subject.padding)


def test_it_is_deployed(case: Case, tmp_path: Path) -> None:
    options = DeployOptions(name="shop", **CAPACITY[case.kind])
    assert read_build_info(case.repository, case.spec.name, tmp_path).name == case.spec.name
    assert make_manifests(case.repository, case.spec.name, options, tmp_path).files


def test_its_page_opens_and_answers(case: Case) -> None:
    with open_demo(case.spec, case.folder, case.repository, case.url) as page:
        fields = ["a text"]
        if case.kind is Kind.MODEL:
            fields = ["[0.5, -1, 2, 0]", ""]
        shown = ask(page, *fields)
    assert shown[0]
