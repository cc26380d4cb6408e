"""Labels of the caller for images, by the two pipelines of a model of texts and images.

The vectors of the labels come from the pair of the client's pipeline, once for each text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from triptych.client.answers import Choice, Vectors
from triptych.client.errors import InvalidRequestError, RowError
from triptych.client.flows import Flow, PipelineClient
from triptych.client.images import Images
from triptych.client.retry import Deadline
from triptych.client.tasks import embed, embed_images
from triptych.client.wire import read_config

MAX_LABELS = 10_000
"""Maximum number of labels of a call, and of texts whose vectors a client keeps."""

Space = Mapping[str, Any]
"""Pair of a pipeline, and the id, size, scale and bias of their vector space."""


def classify_images_zero_shot(
    self: PipelineClient,
    images: Images,
    candidate_labels: Sequence[str],
    *,
    hypothesis_template: str = "This is a photo of {}.",
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
    classify = _Labels(self, candidate_labels, hypothesis_template, timeout_s)
    yield from classify.read()
    call = embed_images(images, **classify.options)
    work = yield from self._perform_task(call, keep_going=False)
    return [classify.choices(vector) for vector in call.whole(work.outputs())]


def classify_images_zero_shot_each(
    self: PipelineClient,
    images: Images,
    candidate_labels: Sequence[str],
    *,
    hypothesis_template: str = "This is a photo of {}.",
    timeout_s: float | None = None,
) -> Flow[list[list[Choice] | RowError]]:
    """Return for each image its labels, or the error why it was rejected.

    Arguments and errors are those of `classify_images_zero_shot`, but a rejected image does not
    raise.
    """
    if not len(images):
        return []
    classify = _Labels(self, candidate_labels, hypothesis_template, timeout_s)
    yield from classify.read()
    call = embed_images(images, **classify.options)
    rows = call.each((yield from self._perform_task(call, keep_going=True)).each())
    return [row if isinstance(row, RowError) else classify.choices(row) for row in rows]


class _Labels:
    """Labels of a call and, after `read`, their vectors."""

    def __init__(
        self, client: PipelineClient, labels: Sequence[str], template: str, timeout_s: float | None
    ) -> None:
        self._client = client
        self._labels = _check_labels(labels)
        slot, rest = "{}" in template, template.replace("{}", "")
        if not slot or "{" in rest or "}" in rest:
            raise InvalidRequestError(
                "`hypothesis_template` must have {} in place of the label, and no other braces. "
                f"Given: {template!r:.80}. Write for example 'This is a photo of {{}}.'."
            )
        self._texts = [template.replace("{}", label) for label in self._labels]
        self._deadline = client._deadline(timeout_s)
        self._space: Space = {}
        self._vectors: NDArray[np.float32] = np.empty((0, 0), np.float32)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the vectors of both pipelines."""
        return {
            "dimensions": self._space["size"],
            "normalize_embeddings": True,
            "encoding": "float",
            "timeout_s": self._deadline.remaining_s(),
        }

    def read(self) -> Flow[None]:
        """Read the vector space, and the vectors of labels that the client does not keep."""
        client, deadline = self._client, self._deadline
        # Asked anew for each call, because a rebuilt model has another space.
        space = self._space = yield from _read_space(client, deadline)
        kept = client._label_vectors
        keys = {text: (space["id"], text) for text in self._texts}
        found = {text: kept[key] for text, key in keys.items() if key in kept}
        new = [text for text in keys if text not in found]
        if new:
            texts = copy.copy(client)  # the same connection
            texts.pipeline, texts._config = space["pair_with"], None
            other = yield from _read_space(texts, deadline)
            if other["id"] != space["id"]:
                raise InvalidRequestError(
                    f"`{client.pipeline}` must have the vector space of its pair. Given: "
                    f"{space['id']}, and {other['id']} in `{texts.pipeline}`. "
                    f"Run `triptych build {client.pipeline} {texts.pipeline}`."
                )
            call = embed(new, **self.options)
            work = yield from texts._perform_task(call, keep_going=False)
            found |= dict(zip(new, call.whole(work.outputs()), strict=True))
            if len(kept) + len(new) > MAX_LABELS:
                client._label_vectors = kept = {}  # another thread may read the old ones
            kept.update({keys[text]: found[text] for text in new})
        self._vectors = np.stack([found[text] for text in self._texts])

    def choices(self, vector: Vectors) -> list[Choice]:
        """Return all labels with their scores for the unit vector of an image, best first."""
        logits = self._vectors @ vector * np.float32(self._space["scale"])
        if self._space["bias"] is None:
            powers = np.exp(logits - logits.max())
            scores = powers / powers.sum()
        else:
            scores = 1 / (1 + np.exp(-(logits + np.float32(self._space["bias"]))))
        order = np.argsort(-scores, kind="stable")
        return [Choice(self._labels[place], float(scores[place])) for place in order]


def _check_labels(labels: object) -> Sequence[str]:
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str | bytes)
    found: list[Any] = list(labels) if isinstance(labels, Sequence) and is_list else []
    if not 0 < len(found) <= MAX_LABELS or not all(isinstance(label, str) for label in found):
        given = f"{len(found)} labels" if is_list else f"{labels!r:.80}"
        raise InvalidRequestError(
            f"`candidate_labels` must be a list of 1 to {MAX_LABELS} texts. Given: {given}. "
            'Write for example ["a cat", "a dog"].'
        )
    return found


def _read_space(client: PipelineClient, deadline: Deadline) -> Flow[Space]:
    request = service_pb2.ModelConfigRequest(name=client.pipeline)
    config = read_config((yield from client._request("ModelConfig", request, deadline)))
    if not config.space:
        raise InvalidRequestError(
            f"`{client.pipeline}` must be the pipeline of the images of a pair. Given: one without "
            "`pair_with`. Set it, and build both pipelines again."
        )
    return config.space
