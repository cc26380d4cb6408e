"""`ModelConfig` messages in and out of ``config.pbtxt``: the protobuf is the config class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.base.errors import UserError

CONFIG_FILE = "config.pbtxt"


def new_config(**fields: Any) -> Any:
    """An `inference.ModelConfig` message with `fields` set.

    Raises:
        ValueError: a field the schema does not have.
    """
    # Imported here: the import pulls in grpc (about 0.25 s), which `--help` must not pay for.
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    return ModelConfig(**fields)


def parse_config(text: str, *, file: str = CONFIG_FILE) -> Any:
    """Parse the text of a ``config.pbtxt``.

    Raises:
        UserError: the text is not a ModelConfig; the message carries line and column.
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, new_config())
    except text_format.ParseError as error:
        raise UserError(
            file,
            "must be a ModelConfig in protobuf text format",
            given=str(error),
            remedy="Mend the line or build the pipeline again",
        ) from error


def read_config(path: Path) -> Any:
    return parse_config(path.read_text(encoding="utf-8"), file=str(path))


def print_config(config: Any) -> str:
    """The text of ``config.pbtxt`` for `config`; equal messages print equal text."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(
        config, use_short_repeated_primitives=True, as_utf8=True
    )
    return text
