"""Running engines, on a fake TensorRT over a fake GPU that computes with ONNX Runtime."""

import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import fake_cuda, fake_tensorrt
from tests.support.fake_cuda import FakeCuda, cudaError_t
from tests.support.fake_tensorrt import builder, runtime
from tests.support.fake_tensorrt.records import read_record
from tests.support.tensorrt_cases import BUCKETS, PADDED, padded_answer, padded_feed, plan_of
from triptych.core.engine.cuda import EngineError
from triptych.core.engine.runner import (
    EngineRunner,
    Pinned,
    ShapeError,
    open_engine,
    plan_version,
)
from triptych.spec.engine_plan import GraphSpec


def graph(rows: int, lowest: int, *, edge: int = 3) -> GraphSpec:
    return GraphSpec(rows, lowest, {"input_ids": (edge,), "row_length": (1,)})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A fake GPU; whatever a test does, all of it must have been given back in the end."""
    cuda = fake_cuda.install(monkeypatch)
    yield cuda
    assert cuda.leaks == []


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_tensorrt.install(monkeypatch, "10")


@pytest.fixture
def plan(trt: Any) -> bytes:
    return plan_of(PADDED, BUCKETS, version=trt.__version__)


def runs(cuda: FakeCuda) -> list[tuple[int, list[int]]]:
    """What the engine computed: profile and shape of the tokens."""
    return [(run[0], run[1]["input_ids"]) for name, run in cuda.events if name == "run"]


def check_padded(runner: EngineRunner, rows: int, tokens: int) -> None:
    feed = padded_feed(rows, tokens)
    values = runner.run(feed)
    assert values.keys() == {"total", "each"}
    for name, value in padded_answer(feed).items():
        np.testing.assert_array_equal(values[name], value)


def test_each_batch_runs_in_the_profile_that_holds_it_with_the_nearest_optimum(
    cuda: FakeCuda, trt: Any, plan: bytes
) -> None:
    with EngineRunner(plan, packed=False) as runner:
        check_padded(runner, 2, 6)
        check_padded(runner, 4, 3)
        feed = padded_feed(2, 3)
        first = runner.run(feed)
        runner.run(padded_feed(4, 3, seed=1))
        np.testing.assert_array_equal(first["total"], padded_answer(feed)["total"])
    assert runs(cuda)[:2] == [(1, [2, 6]), (0, [4, 3])]
    with (
        EngineRunner(plan, packed=False, profiles=[1]) as runner,
        pytest.raises(ShapeError, match=r"\[2, 3\] \(allowed: \[1, 6\] to \[4, 6\]\)"),
    ):
        runner.run(padded_feed(2, 3))
    profiles = [
        {"input_ids": [[1, 1], [best, 6], [8, 9]], "row_length": [[1, 1], [best, 1], [8, 1]]}
        for best in (8, 1)
    ]
    del cuda.events[:]
    with EngineRunner(plan_of(PADDED, profiles, version=trt.__version__), packed=False) as runner:
        check_padded(runner, 2, 6)
        check_padded(runner, 7, 6)
    assert [place for place, _ in runs(cuda)] == [1, 0]


def test_no_run_allocates(cuda: FakeCuda, plan: bytes) -> None:
    for pinned in (True, False):
        with EngineRunner(plan, packed=False, pinned=Pinned(pinned, pinned)) as runner:
            before, host = cuda.counted("malloc"), len(cuda.host)
            for rows, tokens in [(4, 6), (1, 3), (4, 3)]:
                check_padded(runner, rows, tokens)
            assert (cuda.counted("malloc"), len(cuda.host)) == (before, host)
            assert host == (4 if pinned else 0)


@pytest.mark.parametrize("major", fake_tensorrt.MAJORS)
def test_a_batch_is_launched_as_the_smallest_graph_that_takes_it(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, major: str
) -> None:
    trt = fake_tensorrt.install(monkeypatch, major)
    plan = plan_of(PADDED, BUCKETS, version=trt.__version__)
    graphs = [graph(4, 3), graph(2, 2), graph(2, 1, edge=6)]
    with EngineRunner(plan, packed=False, graphs=graphs) as runner:
        assert runner.captured == tuple(sorted(graphs, key=lambda g: g.inputs["input_ids"]))
        assert cuda.counted("graph") == 3
        del cuda.events[:]
        for rows, tokens, launches, shape in (
            (2, 3, 1, [2, 3]),
            (3, 3, 2, [4, 3]),
            (1, 3, 2, [1, 3]),  # below the lower bound of its edge's graphs
            (4, 3, 3, [4, 3]),  # the graph still stands after the context had another shape
            (3, 6, 3, [3, 6]),  # above that edge's only graph
            (1, 6, 4, [2, 6]),
        ):
            check_padded(runner, rows, tokens)
            assert cuda.counted("launch") == launches, (rows, tokens)
            assert runs(cuda)[-1][1] == shape


def test_padded_rows_are_copies_of_a_real_row(cuda: FakeCuda, trt: Any, plan: bytes) -> None:
    seen: list[Any] = []

    def look(outputs: dict[str, Any]) -> dict[str, Any]:
        seen.append(outputs["total"].copy())
        return outputs

    with EngineRunner(plan, packed=False, graphs=[graph(4, 1)]) as runner:
        trt._play.miscompute = look
        check_padded(runner, 4, 3)
        check_padded(runner, 2, 3)
    (_, small) = seen
    assert small.shape == (4, 1)
    np.testing.assert_array_equal(small[2:], small[[1, 1]])


def test_an_engine_that_cannot_be_captured_runs_without_cuda_graphs(
    cuda: FakeCuda, plan: bytes
) -> None:
    cuda.failing["captured enqueue"] = cudaError_t.cudaErrorStreamCaptureUnsupported
    warnings: list[str] = []
    with EngineRunner(plan, packed=False, graphs=[graph(4, 1)], warn=warnings.append) as runner:
        assert runner.captured == ()
        check_padded(runner, 4, 3)
        check_padded(runner, 2, 3)
    assert warnings == [
        "batches of 4 run without a CUDA graph: the engine could not be run in optimization "
        "profile 0"
    ]


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (
            padded_feed(2, 4),
            r"no optimization profile of the engine holds input 'input_ids' of shape \[2, 4\] "
            r"\(allowed: \[1, 3\] to \[4, 3\], \[1, 6\] to \[4, 6\]\)",
        ),
        (padded_feed(5, 3), r"input 'input_ids' of shape \[5, 3\]"),
        (padded_feed(2, 3) | {"row_length": np.ones(2, np.int32)}, r"'row_length' of shape \[2\]"),
        ({"row_length": np.ones((1, 1), np.int32)}, "input 'input_ids' of the engine is missing"),
        (
            padded_feed(2, 3) | {"row_length": np.ones((2, 1))},
            "input 'row_length' must be int32, not float64",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_harms_no_other(
    cuda: FakeCuda, plan: bytes, feed: dict[str, Any], message: str
) -> None:
    with EngineRunner(plan, packed=False, graphs=[graph(4, 1)]) as runner:
        with pytest.raises(ShapeError, match=message):
            runner.run(feed)
        check_padded(runner, 2, 3)


@pytest.mark.parametrize("failing", ["cudaMemcpyAsync", "cudaStreamSynchronize", "enqueue"])
def test_after_a_failure_of_the_gpu_the_next_batch_runs(
    cuda: FakeCuda, plan: bytes, failing: str
) -> None:
    with EngineRunner(plan, packed=False) as runner:
        cuda.failing[failing] = cudaError_t.cudaErrorLaunchFailure
        with pytest.raises(EngineError, match=r"unspecified launch failure|could not be run"):
            runner.run(padded_feed(2, 3))
        del cuda.failing[failing]
        (stream,) = cuda.streams.values()
        assert not stream.waiting or failing == "cudaStreamSynchronize"
        check_padded(runner, 2, 3)


@pytest.mark.parametrize(
    "failing", ["cudaStreamCreateWithFlags", "cudaMalloc", "cudaHostAlloc", "cudaStreamSynchronize"]
)
def test_a_failed_load_gives_back_what_it_has_allocated(
    cuda: FakeCuda, plan: bytes, failing: str
) -> None:
    cuda.failing[failing] = cudaError_t.cudaErrorInvalidValue
    with pytest.raises(EngineError, match=f"{failing} failed on GPU 0: invalid argument"):
        EngineRunner(plan, packed=False)
    cuda.failing.clear()
    cuda.total = 100
    with pytest.raises(EngineError, match="GPU 0 has no 1 MiB of memory left for tensor") as error:
        EngineRunner(plan, packed=False)
    assert "are free" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profiles": [0, 2]}, "has no optimization profile 2: it has 2, from 0 on"),
        ({"device": 1}, "cudaSetDevice failed on GPU 1: invalid device ordinal"),
        ({"packed": True, "graphs": [graph(1, 1)]}, "no CUDA graphs"),
        ({"graphs": [GraphSpec(1, 1, {"input_ids": (3,)})]}, "input_ids, row_length, but gives"),
        ({"graphs": [graph(1, 1, edge=5)]}, "no optimization profile of the engine holds"),
    ],
)
def test_options_that_the_engine_lacks_are_rejected_at_load(
    cuda: FakeCuda, plan: bytes, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        EngineRunner(plan, **{"packed": False, **options})
    runner = EngineRunner(plan, packed=False)
    runner.close()
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.run(padded_feed(2, 3))


def test_a_plan_that_tensorrt_cannot_load_is_refused_with_the_reason(
    cuda: FakeCuda, trt: Any, plan: bytes
) -> None:
    old = plan_of(PADDED, BUCKETS, version="9.1.0.4")
    with pytest.raises(EngineError, match=f"TensorRT {trt.__version__}: .*Version: 9.1.0.4"):
        EngineRunner(old, packed=False)
    head = struct.pack("<II16x4B", 0x74727466, 0, 8, 6, 1, 6)
    assert plan_version(head) == "8.6.1.6"
    assert plan_version(b"ftrt") == plan_version(bytes(28)) == ""
    message = f"it was built for TensorRT 8.6.1.6, this is {trt.__version__}; build it again here"
    with pytest.raises(EngineError, match=message):
        open_engine(head + bytes(100))
    # A plan that runs in several releases has code of its own, which must be allowed.
    compatible = plan_of(PADDED, BUCKETS, version="10.3.0.1", version_compatible=True)
    with EngineRunner(compatible, packed=False, host_code=True) as runner:
        check_padded(runner, 1, 3)
    with pytest.raises(EngineError, match="cannot be loaded"):
        EngineRunner(compatible, packed=False, host_code=False)
    engine = open_engine(plan)
    engine.complaints.append("OutOfMemory: requested size was 4 GB")
    trt.ICudaEngine.create_execution_context = lambda self: None
    with pytest.raises(EngineError, match=r"for want of device memory: OutOfMemory: requested"):
        EngineRunner(engine, packed=False)
    trt._play.no_gpu = True
    with pytest.raises(EngineError, match="cannot use this GPU: CUDA initialization failure"):
        EngineRunner(plan, packed=False)


def test_an_output_that_numpy_cannot_hold_or_whose_shape_the_data_decides_is_rejected(
    cuda: FakeCuda, trt: Any
) -> None:
    wide = "wide (float[rows] x) => (bfloat16[rows] y) { y = Cast<to: int = 16>(x) }"
    found = "found (float[rows] x) => (int64[1,found] y) { y = NonZero(x) }"
    for graph_text, message in (
        (wide, "'y' of the engine is BF16, which numpy cannot hold"),
        (found, "shape of output 'y' depends on the data"),
    ):
        plan = plan_of(graph_text, [{"x": [[1], [1], [2]]}], version=trt.__version__)
        with pytest.raises(EngineError, match=message):
            EngineRunner(plan, packed=False)


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, plan: bytes
) -> None:
    for module, message in (
        ("cuda.bindings.runtime", "the CUDA bindings are missing"),
        ("tensorrt", "TensorRT is missing"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(EngineError, match=message):
                EngineRunner(plan, packed=False)


LACKING: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("10", lambda trt: trt.DataType.FP7),
    ("11", lambda trt: trt.BuilderFlag.FP16),
    ("11", lambda trt: trt.INetworkDefinition(0).has_implicit_batch_dimension),
    ("10", lambda trt: trt.build_engine),
    ("10", lambda trt: setattr(trt.IBuilderConfig(), "max_workspace_size", 1)),
)
"""Uses of members that a release lacks."""


def test_a_fake_has_only_what_its_release_has() -> None:
    for fake in (*builder.CLASSES, *runtime.CLASSES):
        name = fake.__name__
        recorded = {
            member
            for major in fake_tensorrt.MAJORS
            for member in read_record(major)["classes"].get(name, ())
        }
        assert {member for member in vars(fake) if not member.startswith("_")} <= recorded, name
    for major, use in LACKING:
        with pytest.raises(AttributeError):
            use(fake_tensorrt.make_module(major))
