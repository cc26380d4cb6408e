"""Lint of a repository before it is written: its files as they would lie there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych.base.errors import Finding
from triptych.base.files import scratch_folder
from triptych.repository.lint.checks import run_checks
from triptych.repository.render import Content


class LintFailure(Exception):
    """The rendered repository breaks a rule: nothing was written."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{f.file}: {f.rule}" for f in findings))


def lint_rendered(
    files: Mapping[str, Content], *, triton: str, beside: Sequence[Path] = ()
) -> tuple[Finding, ...]:
    """The findings that are no errors.

    Args:
        files: path relative to the repository -> content.
        triton: the oldest release that must load it.
        beside: folders of models that are there already and that `files` refer to.

    Raises:
        LintFailure: an error.
    """
    with scratch_folder("triptych-lint-") as scratch:
        for path, content in files.items():
            target = scratch / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                target.symlink_to(content.absolute())
            else:
                target.write_bytes(content)
        for model in beside:
            (scratch / model.name).symlink_to(model.absolute())
        findings = run_checks(scratch, triton=triton, with_engines=False)
    # The engine is built of what is written now, here or in the image that will serve it.
    findings = [finding for finding in findings if finding.id != "engine-built"]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise LintFailure(errors)
    return tuple(findings)
