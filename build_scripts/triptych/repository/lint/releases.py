"""Checks of a repository against the defects and changes of Triton's releases."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.base.release_changes import Feature, changes_between, defects_of
from triptych.repository.lint.snapshot import (
    Flaw,
    Model,
    Repository,
    info,
    mentions,
    names,
    warning,
)
from triptych.repository.python_env import ENV_PARAMETER


def known_defects(repository: Repository) -> Iterator[Flaw]:
    """Check that the release that serves the repository has no known defect that it meets."""
    if not repository.is_exact:
        return
    models = models_by_feature(repository)
    for defect in defects_of(repository.triton, models):
        fix = f"Use Triton {defect.fixed} or later." if defect.fixed else "No release has a fix."
        yield warning(
            f"should be served by a release without this defect: {defect.effect}",
            f"Triton {repository.triton}: {_subject(defect.feature, models)}",
            f"{fix} {defect.workaround} (Source: {defect.source})".replace("  ", " "),
        )


def changed_behavior(repository: Repository) -> Iterator[Flaw]:
    """List what the release does differently from the one that is to be replaced."""
    before, after = repository.upgraded_from, repository.triton
    if before is None:
        return
    models = models_by_feature(repository)
    for defect in defects_of(before, models):
        if not defect.is_in(after):
            yield info(
                f"has a defect no longer: {defect.effect}",
                f"{_subject(defect.feature, models)}: fixed in {defect.fixed}",
                f"Source: {defect.source}",
            )
    for change in changes_between(before, after, models):
        yield info(
            change.effect.removesuffix("."),
            f"{_subject(change.feature, models)}: since {change.release}",
            f"Source: {change.source}",
        )


def models_by_feature(repository: Repository) -> dict[Feature, set[str]]:
    """Return the names of the models with each feature; features without a model are left out."""
    found: dict[Feature, set[str]] = {"any server": set()}
    for model in repository.configured():
        for feature in _features_of(model):
            found.setdefault(feature, set()).add(model.name)
    return found


def _features_of(model: Model) -> Iterator[Feature]:
    config = model.config
    if model.is_ensemble:
        yield "ensemble"
    if config.HasField("dynamic_batching"):
        yield "dynamic batching"
    if config.model_transaction_policy.decoupled:
        yield "decoupled model"
    if config.response_cache.enable:
        yield "response cache"
    if model.backend == "tensorrt":
        yield "TensorRT engine"
    if model.backend == "python":
        yield "python step"
        if ENV_PARAMETER in config.parameters:
            yield "environment archive"
        if any(mentions(source.tree, {"MetricFamily"}) for source in model.sources):
            yield "python metrics"


def _subject(feature: Feature, models: dict[Feature, set[str]]) -> str:
    return f"{feature} ({names(models[feature])})" if models[feature] else feature
