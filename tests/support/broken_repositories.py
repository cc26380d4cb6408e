"""Copies of a built repository in which one thing is wrong, as a faulty deployment has it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]


def copy_of(repository: Path, name: str, target: Path) -> Path:
    """The models of the pipeline `name` alone."""
    for model in sorted(repository.glob(f"{name}*")):
        shutil.copytree(model, target / model.name)
    return target


def scale_a_layer(repository: Path, name: str) -> None:
    """The largest matrix of the core is half as large again."""
    _change_matrix(repository, name, lambda values: values * np.float32(1.5))


def lose_a_number(repository: Path, name: str) -> None:
    """One element of the largest matrix of the core is no number."""

    def change(values: Matrix) -> Matrix:
        changed = values.copy()
        changed.flat[0] = np.nan
        return changed

    _change_matrix(repository, name, change)


def _change_matrix(repository: Path, name: str, change: Callable[[Matrix], Matrix]) -> None:
    import onnx
    from onnx import numpy_helper

    path = repository / f"{name}_core/1/model.onnx"
    model = onnx.load(path)
    read = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    matrices = [
        tensor
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and tensor.name not in read  # embeddings are looked up
    ]
    largest = max(matrices, key=lambda tensor: np.prod(tensor.dims))
    changed = change(numpy_helper.to_array(largest))
    largest.CopyFrom(numpy_helper.from_array(changed, largest.name))
    onnx.save(model, path)


def swap_labels(repository: Path, name: str) -> None:
    """The first two labels of the postprocess step change places."""
    path = repository / f"{name}_postprocess/1/settings.json"
    settings = json.loads(path.read_bytes())
    settings["labels"][:2] = settings["labels"][1::-1]
    path.write_text(json.dumps(settings), encoding="utf-8")


def shift_offsets(repository: Path, name: str) -> None:
    """Entities begin one character late."""
    path = repository / f"{name}_postprocess/1/decode_entities.py"
    text = path.read_text(encoding="utf-8")
    right = '"start": start,'
    assert text.count(right) == 1
    path.write_text(text.replace(right, '"start": start + 1,'), encoding="utf-8")


def mix_answers_up(repository: Path, name: str) -> None:
    """Some requests get the answer of another: what a faulty batcher would do."""
    path = repository / f"{name}_postprocess/1/model.py"
    text = path.read_text(encoding="utf-8")
    right = "result = self._decoder.decode("
    assert text.count(right) == 1
    mixed = text.replace(right, "result = _mix(self._decoder.decode, ")
    path.write_text(
        mixed
        + """

_last = []


def _mix(decode, *arguments):
    \"\"\"Give every ninth request the answer of the one before it.\"\"\"
    _last.append(decode(*arguments))
    return _last[-2] if len(_last) % 9 == 0 else _last[-1]
""",
        encoding="utf-8",
    )
