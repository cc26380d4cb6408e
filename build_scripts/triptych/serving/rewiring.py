"""Replace pipelines on a running server by some whose steps pass other tensors to each other.

Triton swaps each step when it is loaded, and the ensemble after all of them. Until then a request
of the old ensemble may come from an old step to a new one, which refuses it if their tensors
differ. The new steps are therefore loaded under other names first. The ensemble is switched to them
in one step, and later to the steps of the usual names in the same way. Both builds are in memory
for that time. Pipelines that share a core are replaced together, if its tensors change.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triptych.client.server_info import reload_pipeline
from triptych.container.manifests import find_pipelines
from triptych.repository.config import CONFIG_FILE, print_config, read_config
from triptych.serving.server import Server

SUFFIX = "_next"
"""End of the names that steps have meanwhile."""
_QUIET_S = 3.0
"""Seconds without an answer of a step after which it has no requests."""
_TIMEOUT_S = 60.0
_POLL_S = 0.05
_CONFIGS = "configs"


def is_rewired(server: Server, pipeline: str) -> bool:
    """Return whether the pipeline on the disk has other tensors between its steps than the server.

    Raises:
        InferenceServerException: The server does not answer.
        UserError: A config cannot be read.
    """
    from tritonclient.grpc import InferenceServerClient

    with InferenceServerClient(server.grpc_url) as client:
        models = (pipeline, *_find_steps(server.repository)[pipeline])
        return all(map(client.is_model_ready, models)) and any(
            _has_other_wiring(client, server.repository, model) for model in models
        )


def find_awaited(server: Server, pipelines: Collection[str]) -> list[str]:
    """Return other pipelines that use a step whose tensors change, and must be built as well.

    Raises:
        InferenceServerException: The server does not answer.
        UserError: A config cannot be read.
    """
    from tritonclient.grpc import InferenceServerClient

    steps = _find_steps(server.repository)
    own = {step for pipeline in pipelines for step in steps[pipeline]}
    with InferenceServerClient(server.grpc_url) as client:
        shared = {
            name: [step for step in own.intersection(used) if client.is_model_ready(step)]
            for name, used in steps.items()
            if name not in pipelines and client.is_model_ready(name)
        }
        return [
            name
            for name, used in shared.items()
            if any(_has_other_wiring(client, server.repository, step) for step in used)
        ]


def _has_other_wiring(client: Any, repository: Path, model: str) -> bool:
    loaded = client.get_model_config(model).config
    return _wiring(loaded) != _wiring(read_config(repository / model / CONFIG_FILE))


def _wiring(config: Any) -> list[Any]:
    tensors = [
        {(each.name, each.data_type, tuple(each.dims)) for each in field}
        for field in (config.input, config.output)
    ]
    steps = [
        (step.model_name, dict(step.input_map), dict(step.output_map))
        for step in config.ensemble_scheduling.step
    ]
    return [*tensors, steps]


@contextmanager
def other_steps(server: Server, pipelines: Collection[str]) -> Iterator[dict[str, str]]:
    """Let the new steps answer under other names while the block loads those of the usual names.

    Yields the config of each ensemble as JSON. The server would not read that of the repository
    again.

    Raises:
        UserError: A model does not load; the previous one keeps serving.
    """
    from google.protobuf import json_format
    from tritonclient.grpc import InferenceServerClient

    names = {name: name + SUFFIX for name in _own_steps(server.repository, pipelines)}
    folder, to_json = server.second_repository, json_format.MessageToJson
    usual, other = dict[str, str](), dict[str, str]()
    for pipeline in pipelines:
        ensemble = read_config(server.repository / pipeline / CONFIG_FILE)
        usual[pipeline] = to_json(ensemble, preserving_proto_field_name=True)
        for step in ensemble.ensemble_scheduling.step:
            step.model_name = names.get(step.model_name, step.model_name)
        other[pipeline] = to_json(ensemble, preserving_proto_field_name=True)
    try:
        for name, next_name in names.items():
            _rename(server.repository / name, folder / next_name)
        for pipeline, config in other.items():
            reload_pipeline(server.grpc_url, pipeline, server.operator_headers, config)
        with InferenceServerClient(server.grpc_url) as client:
            _unload(server, client, list(names))
            yield usual
            _unload(server, client, list(names.values()))
    finally:
        for next_name in names.values():
            shutil.rmtree(folder / next_name, ignore_errors=True)


def _find_steps(repository: Path) -> dict[str, tuple[str, ...]]:
    return {found.name: found.steps for found in find_pipelines(repository)}


def _own_steps(repository: Path, pipelines: Collection[str]) -> list[str]:
    """Return the steps that only these pipelines have; a core that others share stays loaded."""
    steps = _find_steps(repository)
    others = {step for name in steps.keys() - set(pipelines) for step in steps[name]}
    own = dict.fromkeys(step for name in pipelines for step in steps[name])
    return [step for step in own if step not in others]


def _rename(model: Path, other: Path) -> None:
    """Make a model of another name from links to the files of `model`."""
    (other / _CONFIGS).mkdir(parents=True)
    for entry in model.iterdir():
        if entry.name not in (CONFIG_FILE, _CONFIGS):
            (other / entry.name).symlink_to(entry)
    for file in (model / CONFIG_FILE, *(model / _CONFIGS).glob("*.pbtxt")):
        config = read_config(file)
        config.name = other.name
        (other / file.relative_to(model)).write_text(print_config(config), encoding="utf-8")


def _unload(server: Server, client: Any, models: list[str]) -> None:
    """Unload models that the ensemble does not name any more, after their last answers."""
    ending = {pid for pid, model in server.living_steps().items() if model in models}
    deadline = time.monotonic() + _TIMEOUT_S
    counts, changed_at = _count_answers(client, models), time.monotonic()
    while time.monotonic() < min(changed_at + _QUIET_S, deadline):
        time.sleep(_POLL_S)
        before, counts = counts, _count_answers(client, models)
        changed_at = changed_at if counts == before else time.monotonic()
    for model in models:
        client.unload_model(model, headers=dict(server.operator_headers))
    while time.monotonic() < deadline and not server.living_steps().keys().isdisjoint(ending):
        time.sleep(_POLL_S)


def _count_answers(client: Any, models: list[str]) -> list[int]:
    found = [client.get_inference_statistics(model).model_stats for model in models]
    return [
        each.inference_stats.success.count + each.inference_stats.fail.count
        for versions in found
        for each in versions
    ]
