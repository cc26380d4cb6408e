"""YAML as its writers mean it: ``1e-5`` is a number, and a key given twice is a mistake."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    pass


# YAML 1.1, which PyYAML follows, wants a dot and a sign: it reads 1e-5 as a text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            mark = node.value[index][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str) -> Any:
    """The plain data of a YAML document.

    Raises:
        ValueError: not YAML; the message says where.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
