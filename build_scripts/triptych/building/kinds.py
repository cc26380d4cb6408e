"""Steps of each kind of pipeline: read, check its folder, verify, measure.

`STEPS` is the only place in this package that chooses by `Kind`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import Progress
from triptych.building.generation.bench import bench_generation
from triptych.building.generation.checks import check_folder
from triptych.building.generation.inputs import read_generation
from triptych.building.generation.live import describe_generation, verify_generation
from triptych.building.generation.text2text import read_text2text
from triptych.building.hook_tests import Check, check_pipeline
from triptych.core.gate.verify import describe_verification, verify_pipeline
from triptych.core.inputs import read_inputs
from triptych.serving.bench.bench import bench_pipeline
from triptych.serving.bench.results import BenchResult
from triptych.spec.kind import Kind


@dataclass(frozen=True)
class Steps:
    """Steps of one kind. Specs, inputs and results are those of the kind.

    Attributes:
        read: Resolves the model and reads the traffic of a spec; writes only to the cache.
        check_folder: Checks the files of a pipeline without a server or a model.
        verify: Runs the gate through a server; arguments as `verify_pipeline`.
        describe_verification: Yields the lines that show a result of `verify`, with their styles.
        bench: Measures a built pipeline; arguments as `bench_pipeline`.
    """

    read: Callable[[Any, Progress], Any]
    check_folder: Callable[[Path], Sequence[Check]]
    verify: Callable[..., Any]
    describe_verification: Callable[[Any], Iterator[tuple[str, str]]]
    bench: Callable[..., BenchResult]


STEPS: Mapping[Kind, Steps] = {
    Kind.ENCODER: Steps(
        read=read_inputs,
        check_folder=check_pipeline,
        verify=verify_pipeline,
        describe_verification=describe_verification,
        bench=bench_pipeline,
    ),
    Kind.TEXT_GENERATION: Steps(
        read=read_generation,
        check_folder=check_folder,
        verify=verify_generation,
        describe_verification=describe_generation,
        bench=bench_generation,
    ),
    Kind.TEXT2TEXT: Steps(
        read=read_text2text,
        check_folder=check_folder,
        verify=verify_generation,
        describe_verification=describe_generation,
        bench=bench_generation,
    ),
}
