"""`triptych.spark` in a real Spark on this machine."""

import pytest

from tests.support.client_toy import Toy
from tests.support.spark_environment import run_python

PROGRAM = """
import sys
from pyspark.sql import SparkSession
from triptych.spark import pandas_udf
spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
rows = [(n, f"text {n}") for n in range(300)] + [(300, "refuse"), (301, None)]
table = spark.createDataFrame(rows, "id int, text string").repartition(3)
embed = pandas_udf("toy", url=sys.argv[1])
entities = "array<struct<entity:string, text:string, start:int, end:int, score:float>>"
tag = pandas_udf("tagger", {"entities": entities}, url=sys.argv[1])
found = table.select("id", "text", embed("text").alias("found")).orderBy("id").collect()
from tests.support.client_toy import expected
for row in found[:300]:
    assert row.found.error is None, row
    assert max(abs(expected(row.text) - row.found.embedding)) < 1e-6
assert [row.id for row in found] == list(range(302))
assert "must not be refused" in found[300].found.error
assert found[301].found.embedding is None
assert "`text` must be text. Given: null" in found[301].found.error
table = spark.createDataFrame([("für Anna",)], "text string")
(anna,) = table.select(tag("text").alias("found")).collect()
assert anna.found.entities[0].text == "Anna", anna
spark.stop()
"""


@pytest.mark.long
@pytest.mark.server
def test_a_column_of_spark_has_its_results(toy: Toy) -> None:
    run_python(PROGRAM, toy.url, spark=True)
