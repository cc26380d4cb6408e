"""Replace a pipeline on a running server by one whose steps pass other tensors to each other.

Triton swaps each step when it is loaded, and the ensemble after all of them. Until then a request
of the old ensemble may come from an old step to a new one, which refuses it if their tensors
differ. The new steps are therefore loaded under other names first. The ensemble is switched to them
in one step, and later to the steps of the usual names in the same way. Both builds are in memory
for that time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
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
        for model in (pipeline, *_own_steps(server.repository, pipeline)):
            if not client.is_model_ready(model):
                return False
            loaded = client.get_model_config(model).config
            if _wiring(loaded) != _wiring(read_config(server.repository / model / CONFIG_FILE)):
                return True
    return False


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
def other_steps(server: Server, pipeline: str) -> Iterator[str]:
    """Let the new steps answer under other names while the block loads those of the usual names.

    Yields the config of the ensemble as JSON. The server would not read that of the repository
    again.

    Raises:
        UserError: A model does not load; the previous one keeps serving.
    """
    from google.protobuf import json_format
    from tritonclient.grpc import InferenceServerClient

    names = {name: name + SUFFIX for name in _own_steps(server.repository, pipeline)}
    folder, to_json = server.second_repository, json_format.MessageToJson
    ensemble = read_config(server.repository / pipeline / CONFIG_FILE)
    usual = to_json(ensemble, preserving_proto_field_name=True)
    for step in ensemble.ensemble_scheduling.step:
        step.model_name = names.get(step.model_name, step.model_name)
    other = to_json(ensemble, preserving_proto_field_name=True)
    try:
        for name, next_name in names.items():
            _rename(server.repository / name, folder / next_name)
        reload_pipeline(server.grpc_url, pipeline, server.operator_headers, other)
        with InferenceServerClient(server.grpc_url) as client:
            _unload(server, client, list(names))
            yield usual
            _unload(server, client, list(names.values()))
    finally:
        for next_name in names.values():
            shutil.rmtree(folder / next_name, ignore_errors=True)


def _own_steps(repository: Path, pipeline: str) -> list[str]:
    """Return the steps that only this pipeline has; a core that others share stays loaded."""
    steps = {found.name: found.steps for found in find_pipelines(repository)}
    own = steps.pop(pipeline)
    return [step for step in own if not any(step in others for others in steps.values())]


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
