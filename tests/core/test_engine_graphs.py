"""Every task and architecture in every precision, put through NVIDIA's own parser and builder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import architectures
import engine_graphs as engines
from conftest import LAYOUTS, traffic_texts
from engine_graphs import PRECISIONS, Graph
from served_models import SERVED, save
from task_models import MODELS
from triptych.base.errors import UserError
from triptych.spec.fields import Precision

BUILT: Sequence[tuple[str, str, Precision]] = (
    ("topics", "packed", "int8"),
    ("flags", "packed", "fp16"),
    ("tags", "bucketed", "fp8"),
    ("answers", "packed", "bf16"),
    ("ranks", "bucketed", "int8"),
    ("masks", "packed", "fp8"),
    ("hypotheses", "packed", "fp32"),
    ("images", "fixed", "int8"),
    ("bart_labels", "bucketed", "fp16"),  # its own code picks tokens by a NonZero
)
"""Each task but that of vectors, layout and precision, of graphs that other tests export."""

OTHERS = ("bart_labels", "t5_vectors", "albert_tags")
"""Of `SERVED`, what is of no architecture that `test_architectures` exports."""

Make = Callable[[str, str, Sequence[Precision]], Iterator[Graph]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Make:
    """The graphs of a pipeline of `MODELS` or `SERVED`."""
    base = tmp_path_factory.mktemp("graphs")

    def graphs(name: str, layout: str, precisions: Sequence[Precision]) -> Iterator[Graph]:
        model = base / f"{name}_model"
        task = MODELS[name][0] if name in MODELS else SERVED[name].task
        if not model.exists() and name in MODELS:
            MODELS[name][1](model, minilm_folder, traffic_texts())
        elif not model.exists():
            save(SERVED[name], model)
        folder = tmp_path_factory.mktemp(name)
        return engines.of_pipeline(name, task, model, layout, precisions, folder)

    return graphs


def check(graphs: Sequence[Graph], built: Sequence[Graph]) -> None:
    """Parse all and build some; every graph that is refused is named with the reason."""
    refused = {}
    sized = {graph.name: engines.sized_by_values(graph.path) for graph in graphs}
    for use, some in ((engines.parse, graphs), (engines.build, built)):
        for graph in some:
            try:
                use(graph)
            except UserError as error:
                refused[graph.name] = error.message
    assert refused == {}
    assert {name: nodes for name, nodes in sized.items() if nodes} == {}


def test_a_core_of_every_task_is_built(make: Make, tmp_path: Path) -> None:
    built = [graph for name, layout, one in BUILT for graph in make(name, layout, [one])]
    parsed: list[Graph] = []
    for case in architectures.SHARED:
        parsed += engines.of_architecture(case, ("fp32", "fp16"), tmp_path)
    built += [graph for graph in parsed if graph.name == "mpnet_embedding_bucketed_fp16"]
    assert len(built) == len(BUILT) + 1
    check([*built, *parsed], built)


@pytest.mark.long
def test_the_whole_matrix_is_parsed_and_each_operator_in_it_is_built(
    make: Make, tmp_path: Path
) -> None:
    """Built are so few graphs that each operator, on each type of value, is in one."""
    graphs: list[Graph] = []
    for name in MODELS:
        for layout in ("fixed",) if name == "images" else LAYOUTS:
            graphs += make(name, layout, PRECISIONS)
    for name in OTHERS:
        graphs += make(name, SERVED[name].layout, PRECISIONS)
    for case in (*architectures.SHARED, *architectures.OTHERS):
        graphs += engines.of_architecture(case, ["fp16"], tmp_path)
    assert len(graphs) == len(PRECISIONS) * (2 * len(MODELS) - 1 + len(OTHERS)) + 20
    check(graphs, engines.fewest(graphs, engines.operators))
