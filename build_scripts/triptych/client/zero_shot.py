"""Labels of the caller for images, by the two pipelines of a model of texts and images.

The vectors of the labels come from the pair of the client's pipeline, once for each text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triptych.client.answers import Choice, Vectors
from triptych.client.errors import InvalidRequestError, RowError
from triptych.client.flows import Flow, PipelineClient
from triptych.client.images import Images
from triptych.client.retry import Deadline
from triptych.client.tasks import TaskCall, embed, embed_images
from triptych.client.wire import VectorSpace

MAX_LABELS = 10_000
"""Maximum number of labels of a call, and of texts whose vectors a client keeps."""
TEMPLATE = "This is a photo of {}."
"""Default text that is compared with an image."""


def classify_images_zero_shot(
    self: PipelineClient,
    images: Images,
    candidate_labels: Sequence[str],
    *,
    hypothesis_template: str = TEMPLATE,
    timeout_s: float | None = None,
) -> Flow[list[list[Choice]]]:
    """Return scores of `candidate_labels` for each image, without training on them.

    The client is of the pipeline of the images, whose pair on the same server is that of the texts.
    `hypothesis_template` is the text that is compared with an image, with ``{}`` for the label. The
    scores of an image sum to 1, except those of SigLIP, which are independent. Images are as in
    `embed_images`. The client keeps the vectors of the labels.

    Returns:
        For each image all labels, best first.

    Raises:
        InferenceError: See its subclasses; `row` of an `InvalidRequestError` is the faulty row.
    """
    call, choose = yield from _prepare(
        self, images, candidate_labels, hypothesis_template, timeout_s
    )
    work = yield from self._perform_task(call, keep_going=False)
    return [choose(vector) for vector in call.whole(work.outputs())]


def classify_images_zero_shot_each(
    self: PipelineClient,
    images: Images,
    candidate_labels: Sequence[str],
    *,
    hypothesis_template: str = TEMPLATE,
    timeout_s: float | None = None,
) -> Flow[list[list[Choice] | RowError]]:
    """Return for each image its labels, or the error why it was rejected.

    Arguments and errors are those of `classify_images_zero_shot`, but a rejected image does not
    raise.
    """
    call, choose = yield from _prepare(
        self, images, candidate_labels, hypothesis_template, timeout_s
    )
    if call.is_placeholder:
        return []
    rows = call.each((yield from self._perform_task(call, keep_going=True)).each())
    return [row if isinstance(row, RowError) else choose(row) for row in rows]


def _prepare(
    client: PipelineClient, images: Images, labels: object, template: str, timeout_s: float | None
) -> Flow[tuple[TaskCall[Vectors, Vectors], Callable[[Vectors], list[Choice]]]]:
    """Return the call for the vectors of images, and the function from a vector to its labels."""
    found, deadline = _check_labels(labels, template), client._deadline(timeout_s)
    # Read again for each call, because a rebuilt model has another space.
    space = yield from _read_space(client, deadline)
    texts = [template.replace("{}", label) for label in found]
    vectors = yield from _embed_texts(client, space, texts, deadline)

    def choose(vector: Vectors) -> list[Choice]:
        logits = vectors @ vector * np.float32(space.scale)
        if space.bias is None:
            powers = np.exp(logits - logits.max())
            scores = powers / powers.sum()
        else:
            scores = 1 / (1 + np.exp(-(logits + np.float32(space.bias))))
        order = np.argsort(-scores, kind="stable")
        return [Choice(found[place], float(scores[place])) for place in order]

    return embed_images(images, **_options(space, deadline)), choose


def _check_labels(labels: object, template: str) -> Sequence[str]:
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str | bytes)
    found: list[str] = list(labels) if isinstance(labels, Sequence) and is_list else []
    if not 0 < len(found) <= MAX_LABELS or not all(isinstance(label, str) for label in found):
        given = f"{len(found)} labels" if is_list else f"{labels!r:.80}"
        raise InvalidRequestError(
            f"`candidate_labels` must be a list of 1 to {MAX_LABELS} texts. Given: {given}. "
            'Write for example ["a cat", "a dog"].'
        )
    if "{}" not in template or {"{", "}"} & set(template.replace("{}", "")):
        raise InvalidRequestError(
            "`hypothesis_template` must have {} in place of the label, and no other braces. "
            f"Given: {template!r:.80}. Write for example '{TEMPLATE}'."
        )
    return found


def _read_space(client: PipelineClient, deadline: Deadline) -> Flow[VectorSpace]:
    config = yield from client._read_config(deadline)
    if config.space is None:
        raise InvalidRequestError(
            f"`{client.pipeline}` must be the pipeline of the images of a pair. Given: one without "
            "`pair_with`. Set it, and build both pipelines again."
        )
    return config.space


def _options(space: VectorSpace, deadline: Deadline) -> dict[str, Any]:
    """Return the options of the vectors of both pipelines."""
    return {
        "dimensions": space.size,
        "normalize_embeddings": True,
        "encoding": "float",
        "timeout_s": deadline.remaining_s(),
    }


def _embed_texts(
    client: PipelineClient, space: VectorSpace, texts: Sequence[str], deadline: Deadline
) -> Flow[Vectors]:
    """Return the vectors of texts, which the client keeps, from the pair of its pipeline."""
    kept, keys = client._label_vectors, {text: (space.id, text) for text in texts}
    found = {text: kept[key] for text, key in keys.items() if key in kept}
    if new := [text for text in keys if text not in found]:
        pair = copy.copy(client)  # the same connection
        pair.pipeline, pair._config = space.pair_with, None
        if (other := (yield from _read_space(pair, deadline)).id) != space.id:
            raise InvalidRequestError(
                f"`{client.pipeline}` must have the vector space of its pair. Given: "
                f"{space.id}, and {other} in `{pair.pipeline}`. "
                f"Run `triptych build {client.pipeline} {pair.pipeline}`."
            )
        call = embed(new, **_options(space, deadline))
        work = yield from pair._perform_task(call, keep_going=False)
        found |= dict(zip(new, call.whole(work.outputs()), strict=True))
        if len(kept) + len(new) > MAX_LABELS:
            client._label_vectors = kept = {}  # another thread may read the old ones
        kept.update({keys[text]: found[text] for text in new})
    return np.stack([found[text] for text in texts])
