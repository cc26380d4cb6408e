"""What lint must catch within one model: its files, its sources, its config."""

from __future__ import annotations

from lint_cases import (
    BATCHING,
    CACHED,
    CORE,
    ENS,
    IDS_FROM_FILE,
    INPUT_IDS,
    ONNX_FILE,
    PLAN_FILE,
    POST,
    PRE,
    error,
    model_py,
    more_outputs,
    warm,
    warning,
)
from lint_repositories import (
    LOCK,
    MODEL_PY,
    PLAIN_PY,
    append,
    ensemble,
    put,
    relock,
    remove,
    replace,
    solo,
    step_settings,
)

CAPABILITIES = 'cc_model_filenames { key: "9.0" value: "h.plan" }'
REFUSES_NO_PARAMETERS = step_settings(request_parameters={"text": {}}, refuses_parameters=False)
OPTIONS = step_settings(request_parameters={"dimensions": {"type": "int"}, "encoding": {}})
BF16 = """optimization { execution_accelerators { gpu_execution_accelerator {
  name: "tensorrt" parameters { key: "precision_mode" value: "BF16" }
} } }"""
UNKNOWN = 'input { key: "ids" value { dim: [1] } }'

FILES = (
    error("repository-readable", ".", "no model folder", remove("minilm")),
    error("config-readable", POST, "2:1", put(f"{POST}/config.pbtxt", 'name: "x"\nbatch: 4')),
    error(
        "config-readable", POST, "byte 7 is not UTF-8", put(f"{POST}/config.pbtxt", b'name: "\xff"')
    ),
    error("config-readable", ENS, "scheduling_choice", append(ENS, BATCHING)),
    error("config-readable", "notes", "neither", put("notes/1/todo.txt", "x")),
    error("config-readable", ".git", "neither", put(".git/HEAD", "x")),
    error("config-readable", POST, "does not complete", remove(f"{POST}/config.pbtxt")),
    warning("config-readable", CORE, "onnxruntime", remove(f"{CORE}/config.pbtxt")),
    error("model-name", POST, "otherprocess", replace(POST, "minilm_post", "other")),
    error("version-folder", "minilm", "none", remove("minilm/1/")),
    error("version-folder", POST, "1a", remove(f"{POST}/1/"), put(f"{POST}/1a/model.py", PLAIN_PY)),
    warning("version-folder", CORE, "01", put("minilm_core/01/", "")),
    warning(
        "version-policy",
        POST,
        "versions 3, folders 1",
        append(POST, "version_policy { specific { versions: [1, 3] } }"),
    ),
    error(
        "version-policy",
        POST,
        "none",
        append(POST, "version_policy { latest { num_versions: 0 } }"),
    ),
    error("model-file", ONNX_FILE, "none", remove("minilm_core/1/"), put("minilm_core/1/", "")),
    error("model-file", PLAN_FILE, "empty", put(PLAN_FILE, ""), layout="plan"),
    error(
        "model-file",
        PLAN_FILE,
        "git LFS",
        put(PLAN_FILE, "version https://git-lfs.github.com/spec/v1\n"),
        layout="plan",
    ),
    error(
        "model-file",
        f"{POST}/1/step.py",
        "model.py",
        append(POST, 'default_model_filename: "step.py"'),
    ),
    warning("step-settings", f"{PRE}/1/settings.json", "no file", remove(f"{PRE}/1/settings")),
    error(
        "step-settings",
        f"{PRE}/1/settings.json",
        "not JSON: Expecting value",
        put(f"{PRE}/1/settings.json", ""),
    ),
    error(
        "step-settings",
        f"{PRE}/1/settings.json",
        "no JSON object",
        put(f"{PRE}/1/settings.json", "[1]"),
    ),
    error(
        "referenced-file",
        f"{PRE}/1/words.json",
        "reads words.json",
        model_py(PRE, MODEL_PY.replace(b"tokenizer.json", b"words.json")),
    ),
    error(
        "referenced-file",
        f"{PRE}/1/rules.json",
        "reads rules.json",
        put(
            f"{PRE}/1/triton_io.py",
            'from pathlib import Path\nRULES = Path(__file__).parent / "rules.json"\n',
        ),
    ),
    warning(
        "referenced-file",
        "solo",
        "words: vocab.txt",
        solo('parameters { key: "words" value { string_value: "vocab.txt" } }'),
    ),
    error("referenced-file", CORE, "9.0: h.plan", append(CORE, CAPABILITIES), layout="plan"),
    error(
        "referenced-file",
        CORE,
        "l" * 300,  # longer than a file's name can be
        replace(CORE, "dims: [384]", f'dims: [384] label_filename: "{"l" * 300}"'),
    ),
    error(
        "referenced-file",
        CORE,
        "labels.txt",
        replace(CORE, "dims: [384]", 'dims: [384] label_filename: "labels.txt"'),
    ),
    error("lock-readable", LOCK, "not JSON", put(LOCK, "{")),
    error("lock-readable", LOCK, "a list", put(LOCK, "[]")),
    error("lock-readable", LOCK, "`files`", put(LOCK, '{"files": {"minilm/1": 3}}')),
    error("lock-readable", LOCK, "`traffic`", put(LOCK, '{"traffic": 300}')),
    error(
        "lock-files",
        f"{PRE}/1/tokenizer.json",
        "the content has changed",
        relock(),
        put(f"{PRE}/1/tokenizer.json", "{ }"),
    ),
    error(
        "lock-files",
        f"{PRE}/1/x.json",
        "missing",
        put(f"{PRE}/1/x.json", "{}"),
        relock(),
        remove(f"{PRE}/1/x.json"),
    ),
    error(
        "shared-core",
        LOCK,
        "the core of minilm_core was rebuilt since",
        put("minilm_core/triptych.lock.json", '{"core_key": "new"}'),
        put(LOCK, '{"core_key": "old", "spec": {"core": {"shared_from": "minilm_core"}}}'),
    ),
    warning("traffic", LOCK, "49 rows", relock(rows=49)),
    warning("traffic", LOCK, "6.0%", relock(truncated_share=0.06)),
    warning(
        "traffic",
        LOCK,
        "2 different words, 2.0% of all; 98%",
        relock(words=2, vocabulary_share=0.02, near_duplicates=0.98),
    ),
    warning(
        "gate-accepted",
        LOCK,
        "accepted although it failed: good enough for a trial",
        put(LOCK, '{"gate": {"failures": ["x"], "accepted": "good enough for a trial"}}'),
    ),
    error("python-model", f"{POST}/1/model.py", "line 1", model_py(POST, "def broken(:\n")),
    error("python-model", f"{POST}/1/model.py", "Other", model_py(POST, "class Other: pass\n")),
    error(
        "python-model",
        f"{POST}/1/model.py",
        "initialize",
        model_py(POST, PLAIN_PY.replace(b"execute", b"initialize")),
    ),
    warning(
        "python-import",
        f"{POST}/1/model.py",
        "scipy",
        model_py(POST, b"import numpy, scipy.special\n" + PLAIN_PY),
    ),
    error("python-import", f"{POST}/1/model.py", "triton_io", remove(f"{POST}/1/triton_io.py")),
    error("python-kind", POST, "KIND_GPU", replace(POST, "KIND_CPU", "KIND_GPU")),
    warning("python-kind", POST, "KIND_AUTO", replace(POST, "KIND_CPU", "KIND_AUTO")),
    warning(
        "python-kind",
        POST,
        "no instance_group",
        replace(POST, "instance_group [{ count: 2 kind: KIND_CPU }]", ""),
    ),
)

CONFIGS = (
    error(
        "triton-version",
        ENS,
        "max_inflight_requests, new in 25.11",
        replace(ENS, "ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 8"),
        triton="25.10",
    ),
    error("triton-version", POST, "model_metrics", append(POST, "model_metrics { }")),
    error("triton-version", CORE, "precision_mode BF16, new in 26.02", append(CORE, BF16)),
    error("backend-known", POST, "pythn", replace(POST, '"python"', '"pythn"')),
    warning("backend-known", POST, "rust", replace(POST, '"python"', '"rust"')),
    error("backend-known", CORE, "tensorrt_plan", append(CORE, 'platform: "tensorrt_plan"')),
    error("backend-known", ENS, "platform ''", replace(ENS, 'platform: "ensemble"', "")),
    error(
        "backend-known",
        "idle",
        "none",
        put("idle/config.pbtxt", 'platform: "ensemble"'),
        put("idle/1/", ""),
    ),
    error(
        "backend-known",
        "idle",
        "no backend",
        put("idle/config.pbtxt", 'name: "idle"'),
        put("idle/1/", ""),
    ),
    error(
        "tensor-valid",
        POST,
        "extra: 0",
        more_outputs(POST, 'name: "extra" data_type: TYPE_INT32 dims: [0]'),
    ),
    error("tensor-valid", POST, "extra: none", more_outputs(POST, 'name: "extra" dims: [1]')),
    error(
        "tensor-valid",
        POST,
        "extra: none",
        more_outputs(POST, 'name: "extra" data_type: TYPE_INT32'),
    ),
    error(
        "tensor-valid", POST, "0: no name", more_outputs(POST, "data_type: TYPE_INT32 dims: [1]")
    ),
    error(
        "tensor-valid",
        POST,
        "twice: embedding",
        more_outputs(POST, 'name: "embedding" data_type: TYPE_FP32 dims: [384]'),
    ),
    error(
        "tensor-valid",
        POST,
        "[2, -1, 3]",
        more_outputs(
            POST, 'name: "x" data_type: TYPE_INT32 dims: [6, -1] reshape { shape: [2, -1, 3] }'
        ),
    ),
    error("ensemble-fields", ENS, "instance_group", append(ENS, "instance_group [{ count: 1 }]")),
    error(
        "ensemble-fields",
        ENS,
        "optimization",
        append(ENS, "optimization { priority: PRIORITY_MAX }"),
    ),
    warning("instance-group", POST, "takes 1", replace(POST, "count: 2 ", "")),
    warning("instance-group", CORE, "takes 2", replace(CORE, "count: 2 ", "")),
    warning("instance-group", POST, "-1", replace(POST, "count: 2", "count: -1")),
    error("instance-group", POST, "gpus 0", replace(POST, "KIND_CPU", "KIND_CPU gpus: [0]")),
    error(
        "instance-group", CORE, "gpus -1", replace(CORE, "gpus: [0]", "gpus: [-1]"), layout="plan"
    ),
    error(
        "instance-group", CORE, "onnxruntime", replace(CORE, "KIND_CPU", 'KIND_CPU profile: "0"')
    ),
    error("instance-group", CORE, "first", replace(CORE, '"0"', '"first"'), layout="plan"),
    warning("instance-group", CORE, "0, 1", replace(CORE, '["0"]', '["0", "1"]'), layout="plan"),
    error(
        "response-cache",
        "solo",
        "decoupled",
        solo(f"{CACHED} model_transaction_policy {{ decoupled: true }}"),
    ),
    error(
        "response-cache",
        "solo",
        "sequence_batching",
        solo(f"{CACHED} sequence_batching {{ }}"),
    ),
    error(
        "response-cache",
        ENS,
        "minilm_postprocess reads dimensions, encoding",
        append(ENS, CACHED),
        put(f"{POST}/1/settings.json", OPTIONS),
    ),
    error(
        "response-cache",
        ENS,
        "minilm_preprocess accepts them",
        append(ENS, CACHED),
        put(f"{PRE}/1/settings.json", REFUSES_NO_PARAMETERS),
    ),
    error("response-cache", PRE, "minilm_preprocess", append(PRE, CACHED)),
    error(
        "response-cache",
        "outer",
        "decoupled solo",
        solo("model_transaction_policy { decoupled: true }"),
        ensemble("outer", "x", "y", "solo a=x > c=y"),
        append("outer", CACHED),
    ),
    warning(
        "response-cache",
        "solo",
        "solo/1/model.py calls request.parameters()",
        solo(CACHED, PLAIN_PY + b"    def ask(self, request):\n        request.parameters()\n"),
    ),
    error("warmup", CORE, "64 rows", replace(CORE, "batch_size: 2", "batch_size: 64")),
    error("warmup", CORE, "no data for input_ids", replace(CORE, f"inputs {{ {INPUT_IDS} }}", "")),
    warning(
        "warmup",
        CORE,
        "unknown input ids",
        replace(
            CORE, INPUT_IDS, f"{INPUT_IDS} }} inputs {{ {INPUT_IDS.replace('input_ids', 'ids')}"
        ),
    ),
    error("warmup", CORE, "TYPE_INT64", warm(INPUT_IDS.replace("INT32", "INT64"))),
    error("warmup", CORE, "[-1]", warm(INPUT_IDS.replace("16", "-1"))),
    error("warmup", CORE, "[1, 16]", warm(INPUT_IDS.replace("16", "1, 16"))),
    error("warmup", CORE, "input_ids has none", warm(INPUT_IDS.replace("zero_data: true", ""))),
    error("warmup", CORE, "warmup/ids", warm(IDS_FROM_FILE)),
    error(
        "warmup", CORE, "63 bytes, 64", warm(IDS_FROM_FILE), put(f"{CORE}/warmup/ids", b"\0" * 63)
    ),
    warning("warmup", CORE, "no batch_size", replace(CORE, "batch_size: 2", "")),
    warning("warmup", CORE, "input_ids", warm(INPUT_IDS.replace("zero_data", "random_data"))),
    error(
        "graph-spec",
        CORE,
        "unknown input ids",
        replace(CORE, "graph_spec { batch_size: 8", f"graph_spec {{ batch_size: 8 {UNKNOWN}"),
        layout="buckets",
    ),
    error(
        "graph-spec",
        CORE,
        "batch_size 64",
        replace(CORE, "graph_spec { batch_size: 8", "graph_spec { batch_size: 64"),
        layout="buckets",
    ),
    error("graph-spec", CORE, "[-1]", replace(CORE, "dim: [32]", "dim: [-1]"), layout="buckets"),
    error("graph-spec", CORE, "[2]", replace(CORE, "dim: [1]", "dim: [2]"), layout="buckets"),
)

BROKEN_MODELS = FILES + CONFIGS
