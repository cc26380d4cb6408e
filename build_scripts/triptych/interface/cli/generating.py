"""Pipelines that generate text, as `build` makes them and shows what it did."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from triptych.base.errors import UserError
from triptych.interface.cli.options import fail, progress, status
from triptych.interface.cli.shown import print_failed_gate, print_finding, tell_verdict

if TYPE_CHECKING:
    from triptych.building.generation.text2text import AnyInputs
    from triptych.core.gate.verify import Endpoint
    from triptych.serving.bench.bench import Bench
    from triptych.serving.bench.points import BenchResult
    from triptych.spec.generation_spec import GenerationSpec
    from triptych.spec.slo import AnySlo
    from triptych.spec.spec import PipelineSpec
    from triptych.spec.text2text_spec import Text2TextSpec


def load_any_spec(
    folder: Path, overrides: Sequence[str], *, untuned: bool = False
) -> PipelineSpec | GenerationSpec | Text2TextSpec:
    """The spec of a pipeline of any kind.

    Args:
        folder: the pipeline's.
        overrides: ``KEY=VALUE`` each.
        untuned: leave ``tuned.yaml`` out.

    Raises:
        UserError: see `load_spec`.
    """
    from triptych.spec.generation_spec import load_generation_spec
    from triptych.spec.spec import GENERATION, TEXT2TEXT, load_spec, task_of
    from triptych.spec.text2text_spec import load_text2text_spec

    task = task_of(folder)
    if task == GENERATION:
        return load_generation_spec(folder, overrides, untuned=untuned)
    if task == TEXT2TEXT:
        return load_text2text_spec(folder, overrides)
    return load_spec(folder, overrides, untuned=untuned)


def read_generating(spec: GenerationSpec | Text2TextSpec) -> AnyInputs:
    """What is known of a pipeline that generates text before anything is done.

    Raises:
        UserError: in the spec, the model or the traffic.
    """
    from triptych.building.generation.inputs import read_generation
    from triptych.building.generation.text2text import read_text2text
    from triptych.spec.generation_spec import GenerationSpec

    if isinstance(spec, GenerationSpec):
        return read_generation(spec, progress)
    return read_text2text(spec, progress)


def promise_of(
    spec: PipelineSpec | GenerationSpec | Text2TextSpec,
    limits: Sequence[str],
    throughput: float | None,
) -> AnySlo:
    """What options promise of a pipeline of either kind, else what its spec does.

    Raises:
        UserError: a limit that is none of that kind's.
    """
    from triptych.spec.slo import parse_generation_slo, parse_slo
    from triptych.spec.spec import PipelineSpec

    if isinstance(spec, PipelineSpec):
        return parse_slo(limits, throughput, spec.serving.slo)
    return parse_generation_slo(limits, throughput, spec.serving.slo)


def bench_any(
    spec: PipelineSpec | GenerationSpec | Text2TextSpec,
    repository: Path,
    bench: Bench,
    *,
    url: str | None,
    metrics_url: str | None,
) -> BenchResult:
    """Measure a pipeline of either kind.

    Raises:
        UserError: see `bench_pipeline`; baselines of one that generates text.
    """
    from triptych.serving.bench.bench import bench_pipeline
    from triptych.spec.spec import PipelineSpec

    places = {"url": url, "metrics_url": metrics_url}
    if isinstance(spec, PipelineSpec):
        from triptych.core.inputs import read_inputs

        return bench_pipeline(read_inputs(spec, progress), repository, bench, progress, **places)
    from triptych.building.generation.bench import bench_generation

    if bench.baselines:
        raise UserError(
            "--baseline",
            "must be of a pipeline that answers at once",
            given=spec.name,
            remedy="Leave it out; build_scripts/peers/generation.py has what to compare with",
        )
    return bench_generation(read_generating(spec), repository, bench, progress, **places)


def build_and_show(
    spec: GenerationSpec | Text2TextSpec, repository: Path, *, accept: str, as_json: bool
) -> dict[str, Any]:
    """Build a pipeline and print what a user should know of it; the result as plain data.

    Raises:
        UserError: see `build_generation`.
    """
    from triptych.building.generation.build import build_generation
    from triptych.building.generation.gate import GenerationGateFailure
    from triptych.repository.lint.rendered import LintFailure

    try:
        built = build_generation(read_generating(spec), repository, progress, accept=accept)
    except GenerationGateFailure as failure:
        print_failed_gate(status, failure.gate)
        fail(as_json, {"pipeline": spec.name, "gate": failure.gate.as_dict()}, str(failure))
    except LintFailure as failure:
        findings = [finding.as_dict() for finding in failure.findings]
        fail(as_json, {"pipeline": spec.name, "findings": findings}, str(failure))
    if built.gate is not None and built.gate.accepted:
        print_failed_gate(status, built.gate)
    for finding in built.findings:
        if finding.severity == "warning":
            print_finding(status, finding.as_dict())
    return {**built.as_dict(), "repository": str(repository)}


def verify_and_show(
    spec: GenerationSpec | Text2TextSpec,
    repository: Path,
    server: AbstractContextManager[Endpoint],
    *,
    clients: int,
    timeout_s: float,
    as_json: bool,
) -> NoReturn:
    """Run the gate through a server, print the verdict and end with its exit code.

    Raises:
        UserError: see `verify_generation`.
    """
    from triptych.building.generation.live import describe_generation, verify_generation

    result = verify_generation(
        read_generating(spec),
        repository,
        server,
        progress,
        clients=clients,
        timeout_s=timeout_s,
    )
    lines = describe_generation(result)
    tell_verdict(result.as_dict(), lines, passed=result.passed, as_json=as_json)
