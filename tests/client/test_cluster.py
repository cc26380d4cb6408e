"""`triptych infer --ray` on this machine: processes that are killed, and a store of S3."""

import csv
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.client_toy import Toy, expected, texts_of_many_lengths, wait_until
from tests.support.gateway_environment import python_with
from tests.support.project import ROOT
from triptych.base.errors import UserError
from triptych.interface.bulk.corpus import CorpusPart, Output, PartRecord, open_store, plan_parts

COMMAND = "from triptych.interface.cli import main; main()"
FILES, ROWS = 12, 60


def infer(*words: str | Path, **environment: str) -> "subprocess.Popen[str]":
    """Start `triptych infer`, whose cluster has two processors."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "infer", *map(str, words), "--ray", "local", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Parquet files with rows of their own, a CSV file with a short row, and files of no rows."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(FILES):
        texts = texts_of_many_lengths(ROWS, f"file {number}")
        table = pa.table({"id": [number * ROWS + row for row in range(ROWS)], "text": texts})
        pq.write_table(table, folder / f"{number:03}.parquet", row_group_size=20)
    with (folder / "100.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], ["1000", "one"], ["short"]])
    pq.write_table(table.slice(0, 0), folder / "200.parquet")
    return folder


def rows_of(out: Path) -> dict[str, tuple[Any, Any]]:
    """Result and error by text; every text must be there once."""
    tables = [pq.read_table(path) for path in sorted(out.glob("*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["text"]: (row.get("embedding"), row["error"]) for row in rows}


def check(out: Path) -> None:
    found = rows_of(out)
    assert len(found) == FILES * ROWS + 2
    (failed,) = (error for _, error in found.values() if error)
    assert failed == "must have 2 cells, as the header. Given: 1"
    texts = [text for text, (vector, _) in found.items() if vector]
    np.testing.assert_allclose(
        [found[text][0] for text in texts], [expected(text) for text in texts], atol=1e-6
    )


def test_parts_are_the_files_and_the_row_groups_of_large_ones(corpus: Path) -> None:
    parts, digest = plan_parts(f"{corpus}/*.parquet", 1 << 20)
    assert len(parts) == FILES + 1
    small, other = plan_parts(f"{corpus}/00[01].parquet", 1)
    assert [part.groups for part in small] == [(0, 1), (1, 2), (2, 3)] * 2
    assert other != digest
    assert [Path(part.path).name for part in plan_parts(f"{corpus}/100.csv", 1)[0]] == ["100.csv"]
    with pytest.raises(UserError, match="matches no file"):
        plan_parts(f"{corpus}/*.json", 1)


def test_results_count_with_their_record_and_only_for_their_run(tmp_path: Path) -> None:
    out, results = Output(f"{tmp_path}/out"), tmp_path / "results"
    results.write_bytes(b"rows")
    assert out.start({"build": "a"}) == {}
    record = PartRecord(4, 1, 0.5, 4, "0" * 64, 9, {"read": 0.5})
    with results.open("rb") as file:
        out.publish("part-000003.parquet", file)
    out.add(CorpusPart(3, "x"), record)
    assert out.start({"build": "a"}) == {3: record}
    with pytest.raises(UserError, match=r"results of another run.* Given: other build"):
        out.start({"build": "b"})
    (tmp_path / "out/part-000003.parquet").write_bytes(b"row")
    assert out.start({"build": "a"}) == {}
    (tmp_path / "out/_triptych/.unfinished").touch()
    assert out.start({"build": "a"}) == {}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.parquet").touch()
    with pytest.raises(UserError, match="results of another run"):
        Output(str(tmp_path / "other")).start({"build": "a"})
    assert not list((tmp_path / "out/_triptych").glob(".*"))


def test_credentials_in_an_address_are_refused_and_not_shown() -> None:
    for uri in ("s3://KEY:hidden@bucket/a", "s3://bucket/a?secret_key=hidden"):
        with pytest.raises(UserError, match="contains credentials") as refused:
            open_store("--out", uri)
        assert "hidden" not in str(refused.value)


@pytest.mark.long
@pytest.mark.server
def test_killed_processes_lose_no_row_and_write_none_twice(
    toy: Toy, corpus: Path, tmp_path: Path
) -> None:
    chance, out = random.Random(58), tmp_path / "out"
    words = ("toy", "--file", corpus, "--out", out, "--url", toy.url)
    kills = 0
    for victim in ["worker", "driver", "worker", "driver", "driver"]:
        started = set((out / "_triptych").glob("part-*.json")) if out.exists() else set()
        run = infer(*words)
        while run.poll() is None and set((out / "_triptych").glob("part-*.json")) <= started:
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 0.3))
        children = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
        workers = [each for each in children if "PartWorker" in " ".join(each.cmdline())]
        for each in workers if victim == "worker" else []:
            each.kill()
            kills += 1
        if victim == "driver" and run.poll() is None:
            run.send_signal(signal.SIGKILL)
            kills += 1
        _, errors = run.communicate(timeout=200)
        assert run.returncode in (1, -signal.SIGKILL), errors
    last = infer(*words)
    printed, errors = last.communicate(timeout=200)
    assert last.returncode == 1, errors  # one row failed
    done = json.loads(printed)
    assert (done["rows"], done["failed"]) == (FILES * ROWS + 2, 1)
    assert done["times"].keys() == {"read", "tokenize", "core", "write"}
    assert kills
    check(out)
    other = infer(*words, "-p", "dimensions=4")
    assert "`--out` has results of another run" in other.communicate(timeout=100)[1]


@pytest.fixture
def bucket() -> Iterator[str]:
    """Address of a store of S3 that moto plays, with a bucket `corpus`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = python_with(ROOT / "tests/data/moto.txt")
    command = [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:

        def is_open() -> bool:
            with socket.socket() as tried:
                return tried.connect_ex(("127.0.0.1", port)) == 0

        wait_until(is_open, "a store of S3")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.long
@pytest.mark.server
def test_a_corpus_in_a_store_of_s3_is_read_and_written(
    toy: Toy, corpus: Path, tmp_path: Path, bucket: str
) -> None:
    access = {
        "AWS_ENDPOINT_URL": bucket,
        "AWS_ACCESS_KEY_ID": "key-of-the-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    program = (
        "import sys; from pyarrow import fs;"
        "store, _ = fs.FileSystem.from_uri('s3://corpus?allow_bucket_creation=true');"
        "store.create_dir('corpus/in'); fs.copy_files(sys.argv[1], sys.argv[2],"
        " source_filesystem=eval(sys.argv[3]), destination_filesystem=eval(sys.argv[4]))"
    )
    here, there = "fs.LocalFileSystem()", "store"
    copy = [sys.executable, "-c", program]
    subprocess.run(
        [*copy, corpus, "corpus/in", here, there], check=True, env={**os.environ, **access}
    )
    packages = python_with(ROOT / "tests/data/moto.txt").parents[1] / "lib"
    for name in ("boto3", "botocore", "s3transfer", "jmespath"):
        (found,) = packages.glob(f"*/site-packages/{name}")
        (tmp_path / "boto").mkdir(exist_ok=True)
        (tmp_path / "boto" / name).symlink_to(found)
    access["PYTHONPATH"] = str(tmp_path / "boto")
    uploads = "import boto3; s3 = boto3.client('s3'); upload = {'Bucket': 'corpus'};"
    tell = [sys.executable, "-c", uploads + "print(s3.list_multipart_uploads(**upload))"]
    begin = uploads + (
        "s3.create_multipart_upload(Key='out/part-000001.parquet', **upload);"
        "s3.create_multipart_upload(Key='out/mine/part-000001.parquet', **upload)"
    )
    environment = {**os.environ, **access}
    subprocess.run([sys.executable, "-c", begin], check=True, env=environment)
    told = subprocess.run(tell, check=True, env=environment, capture_output=True, text=True)
    assert told.stdout.count("'UploadId'") == 2
    run = infer(
        *("toy", "--file", "s3://corpus/in/*", "--out", "s3://corpus/out", "--url", toy.url),
        *("--max-errors", "1", "--price-per-hour", "3"),
        **access,
    )
    printed, errors = run.communicate(timeout=200)
    assert run.returncode == 1, errors
    done = json.loads(printed)
    assert done["rows"] == FILES * ROWS + 2
    assert done["cost_per_million"] == pytest.approx(3 / 3600 * 1e6 / done["rows_per_s"], rel=0.01)
    told = subprocess.run(tell, check=True, env=environment, capture_output=True, text=True)
    assert told.stdout.count("'UploadId'") == 1
    assert "out/mine/" in told.stdout
    out = tmp_path / "fetched"
    out.mkdir()
    subprocess.run(
        [*copy, "corpus/out", out.resolve(), there, here], check=True, env={**os.environ, **access}
    )
    check(out)
    written = "".join(path.read_text() for path in (out / "_triptych").iterdir())
    assert "of-the-test" not in written + printed + errors
