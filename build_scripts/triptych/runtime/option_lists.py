"""Options whose value is a list of strings."""

from __future__ import annotations

import json

from .request_errors import RequestError


def read_list(field: str, text: str, words: str) -> list[str]:
    """Return the list in `text`: JSON if it begins with ``[``, otherwise split at commas.

    Args:
        field: Name of the option in errors.
        text: Value of the option.
        words: Description of its values in errors.

    Raises:
        RequestError: The text is not such a list, or the list is empty.
    """
    if not text.lstrip().startswith("["):
        names = [part.strip() for part in text.split(",") if part.strip()]
    else:
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(field, f"must be {words}", str(error), "Correct the JSON") from error
        if not all(isinstance(part, str) and part.strip() for part in names):
            raise RequestError(field, f"must be {words}", repr(text)[:80], "Correct the list")
    if not names:
        raise RequestError(field, "must not be empty", "an empty list", "Name at least one item")
    return names
