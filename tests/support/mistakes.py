"""Mistakes of a user, and the errors that name them."""

from collections.abc import Callable
from typing import Any

import pytest

from triptych.base.errors import UserError


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> UserError:
    """Return the error of a call that must be refused."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return caught.value


def check_refused(words: str | list[str], call: Callable[..., Any], *arguments: Any) -> None:
    """Check that a call is refused with a message that has all the words."""
    message = refusal(call, *arguments).message
    for word in [words] if isinstance(words, str) else words:
        assert word in message, (word, message, arguments)
