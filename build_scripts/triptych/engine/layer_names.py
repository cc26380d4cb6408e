"""Which ONNX nodes a layer of TensorRT was made of, as its metadata and its name tell."""

from __future__ import annotations

import re

_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\s|\x1e|\[|$)")
_FUSED = re.compile(r"\s*\+\s*")
_MYELIN = re.compile(r"_myl\d*_\d+$")


def onnx_nodes(metadata: str) -> list[str]:
    """The nodes that ``[ONNX Layer: name][ONNX Layer: …]`` names."""
    return _NODE.findall(metadata)


def parts_of(name: str) -> list[str]:
    """The layers that a fused one was made of: ``a + b``, or ``a+b_myl0_16`` of Myelin's."""
    return [part for part in _FUSED.split(_MYELIN.sub("", name)) if part]
