"""What lint must leave alone: edits that keep a good repository good."""

from __future__ import annotations

import hashlib

from lint_cases import (
    CACHED,
    CORE,
    DELAY,
    ENS,
    IDS_FROM_FILE,
    LEAN,
    ONNX_FILE,
    PLAN_FILE,
    POST,
    PRE,
    PRIORITIES,
    batching,
    fine,
    model_py,
    more_outputs,
    policy,
    post_policy,
    warm,
)
from lint_repositories import (
    COMPLETING_PY,
    EDGES,
    GRAPHS,
    LOCK,
    PLAIN_PY,
    append,
    engine,
    ensemble,
    graph,
    graph_spec,
    profile,
    put,
    relock,
    remove,
    replace,
    solo,
)

ORDERED = batching("preserve_ordering: true")
MORE = 'name: "more" data_type: TYPE_FP32 dims: [-1, 9] allow_ragged_batch: true optional: true'
GUARDED = b"""
from typing import TYPE_CHECKING

try:
    import orjson
except ImportError:
    pass
if TYPE_CHECKING:
    import scipy
"""
ASSIGNED = b"""
from . import triton_io

try:
    import orjson
except:
    pass


class Step:
    def execute(self, requests):
        return []


TritonPythonModel = Step
"""
SCATTER = """batch_output {
  kind: BATCH_SCATTER_WITH_INPUT_SHAPE
  target_name: "sentence_embedding"
  source_input: "input_ids"
}"""

FINE = (
    fine("no lock", remove(LOCK)),
    fine("an empty lock", put(LOCK, "{}")),
    fine("traffic at the limits", relock(rows=50, truncated_share=0.05)),
    fine("varied traffic", relock(words=9, vocabulary_share=0.03, near_duplicates=0.2)),
    fine("a nameless config", replace(POST, 'name: "minilm_postprocess"', "")),
    fine("loose files", put("README.md", "x")),
    fine("a newer version is served", put(f"{POST}/2/model.py", PLAIN_PY)),
    fine("an old version is not looked at", put(f"{POST}/0/model.py", "def broken(:")),
    fine("all versions", append(POST, "version_policy { all { } }")),
    fine(
        "a model file by another name",
        append(POST, 'default_model_filename: "step.py"'),
        put(f"{POST}/1/step.py", PLAIN_PY),
    ),
    fine(
        "a folder as model.onnx", remove(ONNX_FILE), put(f"{ONNX_FILE}/model.onnx", graph("packed"))
    ),
    fine(
        "weights beside the ONNX file",
        put(ONNX_FILE, graph("packed", external="model.onnx.data")),
        put("minilm_core/1/model.onnx.data", b"\0" * 1536),
    ),
    fine(
        "a narrower input than the graph's",
        replace(CORE, "dims: [-1]", "dims: [16]"),
        layout="bucketed",
    ),
    fine(
        "labels that exist",
        replace(CORE, "dims: [384]", 'dims: [384] label_filename: "labels.txt"'),
        put(f"{CORE}/labels.txt", "a"),
    ),
    *(
        fine(what, append(PRE, f'parameters {{ key: "a" value {{ string_value: "{text}" }} }}'))
        for what, text in (
            ("a file of the container", "/opt/models/tokenizer.json"),
            ("a parameter that is prose", "as in tokenizer.json"),
        )
    ),
    fine(
        "platform without backend",
        replace(CORE, 'backend: "onnxruntime"', 'platform: "onnxruntime_onnx"'),
    ),
    fine("a backend told from its file", replace(POST, 'backend: "python"', "")),
    fine(
        "a backend of its own",
        solo(),
        put("solo/libtriton_mine.so", "x"),
        replace("solo", '"python"', '"mine"'),
    ),
    fine(
        "in-flight limits from 25.11",
        replace(ENS, "ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 8"),
        triton="25.11-py3",
    ),
    fine(
        "INT64 with TensorRT 10",
        more_outputs(CORE, 'name: "ids" data_type: TYPE_INT64 dims: [1]'),
        layout="plan",
    ),
    fine(
        "reshape to the same values",
        more_outputs(
            POST, 'name: "x" data_type: TYPE_INT32 dims: [6, -1] reshape { shape: [2, 3, -1] }'
        ),
    ),
    fine(
        "a step with room for more rows", replace(PRE, "max_batch_size: 32", "max_batch_size: 64")
    ),
    fine(
        "an ensemble of an ensemble",
        solo(),
        ensemble("inner", "x", "y", "solo a=x > c=y"),
        ensemble("outer", "x", "y", "inner x=x > y=y"),
    ),
    fine(
        "a step that completes its own config",
        solo(code=COMPLETING_PY),
        put("solo/config.pbtxt", 'backend: "python" instance_group { count: 1 kind: KIND_CPU }'),
        ensemble("auto", "x", "y", "solo a=x > c=y"),
    ),
    fine("a cached ensemble without request parameters", append(ENS, CACHED)),
    fine("preferred sizes within the limit", replace(CORE, DELAY, "preferred_batch_size: [1, 32]")),
    fine(
        "two priorities",
        replace(CORE, DELAY, PRIORITIES + " priority_queue_policy { key: 2 value { } }"),
    ),
    fine("order kept before 25.09", solo(ORDERED), triton="25.08"),
    fine("order kept from 26.08", solo(ORDERED), triton="26.08"),
    fine("a late timeout", post_policy("timeout_action: DELAY default_timeout_microseconds: 1000")),
    fine(
        "timeouts that requests set",
        post_policy("timeout_action: DELAY allow_timeout_override: true"),
    ),
    fine(
        "a limited branch from 26.02",
        solo(batching(policy("max_queue_size: 8"))),
        ensemble("fork", "x", "u v", "solo a=x > c=u", "solo a=x > c=v"),
        triton="26.02",
    ),
    fine(
        "a ragged input of a Python step",
        put(f"{POST}/1/triton_io.py", "np = 0"),
        replace(POST, "input [", f"input [{{ {MORE} }}, "),
    ),
    fine("a sequence model", solo("max_batch_size: 4 sequence_batching { }")),
    fine("a named instance group", replace(CORE, "count: 2 kind", 'name: "main" count: 3 kind')),
    fine("warm-up data that suffices", warm(IDS_FROM_FILE), put(f"{CORE}/warmup/ids", b"\0" * 64)),
    fine(
        "a Python step on a GPU",
        solo(
            'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/opt/env" } }',
            b"import torch\n" + PLAIN_PY,
        ),
        replace("solo", "KIND_CPU", "KIND_GPU"),
    ),
    fine("imports that may fail", model_py(POST, GUARDED + PLAIN_PY)),
    fine(
        "a sibling by its plain name",
        model_py(POST, b"import triton_io, helpers.deep\n" + PLAIN_PY),
        put(f"{POST}/1/helpers/deep.py", ""),
    ),
    fine(
        "a model class from elsewhere",
        model_py(POST, "from .triton_io import *\n"),
        put(f"{POST}/1/triton_io.py", PLAIN_PY),
    ),
    fine("results for each token", append(CORE, SCATTER)),
    fine("a model class by assignment", model_py(POST, ASSIGNED)),
    fine(
        "a version compatible engine of TensorRT 10 on 11",
        engine(tensorrt="10.16.1.11", version_compatible=True),
        layout="plan",
        triton="26.08",
    ),
    *(
        fine("an engine of that release", engine(tensorrt=built), layout="plan", triton="26.08")
        for built in ("11.2.1", "11.2.1.2")
    ),
    fine("an engine of the same major", engine(tensorrt="10.4.0"), layout="plan", triton="24.10"),
    fine("an engine for a release to come", engine(tensorrt="12.0"), layout="plan", triton="27.02"),
    fine(
        "the graph of the engine",
        put(ONNX_FILE, graph("plan")),
        engine(onnx_sha256=hashlib.sha256(graph("plan")).hexdigest()),
        layout="plan",
    ),
    fine(
        "profiles that share the batch sizes",
        replace(CORE, '"2"]', '"2", "3", "4", "5"]'),
        engine([profile(rows, edge=(edge,)) for edge in EDGES for rows in ((1, 8), (9, 32))]),
        layout="buckets",
    ),
    fine(
        "many contexts with memory for the profile in use",
        replace(CORE, "count: 2 kind: KIND_GPU", "count: 8 kind: KIND_GPU"),
        append(CORE, LEAN),
        layout="buckets",
        triton="25.05",
    ),
    fine(
        "CUDA graphs of the 24 shapes that save most",
        replace(
            CORE,
            " ".join(GRAPHS),
            " ".join(graph_spec(e, n, n) for e in EDGES for n in range(1, 9)),
        ),
        layout="buckets",
    ),
    fine("a plan of its own", put(PLAN_FILE, b"x"), remove(LOCK), layout="plan"),
)
