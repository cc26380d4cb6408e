"""`triptych bench` of a pipeline that generates text, with its own prompts and answer lengths."""

from __future__ import annotations

import time
from collections import Counter

from triptych.base.cache import versions_of
from triptych.base.errors import UserError
from triptych.building.generation.inputs import GeneratingInputs
from triptych.client.connection import check_single
from triptych.runtime.sampling_parameters import FIELD
from triptych.serving.bench.bench import (
    BenchOptions,
    bench_requests,
    describe_machine,
    describe_server,
)
from triptych.serving.bench.results import BenchResult, Subject
from triptych.serving.generation_environment import read_versions
from triptych.spec.generation_fields import GeneratingSpec

SENT = ("text_input", "messages", FIELD)
"""Inputs of every request; an empty text means that the input is missing."""


def bench_generation(inputs: GeneratingInputs, options: BenchOptions) -> BenchResult:
    """Measure a built pipeline; see `bench_pipeline`.

    Raises:
        UserError: The pipeline does not support the options, or see `bench_pipeline`.
    """
    bench, url = options.bench, options.url
    if url is not None:
        check_single(url, "measure it")
    for load in bench.loads:
        if load.kind == "concurrency":
            check_clients("--concurrency", int(load.value), inputs.spec)
    subject = subject_of(inputs, server=describe_server(options.url))
    return bench_requests(subject, requests_of(inputs), options)


def check_clients(option: str, clients: int, spec: GeneratingSpec) -> None:
    """Check that the pipeline admits `clients` requests at once; else perf_analyzer never ends.

    Raises:
        UserError: There are more clients than the pipeline admits.
    """
    most = spec.serving.queue.max_in_flight
    if clients > most:
        raise UserError(
            option,
            f"must be at most serving.queue.max_in_flight {most}; further requests are rejected",
            given=clients,
            remedy="Lower it, or raise serving.queue.max_in_flight",
        )


def requests_of(inputs: GeneratingInputs) -> list[dict[str, str]]:
    """Return the requests that perf_analyzer sends, in turn."""
    return [{name: prompt.sent.get(name, "") for name in SENT} for prompt in inputs.prompts]


def subject_of(inputs: GeneratingInputs, *, server: str) -> Subject:
    """Return the pipeline and the machine of a measurement."""
    spec, core = inputs.spec, inputs.spec.core
    return Subject(
        pipeline=spec.name,
        task=spec.task,
        architecture=inputs.model.info.architecture,
        precision=core.precision,
        layout=inputs.batching,
        overrides=dict(spec.tuned),
        server=server,
        machine=describe_machine(),
        versions={**versions_of("tritonclient"), **read_versions(*inputs.engine_packages)},
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        requests=len(inputs.prompts),
        lengths=dict(Counter(len(prompt.ids) for prompt in inputs.prompts)),
        padding=0.0,
    )
