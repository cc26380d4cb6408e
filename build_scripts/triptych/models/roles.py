"""Roles of texts for a model with a vector for each token, as `MultiVectorEncoder` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.base.errors import UserError
from triptych.models.info import Role

QUERY, DOCUMENT = "query", "document"
ROLES = (QUERY, DOCUMENT)


def read_roles(
    transformer: Mapping[str, Any], mask: Mapping[str, Any], tokenizer: Any, max_length: int
) -> dict[str, Role]:
    """Return how the texts of each role are read.

    Args:
        transformer: Settings of the Transformer module, as `settings.ROLE_SETTINGS` names them.
        mask: Settings of the module MultiVectorMask.
        max_length: Maximum number of tokens of a text of the model.

    Raises:
        UserError: A setting is not supported, or no token fills the texts of queries.
    """
    if kept := mask.get("keep_only_token_ids"):
        raise _error("keep_only_token_ids of MultiVectorMask", "must be empty for texts", kept)
    tasks = mask.get("skiplist_tasks") or [DOCUMENT]
    skipped = _ids_of(tokenizer, mask.get("skiplist_words") or ())
    roles = {}
    for name in ROLES:
        own = transformer.get(f"{name}_length") or max_length
        roles[name] = Role(min(own, max_length), skipped if name in tasks else ())
    expansion = transformer.get("query_expansion")
    if expansion is None:
        return roles
    query, width, token = roles[QUERY], expansion.get("length"), expansion.get("token")
    if not isinstance(width, int) or not 0 < width <= max_length:
        rule = f"must have a length of 1 to {max_length} tokens"
        raise _error("query_expansion of the Transformer", rule, expansion)
    # As in the library: the mask token, else the one that ends a text.
    fill = tokenizer.mask_token_id
    fill = tokenizer.eos_token_id if fill is None else fill
    if token is not None:
        fill = tokenizer.convert_tokens_to_ids(token)
    if fill is None:
        rule = "must name a token, because the tokenizer has no mask token and no end of a text"
        raise _error("query_expansion of the Transformer", rule, expansion)
    longest = width if expansion.get("strategy") == "fixed" else max(query.max_length, width)
    attended = bool(expansion.get("attend"))
    roles[QUERY] = Role(longest, query.skipped, width, fill, attended)
    return roles


def _ids_of(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of words; unknown ones are left out, as in the library."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = tokenizer.unk_token_id
    return tuple(
        sorted({i for word, i in ids.items() if i != unknown or word == tokenizer.unk_token})
    )


def _error(field: str, rule: str, given: object) -> UserError:
    return UserError(field, rule, given=given, remedy="Choose another model")
