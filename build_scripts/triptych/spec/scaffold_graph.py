"""Fit a new pipeline to the inputs and outputs of the user's model."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from triptych.base.onnx_edges import read_labels
from triptych.base.onnx_graph import GraphInterface, GraphTensor
from triptych.runtime.hooking import HOOKS_FILE
from triptych.spec.model_fields import RESERVED_NAMES, RESERVED_PREFIXES, ValueType
from triptych.spec.traffic import TRAFFIC_FILE

SAMPLES = ("disc.png", "gradient.png", "red.png", "stripes.png")
"""Images of the template `image-classification`."""
LABELS_FILE = "labels.json"
DEFAULT_SIDE = 224
"""Height and width of images for a graph that takes any size and does not name one."""
MAX_LENGTH = 512
"""Largest size of a free axis in a new spec."""
RANDOM_ROWS = 16
MAX_ELEMENTS = 20_000
"""Maximum number of numbers in the random rows of an input."""
MAX_SHOWN = 16
"""Maximum number of elements in the command that the spec shows."""

_TYPES: Mapping[str, ValueType] = {"FLOAT": "float", "FLOAT16": "float", "DOUBLE": "float"}
"""Type of a value by that of ONNX; `bool` for BOOL, and `int` for all others."""
_EXAMPLE_FILES = ("model.onnx", "make_model.py")
"""Files of a template that are of no use with another model."""

_IMAGES = '''

def _pixels(files):
    """Return images as an array {shape}, from 0 to {top}.

    Scale the values and the image as your model was trained.
    """
    pixels = np.zeros({zeros}, np.float32)
    for row, data in enumerate(files):
        try:
            image = Image.open(io.BytesIO(data)).convert("{mode}")
        except OSError as error:
            raise ValueError(f"the image cannot be decoded: {{error}}", row) from error
        resized = np.asarray(image.resize((WIDTH, HEIGHT)), np.float32).reshape({flat})
        pixels[row] = resized{order}{scale}
    return pixels{cast}
'''


class Described(NamedTuple):
    """Interface of the user's model, as far as it is known.

    Attributes:
        graph: Inputs and outputs of the ONNX file, or of the graph of the module.
        ranges: Smallest and largest value of inputs that index tables, infinite without a limit.
        of: Number of the free axis for each input of a module that has it, with the batch as 0.
        scalars: Inputs of a module of the shape ``[batch]``.
    """

    graph: GraphInterface
    ranges: Mapping[str, tuple[float, float]]
    of: Mapping[str, int] = {}
    scalars: Sequence[str] = ()


def fit_graph(spec: str, target: Path, folder: Path, model: Described, samples: Path) -> str:
    """Return the spec of a new pipeline with the interface of the user's model.

    Functions, labels and traffic in `target` are written to fit. A template whose functions do not
    name the graph's tensors stays as it is.

    Args:
        spec: Text of the spec from a template.
        target: Folder with the other files of the template.
        folder: Folder that the pipeline will have.
        samples: Folder with `SAMPLES`.
    """
    hooks = target / HOOKS_FILE
    text = hooks.read_text(encoding="utf-8") if hooks.is_file() else ""
    if text and not re.search(r"(?m)^INPUT = ", text):
        return spec
    for name in _EXAMPLE_FILES:
        (target / name).unlink(missing_ok=True)
    spec = re.sub(r"(?m)^# model\.onnx is .*\n(# .*\n)*?(?=task:)", "", spec)
    spec = re.sub(r"(?m)^(  (onnx|module): \S+) .*$", r"\1", spec)
    if not text:
        return _Fitted(model).write(spec, target, folder, samples)
    hooks.write_text(_fit_detection(text, target, model.graph), encoding="utf-8")
    return spec


def _fit_detection(hooks: str, target: Path, graph: GraphInterface) -> str:
    """Return the functions of a detector with the names, size and labels of a graph."""
    image = next((tensor for tensor in graph.inputs if _channels(tensor)), graph.inputs[0])
    values = {"INPUT": image.name, "OUTPUT": graph.outputs[0].name, "SIZE": _sides(image, graph)[0]}
    for name, value in values.items():
        line = f"{name} = {json.dumps(value)}".replace("\\", r"\\")
        hooks = re.sub(rf"(?m)^{name} = (\d+|\"[^\"]*\")", line, hooks)
    names = re.findall(r"\d+: *['\"]([^'\"]*)['\"]", graph.metadata.get("names", ""))
    if not names:
        last = [axis for axis in graph.outputs[0].row_axes if isinstance(axis, int)]
        count = max(1, min(last, default=84) - 4) if len(graph.outputs) == 1 else 80
        names = [f"class {index}" for index in range(count)]
    (target / LABELS_FILE).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    return hooks


def _channels(tensor: GraphTensor) -> tuple[int, bool] | None:
    """Return the channels of an input for images, and whether they are its second axis."""
    axes = tensor.row_axes
    if len(axes) == 3 and tensor.kind in ("FLOAT", "FLOAT16", "UINT8"):
        for index in (0, 2):
            if axes[index] in (1, 3):
                return int(axes[index]), index == 0
    return None


def _sides(image: GraphTensor, graph: GraphInterface) -> tuple[int, int]:
    """Return height and width of the images of a graph."""
    found = _channels(image)
    sides = image.row_axes[1:] if found is None or found[1] else image.row_axes[:2]
    named = [int(each) for each in re.findall(r"\d+", graph.metadata.get("imgsz", ""))]
    usual = (*named, *named) if named else (DEFAULT_SIDE, DEFAULT_SIDE)
    height, width = (s if isinstance(s, int) else u for s, u in zip(sides, usual, strict=False))
    return height, width


class _Fitted:
    """Fields of a spec by the tensors of a model."""

    def __init__(self, model: Described) -> None:
        self._graph, self._ranges, self._of, self._scalars = graph, *_ = model
        self._taken: set[str] = set()
        self._inputs = {self._name(tensor): tensor for tensor in graph.inputs}
        self._outputs = {self._name(tensor): tensor for tensor in graph.outputs}
        self._images = {name for name, tensor in self._inputs.items() if _channels(tensor)}
        self._free = sorted(
            {
                axis
                for name, tensor in self._inputs.items()
                for axis in tensor.row_axes
                if isinstance(axis, str) and name not in self._images
            }
        )

    def write(self, spec: str, target: Path, folder: Path, samples: Path) -> str:
        """Write functions and traffic; return the text of the spec."""
        rows = list(self._rows())
        lines = [json.dumps(row) + "\n" for row in rows]
        (target / TRAFFIC_FILE).write_text("".join(lines), encoding="utf-8")
        for name in SAMPLES if self._images else ():
            (target / "samples").mkdir(exist_ok=True)
            (target / "samples" / name).write_bytes((samples / name).read_bytes())
        if hooks := self._hooks():
            (target / HOOKS_FILE).write_text(hooks, encoding="utf-8")
        head, rest = re.split(r"(?m)^inputs:", spec, maxsplit=1)
        tail = rest[rest.index("# An input that is not") :]
        command = f"triptych infer {folder.name} {self._example(rows[0], folder)}"
        head = re.sub(r"(?m)^# Try it: .*$", lambda _: f"# Try it: {command}", head)
        return head + "\n".join(self._fields()) + "\n" + tail

    def _name(self, tensor: GraphTensor) -> str:
        name = field_name(tensor.name)
        while name in self._taken:
            name += "_out"
        self._taken.add(name)
        return name

    def _fields(self) -> Iterator[str]:
        if self._scalars:
            yield f"  scalars: {json.dumps(self._scalars)}   # of the shape [batch]"
        yield from free_axes_text(self._free, self._of)
        yield "inputs:                      # one value a row"
        for name, tensor in self._inputs.items():
            is_file = name in self._images
            yield f"  {name}: " + (
                "{type: bytes}   # an image file"
                if is_file
                else field_text(tensor, self._ranges.get(tensor.name))
            )
        yield "outputs:"
        labels = read_labels(self._graph.metadata)
        metric = "   # metric: exact | max_difference | cosine | top1 | iou | function"
        for name, tensor in self._outputs.items():
            is_text = tensor.name in labels
            yield f"  {name}: {'{type: text}' if is_text else field_text(tensor)}{metric}"
            metric = ""

    def _rows(self) -> Iterator[dict[str, object]]:
        random = np.random.default_rng(0)
        for number in range(len(SAMPLES) if self._images else RANDOM_ROWS):
            low, high = (8, 33) if len(self._free) == 1 else (16, 17)  # all rows have one size
            sizes = {axis: int(random.integers(low, high)) for axis in self._free}
            row: dict[str, Any] = {}
            for name, tensor in self._inputs.items():
                if name in self._images:
                    row[name] = f"samples/{SAMPLES[number]}"
                    continue
                shape = [sizes[a] if isinstance(a, str) else a for a in tensor.row_axes]
                row[name] = random_value(name, tensor, shape, random, self._ranges)
            yield row
            if sum(len(json.dumps(value)) for value in row.values()) > MAX_ELEMENTS:
                return

    def _example(self, row: Mapping[str, Any], folder: Path) -> str:
        """Return the options of the command that sends the first row."""
        if any(np.size(value) > MAX_SHOWN for value in row.values()):
            return f"--file {shlex.quote(str(folder / TRAFFIC_FILE))}"
        texts = (
            f"{name}={folder / value if name in self._images else json.dumps(value)}"
            for name, value in row.items()
        )
        return " ".join(f"--input {shlex.quote(text)}" for text in texts)

    def _hooks(self) -> str:
        """Return functions; empty if tensors of the same names suffice."""
        parts = []
        if self._images or any(name != tensor.name for name, tensor in self._inputs.items()):
            parts.append(_function("preprocess", "rows", self._inputs, self._images))
        if any(name != tensor.name for name, tensor in self._outputs.items()):
            parts.append(_function("postprocess", "arrays", self._outputs, ()))
        head = '"""Runs in the server, around the model. `triptych test` checks the functions."""\n'
        if not self._images:
            return head + "".join(parts) if parts else ""
        image = self._inputs[min(self._images)]
        height, width = _sides(image, self._graph)
        head += "\nimport io\n\nimport numpy as np\nfrom PIL import Image\n\n"
        head += f"HEIGHT, WIDTH = {height}, {width}\n"
        return head + "".join(parts) + _pixels(image)


def field_name(name: str) -> str:
    """Return the name of a field, which differs from the tensor's if a spec cannot have it."""
    name = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
    if not name[:1].isalpha() or name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
        name = f"value_{name}".rstrip("_")
    return name


def free_axes_text(free: Sequence[str], of: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of a spec for the free axes of a model besides the batch."""
    if len(free) == 1:
        sizes = f"{{max: {MAX_LENGTH}{f', of: {json.dumps(of)}' if of else ''}}}"
        yield f"  axes: {{{json.dumps(free[0])}: {sizes}}}   # a longer row is rejected"
    elif free:
        yield f"  # Free axes: {', '.join(free)}. All rows need arrays of one"
        yield "  # size; or declare the one that differs: axes: {NAME: {max: SIZE}}."


def random_value(
    name: str,
    tensor: GraphTensor,
    shape: Sequence[int],
    random: np.random.Generator,
    ranges: Mapping[str, tuple[float, float]],
) -> object:
    """Return a value for a row of the traffic, as JSON has it."""
    value: object
    if "mask" in name or tensor.kind == "BOOL":  # of the present elements
        value = np.ones(shape, np.bool_ if tensor.kind == "BOOL" else np.int64)
    elif tensor.kind in _TYPES:
        value = random.normal(size=shape).round(3)
    else:
        low, high = ranges.get(tensor.name, (1, 9))
        low = low if math.isfinite(low) else min(1, high)
        value = random.integers(int(low), int(min(high, low + 9)) + 1, shape)
    return value.tolist() if list(shape) != [1] else value.item()


def field_text(tensor: GraphTensor, limits: tuple[float, float] | None = None) -> str:
    """Return the declaration of an input or output, with its limits if known."""
    kind = "bool" if tensor.kind == "BOOL" else _TYPES.get(tensor.kind, "int")
    axes = [
        a if isinstance(a, int) else f"axis_{i}" if not re.fullmatch("[a-z][a-z0-9_]*", a) else a
        for i, a in enumerate(tensor.row_axes, start=1)
    ]
    shape = "" if axes == [1] else f", shape: [{', '.join(map(str, axes))}]"
    bounds = zip(("min", "max"), limits or (), strict=False)
    more = "".join(f", {name}: {each:.17g}" for name, each in bounds if math.isfinite(each))
    return f"{{type: {kind}{shape}{more}}}"


def _function(
    name: str, argument: str, fields: Mapping[str, GraphTensor], images: Sequence[str] | set[str]
) -> str:
    """Return the text of a function that passes on values under other names."""
    pairs = []
    for field, tensor in fields.items():
        source, target = (field, tensor.name) if name == "preprocess" else (tensor.name, field)
        value = f"{argument}[{json.dumps(source)}]"
        if field in images:
            value = f"_pixels({value})"
        elif name == "preprocess" and list(tensor.row_axes) == [1]:
            value += "[:, None]"
        pairs.append(f"        {json.dumps(target)}: {value},\n")
    return f"\n\ndef {name}({argument}, parameters):\n    return {{\n{''.join(pairs)}    }}\n"


def _pixels(image: GraphTensor) -> str:
    """Return the text of the function that decodes images."""
    channels, is_second = _channels(image) or (3, True)
    sides = ["HEIGHT", "WIDTH"]
    axes = [str(channels), *sides] if is_second else [*sides, str(channels)]
    is_bytes = image.kind == "UINT8"
    return _IMAGES.format(
        shape=f"[rows, {', '.join(axes)}]",
        top=255 if is_bytes else 1,
        zeros=f"(len(files), {', '.join(axes)})",
        mode="L" if channels == 1 else "RGB",
        flat=f"HEIGHT, WIDTH, {channels}",
        order=".transpose(2, 0, 1)" if is_second else "",
        scale="" if is_bytes else " / 255",
        cast=".astype(np.uint8)" if is_bytes else "",
    )
