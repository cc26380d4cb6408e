"""Copies of a built repository in which one thing is wrong, as a faulty deployment has it."""

import shutil
from pathlib import Path

import numpy as np


def copy_of(repository: Path, name: str, target: Path) -> Path:
    """The models of the pipeline `name` alone."""
    for model in sorted(repository.glob(f"{name}*")):
        shutil.copytree(model, target / model.name)
    return target


def scale_a_layer(repository: Path, name: str, factor: float = 1.5) -> None:
    """The largest matrix of the core is multiplied by `factor`."""
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
    changed = numpy_helper.to_array(largest) * np.float32(factor)
    largest.CopyFrom(numpy_helper.from_array(changed, largest.name))
    onnx.save(model, path)


def lose_a_number(repository: Path, name: str) -> None:
    """The largest matrix of the core holds no numbers."""
    scale_a_layer(repository, name, np.nan)


def _replace(path: Path, old: str, new: str, more: str = "") -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new) + more, encoding="utf-8")


def shift_offsets(repository: Path, name: str) -> None:
    """Entities begin one character late."""
    path = repository / f"{name}_postprocess/1/decode_entities.py"
    _replace(path, '"start": start,', '"start": start + 1,')


_MIX = """

_last = []


def _mix(decode, *arguments):
    \"\"\"Give every ninth request the answer of the one before it.\"\"\"
    _last.append(decode(*arguments))
    return _last[-2] if len(_last) % 9 == 0 else _last[-1]
"""


def mix_answers_up(repository: Path, name: str) -> None:
    """Some requests get the answer of another: what a faulty batcher would do."""
    path = repository / f"{name}_postprocess/1/model.py"
    _replace(path, "self._decoder.decode(", "_mix(self._decoder.decode, ", _MIX)
