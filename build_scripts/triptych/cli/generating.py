"""Pipelines that generate text, as `build` makes them and shows what it did."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from triptych.cli.options import fail, progress, status
from triptych.cli.shown import print_failed_gate, print_finding, tell_verdict

if TYPE_CHECKING:
    from triptych.gate.verify import Endpoint
    from triptych.pipeline.generation_spec import GenerationSpec
    from triptych.pipeline.spec import PipelineSpec


def load_any_spec(folder: Path, overrides: Sequence[str]) -> PipelineSpec | GenerationSpec:
    """The spec of a pipeline of either kind.

    Raises:
        UserError: see `load_spec`.
    """
    from triptych.pipeline.generation_spec import load_generation_spec
    from triptych.pipeline.spec import is_generation, load_spec

    return (load_generation_spec if is_generation(folder) else load_spec)(folder, overrides)


def build_and_show(
    spec: GenerationSpec, repository: Path, *, accept: str, as_json: bool
) -> dict[str, Any]:
    """Build a pipeline and print what a user should know of it; the result as plain data.

    Raises:
        UserError: see `build_generation`.
    """
    from triptych.generation.build import build_generation
    from triptych.generation.gate import GenerationGateFailure
    from triptych.generation.inputs import read_generation
    from triptych.lint.rendered import LintFailure

    try:
        built = build_generation(
            read_generation(spec, progress), repository, progress, accept=accept
        )
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
    spec: GenerationSpec,
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
    from triptych.generation.inputs import read_generation
    from triptych.generation.live import describe_generation, verify_generation

    result = verify_generation(
        read_generation(spec, progress),
        repository,
        server,
        progress,
        clients=clients,
        timeout_s=timeout_s,
    )
    lines = describe_generation(result)
    tell_verdict(result.as_dict(), lines, passed=result.passed, as_json=as_json)
