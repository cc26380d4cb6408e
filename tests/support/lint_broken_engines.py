"""What lint must find in TensorRT cores and in cores that generate text."""

from __future__ import annotations

import json

from onnx import TensorProto, helper

from lint_cases import CORE, LEAN, ONNX_FILE, PLAN_FILE, PRE, error, info, warning
from lint_repositories import (
    EDGES,
    GRAPHS,
    LOCK,
    TRITON_IO,
    Edit,
    Files,
    append,
    engine,
    graph,
    profile,
    put,
    remove,
    replace,
    solo,
    step_settings,
)

UNBUILT = (put(ONNX_FILE, graph("plan")), remove(PLAN_FILE))
COUNTED = "count: 2 kind: KIND_GPU"


def bucketed(rows: tuple[int, int]) -> Edit:
    """Profiles of every edge for so many rows."""
    return engine([profile(rows, edge=(edge,)) for edge in EDGES])


def odd_node(operator: str, **settings: object) -> bytes:
    """A bucketed core whose only node is `operator`."""
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["rows", "tokens"]),
        helper.make_tensor_value_info("row_length", TensorProto.INT32, ["rows", 1]),
    ]
    output = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["rows", 384])
    node = helper.make_node(operator, ["row_length"], ["sentence_embedding"], "odd", **settings)
    body = helper.make_graph([node], "core", inputs, [output])
    content: bytes = helper.make_model(
        body, opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    ).SerializeToString()
    return content


ENGINES = (
    error("engine-built", PLAN_FILE, "model.onnx alone", *UNBUILT, layout="plan"),
    error(
        "engine-version",
        LOCK,
        "10.16.1.11; Triton 26.08 has 11.2.1.2, and it is not version compatible",
        engine(tensorrt="10.16.1.11"),
        layout="plan",
        triton="26.08",
    ),
    error(
        "engine-version",
        LOCK,
        "none loads one of a newer release",
        engine(tensorrt="11.4.0.106", version_compatible=True),
        layout="plan",
        triton="26.08",
    ),
    error(
        "engine-version",
        LOCK,
        "Triton 24.10 has TensorRT 10, and none loads one of a newer release",
        engine(tensorrt="11.2.1"),
        layout="plan",
    ),
    error(
        "engine-version",
        LOCK,
        "Triton 25.01 has TensorRT 10, and it is not version compatible",
        engine(tensorrt="8.6.3"),
        layout="plan",
        triton="25.01",
    ),
    error(
        "engine-version",
        LOCK,
        "from too far back",
        engine(tensorrt="8.6.3", version_compatible=True),
        layout="plan",
        triton="26.09",
    ),
    error(
        "engine-version",
        ONNX_FILE,
        f"another graph than {LOCK} records",
        put(ONNX_FILE, graph("plan")),
        engine(onnx_sha256="0" * 64),
        layout="plan",
    ),
    error(
        "engine-operators",
        ONNX_FILE,
        "odd: operator Bernoulli is not in TensorRT 10.15",
        put(ONNX_FILE, odd_node("Bernoulli")),
        layout="buckets",
    ),
    error(
        "engine-operators",
        ONNX_FILE,
        "bf16 and 1 more: type UINT32 does not exist in TensorRT 10.15",
        put(ONNX_FILE, graph("buckets", middle=TensorProto.UINT32)),
        layout="buckets",
    ),
    error(
        "engine-operators",
        ONNX_FILE,
        "Output 1 is out of bounds",
        put(ONNX_FILE, odd_node("DynamicQuantizeLinear")),
        layout="buckets",
    ),
    error(
        "onnx-tensors",
        CORE,
        "TYPE_INT32",
        put(ONNX_FILE, graph("buckets", ids=TensorProto.INT64)),
        layout="buckets",
    ),
    warning(
        "triton-version",
        CORE,
        "parameter execution_context_allocation_strategy, new in 25.05",
        append(CORE, LEAN),
        layout="plan",
    ),
)

PROFILES = (
    error(
        "profile-batch",
        CORE,
        "1 to 16 rows of input_ids [16], row_length [1], max_batch_size is 32",
        bucketed((1, 16)),
        layout="buckets",
    ),
    error(
        "profile-batch", CORE, "2 to 32 rows of input_ids [16]", bucketed((2, 32)), layout="buckets"
    ),
    error(
        "profile-batch",
        CORE,
        "row_length [1], row_stride [], max_batch_size is 32",
        engine([profile((1, 16), tokens=(1, 2048))]),
        layout="plan",
    ),
    warning("profile-batch", CORE, "1 to 64 rows", bucketed((1, 64)), layout="buckets"),
    error("profile-names", CORE, "profile 3", replace(CORE, '"2"]', '"2", "3"]'), layout="buckets"),
    error("profile-names", CORE, "not named: 2", replace(CORE, ', "2"]', "]"), layout="buckets"),
    error(
        "profile-names",
        CORE,
        "not named: 1, 2",
        replace(CORE, 'profile: ["0", "1", "2"]', ""),
        layout="buckets",
    ),
    error("profile-names", CORE, "profile 1", replace(CORE, '"0"', '"1"'), layout="plan"),
    error(
        "profile-range",
        CORE,
        f"rows that {PRE} pads to 48: input_ids [1, 48], row_length [1, 1]; profiles: "
        "0: input_ids [1, 16] to [32, 16]",
        put(f"{PRE}/1/settings.json", step_settings(bucket_edges=[16, 32, 48, 64])),
        replace(CORE, "graphs: true", ""),
        *(replace(CORE, spec, "") for spec in GRAPHS),
        layout="buckets",
    ),
    error(
        "profile-range",
        CORE,
        f"a row of 128 tokens, the most that {PRE} sends",
        put(f"{PRE}/1/settings.json", step_settings(max_length=128)),
        layout="buckets",
    ),
    error(
        "profile-range",
        CORE,
        f"32 rows of 128 tokens, the most that {PRE} sends: input_ids [4096]",
        put(f"{PRE}/1/settings.json", step_settings(max_length=128)),
        layout="plan",
    ),
    error(
        "profile-range",
        CORE,
        "model_warmup warm: input_ids [2, 7], row_length [2, 1]",
        replace(CORE, "dims: [16] zero_data", "dims: [7] zero_data"),
        layout="buckets",
    ),
    error(
        "profile-range",
        CORE,
        "graph_spec 0: input_ids [8, 7]",
        replace(CORE, "cuda {", "cuda { " + GRAPHS[1].replace("[16]", "[7]")),
        layout="buckets",
    ),
    warning(
        "profile-switching",
        CORE,
        "3 profiles for each of 6 instances",
        replace(CORE, COUNTED, COUNTED.replace("2", "6")),
        layout="buckets",
    ),
)

CUDA_GRAPHS = (
    warning(
        "cuda-graphs",
        CORE,
        "backend onnxruntime",
        append(CORE, "optimization { cuda { graphs: true } }"),
    ),
    warning(
        "cuda-graphs",
        CORE,
        "allow_ragged_batch: true",
        append(CORE, "optimization { cuda { graphs: true } }"),
        layout="plan",
    ),
    warning(
        "cuda-graphs",
        CORE,
        "no graph_spec, inputs of variable shape",
        *(replace(CORE, spec, "") for spec in GRAPHS),
        layout="buckets",
    ),
    warning(
        "cuda-graphs",
        CORE,
        "9 graph_spec, graphs is off",
        replace(CORE, "graphs: true", "graphs: false"),
        layout="buckets",
    ),
    warning(
        "cuda-graphs",
        CORE,
        "none for 2 to 8 rows of 32",
        replace(CORE, GRAPHS[4], ""),
        layout="buckets",
    ),
    warning(
        "cuda-graphs",
        CORE,
        "none for 2 to 7 rows of 16; 2 to 7 rows of 32; 2 to 7 rows of 64",
        replace(CORE, "batch_size: 2 input", "batch_size: 8 input"),
        layout="buckets",
    ),
    warning(
        "cuda-graphs",
        CORE,
        "several for 4 to 8 rows of 16; 4 to 8 rows of 32; 4 to 8 rows of 64",
        replace(CORE, "batch_size: 9 input", "batch_size: 4 input"),
        layout="buckets",
    ),
)

TOKENIZER = {
    "post_processor": {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
            },
        ],
    }
}


def settings(**values: object) -> Edit:
    """A step of Triptych with these settings."""

    def edit(files: Files) -> None:
        solo()(files)
        files["solo/1/triton_io.py"] = TRITON_IO
        files["solo/1/settings.json"] = json.dumps(values).encode()

    return edit


def kv_cache(max_length: int, request_tokens: int) -> Edit:
    """A core with room for 1024 tokens."""
    return settings(
        kv_token_bytes=1024,
        kv_cache_mib=1,
        max_length=max_length,
        max_sequences=4,
        request_tokens=request_tokens,
    )


GENERATION = (
    error("engine-gpus", "solo", "MIG-5a", settings(gpus=["MIG-5a"])),
    error(
        "engine-gpus",
        "solo",
        "2 parts on MIG-5a, MIG-6b",
        settings(tensor_parallel=2, gpus=["MIG-5a", "MIG-6b"]),
    ),
    error("engine-gpus", "solo", "4 parts, gpus 0, 1", settings(pipeline_parallel=4, gpus=[0, 1])),
    error("engine-gpus", "solo", "KIND_CPU", settings(tensor_parallel=2)),
    info(
        "precision-gpus",
        "solo",
        "core.precision bf16, core.kv_cache.dtype fp8",
        settings(precision="bf16", kv_cache_precision="fp8"),
    ),
    info(
        "precision-gpus",
        "solo",
        "core.precision int8",
        settings(precision="int8", kv_cache_precision="auto"),
    ),
    error("kv-cache", "solo", "1024 tokens", kv_cache(1025, 1)),
    warning("kv-cache", "solo", "3 such requests", kv_cache(1024, 300)),
    warning(
        "duplicate-bos-token",
        "solo/1/chat_template.jinja",
        "<s>; bos_token is not named",
        settings(special_tokens={"eos_token": "</s>"}),
        put("solo/1/tokenizer.json", json.dumps(TOKENIZER)),
        put("solo/1/chat_template.jinja", "<s>{{ messages[0]['content'] }}"),
    ),
)

BROKEN_ENGINES = ENGINES + PROFILES + CUDA_GRAPHS + GENERATION
