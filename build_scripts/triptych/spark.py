"""A served pipeline as a function of a column in Spark."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import functions

from triptych.interface.bulk.predictor import Predictor

if TYPE_CHECKING:
    from pyspark.sql.udf import UserDefinedFunctionLike

_VECTOR = MappingProxyType({"embedding": "array<float>"})


def pandas_udf(
    name: str, outputs: Mapping[str, str] = _VECTOR, **options: Any
) -> UserDefinedFunctionLike:
    """Return a function of a column of texts: a struct of outputs, and `error`, null for none.

    >>> df.withColumn("found", pandas_udf("minilm", url="10.0.0.1:8001")("text"))

    Each Python process of Spark opens connections, or starts a server, once. For a pipeline with
    several inputs, call `Predictor` in `DataFrame.mapInArrow`.

    Args:
        name: Name of the pipeline.
        outputs: Type in Spark's DDL by output of the pipeline.
        options: Arguments of `Predictor`.
    """
    made = pickle.dumps(functools.partial(Predictor, name, **options))
    types = {**outputs, "error": "string"}

    def predict(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        for texts in batches:
            found = _open(made)({"text": texts.to_numpy(object)})
            yield found.select(list(types)).to_pandas()

    return functions.pandas_udf(predict, ", ".join(map(" ".join, types.items())))


@functools.cache
def _open(made: bytes) -> Predictor:
    predictor: Predictor = pickle.loads(made)()
    return predictor
