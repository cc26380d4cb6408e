"""What lint must catch between models: wiring, ragged inputs, batches, queues."""

from __future__ import annotations

from onnx import TensorProto

from lint_cases import (
    BATCHING,
    CORE,
    DELAY,
    ENS,
    LIMIT,
    ONNX_FILE,
    POST,
    PRE,
    PRIORITIES,
    batching,
    error,
    model_py,
    more_outputs,
    policy,
    post_policy,
    warning,
)
from lint_repositories import (
    LOCK,
    PLAIN_PY,
    ROW_STRIDE,
    append,
    ensemble,
    graph,
    put,
    remove,
    replace,
    solo,
)

MAP_LENGTH = 'input_map { key: "row_length" value: "row_length" }'

ENSEMBLES = (
    error("ensemble-steps", ENS, POST, remove("minilm_core")),
    error(
        "ensemble-steps",
        ENS,
        "version 7, served are 1",
        replace(ENS, "model_version: -1", "model_version: 7"),
    ),
    error(
        "ensemble-steps", ENS, "uses version 0, served are 1", replace(ENS, "model_version: -1", "")
    ),
    error("ensemble-steps", "loop", "needs loop", ensemble("loop", "a", "b", "loop a=a > b=b")),
    error("ensemble-steps", "idle", "no step", ensemble("idle", "", "")),
    error("ensemble-wiring", ENS, "leaves out row_length", replace(ENS, MAP_LENGTH, "")),
    error(
        "ensemble-wiring",
        ENS,
        "step 0 (minilm_preprocess) requires text",
        replace(ENS, "TYPE_STRING dims: [1]", "TYPE_STRING dims: [1] optional: true"),
    ),
    error(
        "ensemble-wiring",
        ENS,
        "no output embeding; it has: embedding",
        replace(ENS, 'key: "embedding"', 'key: "embeding"'),
    ),
    error(
        "ensemble-wiring",
        ENS,
        "no input ids; it has: input_ids, row_length",
        replace(ENS, 'input_map { key: "input_ids"', 'input_map { key: "ids"'),
    ),
    error(
        "ensemble-wiring",
        ENS,
        "reads 'tokens'; tensors there are: embedding, input_ids",
        replace(
            ENS,
            'input_map { key: "input_ids" value: "input_ids" }',
            'input_map { key: "input_ids" value: "tokens" }',
        ),
    ),
    error(
        "ensemble-wiring",
        ENS,
        "nothing reads 'pair'",
        replace(ENS, "input [", 'input [{ name: "pair" data_type: TYPE_STRING dims: [1] }, '),
    ),
    error(
        "ensemble-wiring",
        "twice",
        "u comes from",
        solo(),
        ensemble("twice", "x", "u", "solo a=x > c=u", "solo a=x > c=u"),
    ),
    error(
        "ensemble-wiring", "own", "own input", solo(), ensemble("own", "x y", "y", "solo a=x > c=y")
    ),
    error(
        "ensemble-wiring",
        ENS,
        "the ensemble's output reads 'embedding'",
        replace(ENS, 'key: "embedding" value: "embedding"', 'key: "embedding" value: "vector"'),
    ),
    error(
        "ensemble-wiring",
        "ring",
        "step 0 (solo), step 1 (solo)",
        solo(),
        ensemble("ring", "x", "v", "solo a=x b=v > c=u", "solo a=x b=u > c=v"),
    ),
    error(
        "ensemble-wiring",
        "auto",
        "no input a; it has: none",
        solo(),
        put("solo/config.pbtxt", 'backend: "python" instance_group { count: 1 kind: KIND_CPU }'),
        ensemble("auto", "x", "y", "solo a=x > c=y"),
    ),
    error(
        "ensemble-wiring",
        "mute",
        "lacks an output_map",
        solo(),
        ensemble("mute", "x", "u", "solo a=x > c=u", "solo a=u"),
    ),
    error(
        "ensemble-tensors",
        ENS,
        "sentence_embedding TYPE_FP16 [384]",
        replace(
            POST,
            '"sentence_embedding" data_type: TYPE_FP32',
            '"sentence_embedding" data_type: TYPE_FP16',
        ),
    ),
    error(
        "ensemble-tensors",
        ENS,
        "row_length TYPE_INT64 [1] feeds minilm_core.row_length TYPE_INT32",
        replace(PRE, '"row_length" data_type: TYPE_INT32', '"row_length" data_type: TYPE_INT64'),
    ),
    error(
        "ensemble-tensors",
        ENS,
        "minilm.text TYPE_STRING [] feeds minilm_preprocess.text TYPE_STRING [1]",
        replace(ENS, "dims: [1] }", "dims: [1] reshape { shape: [] } }"),
    ),
    error(
        "ensemble-tensors",
        ENS,
        "minilm.embedding TYPE_FP32 [768]",
        replace(ENS, "dims: [384]", "dims: [768]"),
    ),
    error(
        "ensemble-batch",
        ENS,
        "takes 64 rows",
        replace(ENS, "max_batch_size: 32", "max_batch_size: 64"),
    ),
    warning(
        "ensemble-batch",
        POST,
        "takes 0",
        replace(POST, "max_batch_size: 32", ""),
        replace(POST, BATCHING, ""),
    ),
)

CORES = (
    error("onnx-readable", ONNX_FILE, "DecodeError", put(ONNX_FILE, "not a protobuf")),
    error("onnx-readable", ONNX_FILE, "no graph", put(ONNX_FILE, b"\x08\x0a")),
    error(
        "onnx-data",
        ONNX_FILE,
        "model.onnx.data",
        put(ONNX_FILE, graph("packed", external="model.onnx.data")),
    ),
    error(
        "onnx-tensors",
        CORE,
        "[384], the ONNX file has [-1, 768]",
        put(ONNX_FILE, graph("packed", width=768)),
    ),
    error(
        "onnx-tensors",
        CORE,
        "TYPE_FP32",
        put(ONNX_FILE, graph("packed", dtype=TensorProto.FLOAT16)),
    ),
    error(
        "onnx-tensors",
        CORE,
        "[1, 384]",
        put(ONNX_FILE, graph("bucketed", rows=1)),
        layout="bucketed",
    ),
    error("onnx-tensors", CORE, "[-1, -1]", put(ONNX_FILE, graph("packed", flat=False))),
    error("onnx-tensors", CORE, "row_stride", put(ONNX_FILE, graph("packed")), layout="bucketed"),
    error(
        "onnx-tensors",
        CORE,
        "it has: sentence_embedding",
        more_outputs(CORE, 'name: "x" data_type: TYPE_FP32 dims: [1]'),
    ),
    error(
        "batch-input",
        CORE,
        "input_ids, row_length",
        replace(CORE, 'source_input: "input_ids"', 'source_input: ["input_ids", "row_length"]'),
    ),
    error(
        "batch-input",
        CORE,
        "tokens is none",
        replace(CORE, 'source_input: "input_ids"', 'source_input: "tokens"'),
    ),
    error(
        "batch-input",
        CORE,
        "without allow_ragged_batch",
        replace(CORE, "allow_ragged_batch: true", ""),
        remove(LOCK),
        layout="plan",
    ),
    error(
        "batch-input",
        CORE,
        "TYPE_INT64",
        replace(
            CORE, '"row_stride"\n  data_type: TYPE_INT32', '"row_stride"\n  data_type: TYPE_INT64'
        ),
    ),
    error(
        "batch-input",
        CORE,
        "row_stride TYPE_FP32",
        replace(
            CORE, '"row_stride"\n  data_type: TYPE_INT32', '"row_stride"\n  data_type: TYPE_FP32'
        ),
    ),
    error(
        "batch-input",
        CORE,
        "row_length",
        replace(CORE, 'target_name: "row_stride"', 'target_name: ["row_stride", "row_length"]'),
        layout="plan",
    ),
    error(
        "batch-input",
        CORE,
        "row_stride [-1]",
        replace(CORE, "BATCH_ITEM_SHAPE_FLATTEN", "BATCH_ITEM_SHAPE"),
    ),
    error(
        "batch-input",
        CORE,
        "extra is none",
        replace(CORE, 'target_name: "row_stride"', 'target_name: ["row_stride", "extra"]'),
    ),
    error(
        "batch-input", CORE, "none", replace(CORE, 'target_name: "row_stride"', ""), layout="plan"
    ),
    error(
        "batch-input",
        CORE,
        "rows; outputs: sentence_embedding",
        append(
            CORE,
            "batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE "
            'target_name: "rows" source_input: "input_ids" }',
        ),
    ),
    warning("batch-input", CORE, "input_ids", replace(CORE, ROW_STRIDE, ""), layout="plan"),
)

BATCHES = (
    warning(
        "batch-shapes",
        CORE,
        "input_ids [-1]",
        remove(f"{PRE}/1/triton_io.py"),
        model_py(PRE, PLAIN_PY),
        layout="bucketed",
    ),
    warning("dynamic-batching", POST, "max_batch_size 32", replace(POST, BATCHING, "")),
    warning("dynamic-batching", "solo", "max_batch_size 0", solo(BATCHING)),
    error(
        "preferred-batch-size", CORE, "64", replace(CORE, DELAY, "preferred_batch_size: [8, 64]")
    ),
    error("priority-levels", CORE, "0", replace(CORE, DELAY, "priority_levels: 2")),
    error(
        "priority-levels",
        CORE,
        "3",
        replace(CORE, DELAY, PRIORITIES + " priority_queue_policy { key: 3 value { } }"),
    ),
    warning(
        "priority-levels",
        CORE,
        "default_priority_level 1",
        replace(CORE, DELAY, "default_priority_level: 1"),
    ),
    error(
        "preserve-ordering",
        "solo",
        "priority_levels 2",
        solo(batching(f"preserve_ordering: true {PRIORITIES}")),
    ),
    error(
        "preserve-ordering",
        "solo",
        "DELAY",
        solo(
            batching(
                "preserve_ordering: true "
                + policy("timeout_action: DELAY default_timeout_microseconds: 5000")
            )
        ),
    ),
    warning(
        "preserve-ordering",
        "solo",
        "25.09",
        solo(batching("preserve_ordering: true")),
        triton="25.09",
    ),
    warning(
        "preserve-ordering", CORE, "on a step", replace(CORE, DELAY, "preserve_ordering: true")
    ),
    error("queue-policy", CORE, "400", replace(CORE, "5000000", "400")),
    warning("queue-policy", CORE, "900", replace(CORE, "5000000", "900")),
    warning("queue-policy", CORE, "2000000", replace(CORE, DELAY, DELAY.replace("500", "2000000"))),
    warning("queue-wake-up", PRE, "a queue policy", replace(PRE, "count: 2", "count: 1")),
    warning(
        "queue-wake-up",
        POST,
        "or priority levels",
        replace(POST, BATCHING, f"dynamic_batching {{ {PRIORITIES} }}"),
        replace(POST, "count: 2", "count: 1"),
    ),
    warning("queue-policy", CORE, "max_queue_size 16", replace(CORE, LIMIT, "max_queue_size: 16")),
    warning("queue-policy", POST, "no default_timeout", post_policy("timeout_action: DELAY")),
    error(
        "queue-limit",
        CORE,
        "a decoupled step",
        append(PRE, "model_transaction_policy { decoupled: true }"),
    ),
    error(
        "queue-limit",
        "solo",
        "at the same time",
        solo(batching(policy("max_queue_size: 8"))),
        ensemble("fork", "x", "u v", "solo a=x > c=u", "solo a=x > c=v"),
        triton="26.01",
    ),
)

BROKEN_WIRES = ENSEMBLES + CORES + BATCHES
