"""Model repositories for the tests of lint: good ones, and the edits of tests/data/lint/*.yaml."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import yaml
from onnx import TensorProto, helper

Files = dict[str, bytes]
"""Path relative to the repository -> content; a path that ends with a slash is an empty folder."""
Edit = Callable[[Files], None]

DATA = Path(__file__).parents[1] / "data/lint"
GOOD = yaml.safe_load((DATA / "repository.yaml").read_text(encoding="utf-8"))
LAYOUTS = tuple(GOOD["layouts"])
EDGES = (16, 32, 64)
CORE, PRE = "minilm_core", "minilm_preprocess"
LOCK = "minilm/triptych.lock.json"
ONNX_FILE = f"{CORE}/1/model.onnx"
PLAIN_PY = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
SOLO = """
name: "solo" backend: "python"
input [{ name: "a" data_type: TYPE_FP32 dims: [1] },
       { name: "b" data_type: TYPE_FP32 dims: [1] optional: true }]
output [{ name: "c" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 2 kind: KIND_CPU }]
"""


def graph_spec(edge: int, rows: int, fewest: int) -> str:
    """Return a CUDA graph for `fewest` to `rows` rows of `edge` tokens."""
    inputs = (
        f'input {{ key: "input_ids" value {{ dim: [{edge}] }} }} '
        'input { key: "row_length" value { dim: [1] } }'
    )
    lower = f"graph_lower_bound {{ batch_size: {fewest} {inputs} }}"
    return f"graph_spec {{ batch_size: {rows} {inputs} {lower} }}"


GRAPHS = tuple(
    graph_spec(edge, rows, fewest) for edge in EDGES for rows, fewest in ((1, 1), (8, 2), (32, 9))
)


def onnx_file(nodes: list[Any], inputs: list[Any], output: Any, weights: list[Any]) -> bytes:
    body = helper.make_graph(nodes, "core", inputs, [output], initializer=weights)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    content: bytes = model.SerializeToString()
    return content


@cache
def graph(
    layout: str,
    *,
    width: int = 384,
    rows: int | str = "rows",
    flat: bool = True,
    dtype: str = "FLOAT",
    middle: str = "FLOAT",
    ids: str = "INT32",
    external: str = "",
) -> bytes:
    """A small ONNX file with the inputs and outputs of a core; `external` names a weights file."""
    packed = layout in ("packed", "plan")
    tokens = ["tokens"] if packed and flat else [rows, "tokens"]
    type_of = TensorProto.DataType.Value
    inputs = [
        helper.make_tensor_value_info("input_ids", type_of(ids), tokens),
        helper.make_tensor_value_info("row_length", TensorProto.INT32, [rows, 1]),
    ]
    if packed:
        inputs.append(helper.make_tensor_value_info("row_stride", TensorProto.INT32, [rows]))
    output = helper.make_tensor_value_info("sentence_embedding", type_of(dtype), [rows, width])
    weights = helper.make_tensor("w", TensorProto.FLOAT, [1, width], [0.0] * width)
    if external:
        weights.ClearField("float_data")
        weights.data_location = TensorProto.EXTERNAL
        weights.external_data.add(key="location", value=external)
    nodes = [
        helper.make_node("Cast", ["row_length"], ["length"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["length", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["middle"], "bf16", to=type_of(middle)),
        helper.make_node("Cast", ["middle"], ["sentence_embedding"], to=type_of(dtype)),
    ]
    return onnx_file(nodes, inputs, output, [weights])


def step_settings(**own: object) -> bytes:
    """The settings of preprocess."""
    return json.dumps({"bucket_edges": list(EDGES), "max_length": EDGES[-1], **own}).encode()


def good_files(layout: str) -> Files:
    """Return the files of a repository without a fault, in one of `LAYOUTS`."""
    files = {name: text.encode() for name, text in GOOD["files"].items()}
    core = Template(GOOD["core"]).substitute(GOOD["layouts"][layout])
    files[f"{CORE}/config.pbtxt"] = core.replace("$graphs", " ".join(GRAPHS)).encode()
    if "onnxruntime" in core:
        files[ONNX_FILE] = graph(layout)
    else:
        files[f"{CORE}/1/model.plan"] = b"a TensorRT plan"
    files[f"{PRE}/1/settings.json"] = step_settings()
    files["minilm_postprocess/1/settings.json"] = b"{}"
    return {**files, LOCK: b""}


def profile(
    rows: list[int], tokens: list[int] | None = None, edge: int | None = None
) -> dict[str, Any]:
    """A profile for so many rows: packed over `tokens`, or of the padded length `edge`."""
    shapes: dict[str, Any] = {"row_length": [(count, 1) for count in rows]}
    if tokens:
        shapes |= {
            "input_ids": [(count,) for count in tokens],
            "row_stride": [(count,) for count in rows],
        }
    else:
        shapes["input_ids"] = [(count, edge) for count in rows]
    return {
        name: {"minimum": low, "optimum": high, "maximum": high}
        for name, (low, high) in shapes.items()
    }


def profiles(*ranges: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Profiles of each range of rows: packed ones, or one for each padded length."""
    if "tokens" in ranges[0]:
        return [profile(one["rows"], one["tokens"]) for one in ranges]
    return [profile(one["rows"], edge=edge) for edge in EDGES for one in ranges]


def make_manifest(files: Files, *ranges: dict[str, list[int]], **traffic: Any) -> dict[str, Any]:
    """Return the lock of `files`, whose engine has the profiles of `ranges`."""
    core = files.get(f"{CORE}/config.pbtxt", b"")
    hashed = {n: c for n, c in files.items() if n != LOCK and not n.endswith("/")}
    lock: dict[str, Any] = {
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in hashed.items()},
        "traffic": {"rows": 300, "truncated_share": 0.01, **traffic},
    }
    if b"tensorrt" in core:
        usual: dict[str, list[int]] = {"rows": [1, 32]}
        if b"allow_ragged_batch" in core:
            usual["tokens"] = [1, 32 * EDGES[-1]]
        made = profiles(*ranges or [usual])
        engine = {"precision": "fp16", "profiles": made, "graph_specs": [], "options": {}}
        lock["plan"] = {"engine": engine}
    return lock


def write_repository(root: Path, layout: str, *edits: Edit) -> Path:
    """Write a good repository with `edits`; the lock covers the edited files unless one sets it."""
    files = good_files(layout)
    for edit in edits:
        edit(files)
    if files.get(LOCK) == b"":
        files[LOCK] = json.dumps(make_manifest(files)).encode()
    for name, content in files.items():
        target = root / name
        if name.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return root


class Edits:
    """The kinds of edits in tests/data/lint/*.yaml, by their names there with `_` for `-`."""

    def __init__(self, files: Files, layout: str) -> None:
        self.files, self.layout = files, layout

    def replace(self, model: str, old: str, new: str) -> None:
        """Replace text in the config of `model`, wherever it occurs."""
        text = self.files[f"{model}/config.pbtxt"].decode()
        if old not in text:
            raise ValueError(f"{old!r} is not in the config of {model}")
        self.write(f"{model}/config.pbtxt", text.replace(old, new))

    def append(self, model: str, text: str) -> None:
        """Add text to the config of `model`."""
        self.files[f"{model}/config.pbtxt"] += text.encode()

    def write(self, path: str, text: str) -> None:
        """Add or overwrite a file; with a trailing slash and no text, a folder."""
        self.files[path] = text.encode()

    def hex(self, path: str, digits: str) -> None:
        """Add or overwrite a file with these bytes."""
        self.files[path] = bytes.fromhex(digits)

    def zeros(self, path: str, count: int) -> None:
        self.files[path] = bytes(count)

    def remove(self, prefix: str) -> None:
        """Remove every file whose path starts with `prefix`."""
        for name in [name for name in self.files if name.startswith(prefix)]:
            del self.files[name]

    def solo(self, extra: str = "", code: str = PLAIN_PY) -> None:
        """Add a Python model of its own, without batching, to the repository."""
        self.write("solo/config.pbtxt", SOLO + extra)
        self.write("solo/1/model.py", code)

    def openvino(self, extra: str = "", dims: str = "-1, 4", more: str = "") -> None:
        """Add a model for OpenVINO to the repository; `more` is added to its only input."""
        self.write(
            "solo/config.pbtxt",
            f'name: "solo" backend: "openvino" '
            f'input {{ name: "x" data_type: TYPE_FP32 dims: [{dims}] {more} }} '
            f'output {{ name: "y" data_type: TYPE_FP32 dims: [{dims}] }} {extra}',
        )
        self.write("solo/1/model.xml", "<net />")

    def generation(self, settings: dict[str, Any]) -> None:
        """Add a Python model that has the settings of a core that generates text."""
        self.solo()
        self.files["solo/1/triton_io.py"] = self.files[f"{PRE}/1/triton_io.py"]
        self.write("solo/1/settings.json", json.dumps(settings))

    def ensemble(self, name: str, inputs: str, outputs: str, *steps: str) -> None:
        """Add an ensemble without batching; a step is ``model in=tensor ... > out=tensor ...``."""
        text = f'name: "{name}" platform: "ensemble" '
        for kind, tensors in (("input", inputs), ("output", outputs)):
            for tensor in tensors.split():
                text += f'{kind} {{ name: "{tensor}" data_type: TYPE_FP32 dims: [1] }} '
        text += "ensemble_scheduling { "
        for step in steps:
            model, *maps = step.split()
            text += f'step {{ model_name: "{model}" model_version: -1 '
            kind = "input_map"
            for pair in maps:
                kind = "output_map" if pair == ">" else kind
                key, _, value = pair.partition("=")
                text += f'{kind} {{ key: "{key}" value: "{value}" }} ' if value else ""
            text += "} "
        self.write(f"{name}/config.pbtxt", text + "}")
        self.write(f"{name}/1/", "")

    def settings(self, step: str, values: dict[str, Any]) -> None:
        """Write the settings of a step, over those that preprocess has."""
        self.files[f"{step}/1/settings.json"] = step_settings(**values)

    def graph(self, change: dict[str, Any] | None = None) -> None:
        """Write an ONNX file, by default the core's, with changes of what it has."""
        settings = {"layout": self.layout, **(change or {})}
        path = settings.pop("path", ONNX_FILE)
        self.files[path] = graph(**settings)

    def operator(self, name: str) -> None:
        """Write a bucketed core whose only node is this operator."""
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["rows", "tokens"]),
            helper.make_tensor_value_info("row_length", TensorProto.INT32, ["rows", 1]),
        ]
        shape: list[str | int] = ["rows", 384]
        output = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, shape)
        node = helper.make_node(name, ["row_length"], ["sentence_embedding"], "odd")
        self.files[ONNX_FILE] = onnx_file([node], inputs, output, [])

    def no_graph(self, number: int) -> None:
        """Remove one of the CUDA graphs."""
        self.replace(CORE, GRAPHS[number], "")

    def no_graphs(self) -> None:
        for number in range(len(GRAPHS)):
            self.no_graph(number)

    def exact_graphs(self, most: int) -> None:
        """Replace the CUDA graphs by one for each padded length and number of rows up to `most`."""
        exact = [graph_spec(edge, rows, rows) for edge in EDGES for rows in range(1, most + 1)]
        self.replace(CORE, " ".join(GRAPHS), " ".join(exact))

    def lock(self, traffic: dict[str, Any] | None = None) -> None:
        """Write the lock now, over the files as they are."""
        self.write(LOCK, json.dumps(make_manifest(self.files, **(traffic or {}))))

    def profiles(self, *ranges: dict[str, list[int]]) -> None:
        """Write the lock now, for an engine with other profiles."""
        self.write(LOCK, json.dumps(make_manifest(self.files, *ranges)))

    def engine(self, record: dict[str, Any]) -> None:
        """Write the lock now, with the record of a finished engine."""
        if record.get("onnx_sha256") == "that of the file":
            record = {"onnx_sha256": hashlib.sha256(self.files[ONNX_FILE]).hexdigest()}
        self.write(LOCK, json.dumps({**make_manifest(self.files), "engine": record}))


@dataclass(frozen=True)
class Case:
    """Edits of a good repository, with the finding that lint must have, if any."""

    name: str
    edits: tuple[Edit, ...]
    layout: str
    triton: str
    severity: str = ""
    given: str = ""
    place: str = ""


def edit(kind: str, *arguments: Any, layout: str = "packed") -> Edit:
    """Return an edit of one of the kinds of `Edits`."""
    return lambda files: getattr(Edits(files, layout), kind.replace("-", "_"))(*arguments)


def read_case(name: str, case: dict[str, Any]) -> Case:
    layout = case.get("layout", "packed")
    edits = tuple(edit(*words, layout=layout) for words in case["edits"])
    severity = next((one for one in ("error", "warning", "info") if one in case), "")
    given, place = case.get(severity, ""), case.get("in", "")
    return Case(name, edits, layout, case.get("triton", "24.10"), severity, given, place)


def read_faults() -> list[Case]:
    """Return the cases of faults.yaml; each has the name of its check."""
    table = yaml.safe_load((DATA / "faults.yaml").read_text(encoding="utf-8"))
    return [read_case(check, case) for check, cases in table.items() for case in cases]


def read_fine() -> list[Case]:
    """Return the cases of fine.yaml; each has the reason why it has no finding as its name."""
    table = yaml.safe_load((DATA / "fine.yaml").read_text(encoding="utf-8"))
    return [read_case(why, case) for why, case in table.items()]
