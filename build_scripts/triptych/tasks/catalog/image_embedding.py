"""Task `image-embedding`: a vector of each image, as the model of transformers computes it."""

from __future__ import annotations

from dataclasses import replace

from triptych.base.tensors import Tensor
from triptych.models.image_vectors import image_class
from triptych.models.info import ModelInfo
from triptych.tasks.catalog import text_embedding
from triptych.tasks.labeled import SIMILARITY, SIMILARITY_CORRELATION
from triptych.tasks.task import IMAGE, Core, Parameters, View, has_image_processor, same_form


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    vector = Tensor("sentence_embedding", "FP32", (info.embedding_size,))
    return Core(image_class(info.architecture), "image", returns="vector", outputs=(vector,))


TASK = replace(
    text_embedding.TASK,
    name="image-embedding",
    loader="",
    inputs=(IMAGE,),
    rows="rows_image.ImageRowMaker",
    core=_core,
    form=same_form,
    labeled=SIMILARITY_CORRELATION._replace(truth=SIMILARITY._replace(second="image_pair")),
    parameters=text_embedding.vector_parameters,
    settings=lambda info: {},
    view=View("vectors"),
    request_rows=8,  # decoding takes long: a request with many images would hold up the others
    check=has_image_processor,
    reads_image_vectors=True,
)
