"""What a server keeps of its requests: uniform, bounded, private, and never in the way."""

from __future__ import annotations

import base64
import json
import random
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from conftest import build_into, lock_data, traffic_texts, write_lock, write_pipeline
from task_models import TOPICS, text_classifier
from triptych.bench.metrics_page import fetch_metrics
from triptych.building import Built, build
from triptych.cli import app
from triptych.client import Client
from triptych.errors import Progress, UserError
from triptych.pipeline.spec import load_spec
from triptych.repository.lock import build_id
from triptych.repository.render import with_imports
from triptych.requests.inputs import PipelineInputs, read_inputs
from triptych.runtime.sample_files import FOLDER_VARIABLE, list_files, remove_old, write_file
from triptych.runtime.sampling import LARGEST, Drawing, passenger_of, unpack, with_passenger
from triptych.server.server import Server

SECRET = "4711-0815-SECRET"
HOOKS = """
import re


def redact(inputs, answer):
    if "drop me" in inputs["text"]:
        return None
    if "break" in inputs["text"]:
        raise KeyError(inputs["text"])
    return {"text": re.sub("[0-9]{4}-[0-9]{4}-SECRET", "#", inputs["text"])}, answer
"""
TEXTS = traffic_texts()[:30]
SAMPLE = {"rate": 1.0, "window_s": 0.2, "redact": "hooks.redact"}


def test_rows_are_drawn_alike_whatever_request_they_are_in() -> None:
    drawing = Drawing(0.1, random.Random(5))
    found: Counter[int] = Counter()
    for request in range(4000):
        texts = [f"{request} {row}" for row in range(1 + request % 5)]
        passenger = drawing.draw({"text": texts}, "{}")
        if passenger:
            sampled = unpack(passenger)
            assert sampled.columns["text"] == [texts[row].encode() for row in sampled.rows]
            found.update(sampled.rows)
    sent = {row: 4000 - 800 * row for row in range(5)}
    for row, count in sent.items():  # five standard deviations
        assert abs(found[row] - 0.1 * count) < 5 * (0.09 * count) ** 0.5, (row, found)
    every = Drawing(1.0).draw({"text": ["a", "b"], "image": [b"\0", b""]}, '{"top_k": 1}')
    sampled = unpack(every)
    assert (sampled.rows, sampled.parameters) == ([0, 1], '{"top_k": 1}')
    assert sampled.columns == {"text": [b"a", b"b"], "image": [b"\0", b""]}
    large = unpack(Drawing(1.0).draw({"text": ["x" * (LARGEST + 1)]}, "{}"))
    assert (large.rows, large.columns) == ([0], {})


def test_a_passenger_travels_behind_the_numbers_of_the_ticket() -> None:
    ticket = np.arange(4, dtype=np.int64)[None].repeat(3, 0)
    passenger = Drawing(1.0).draw({"text": ["ä" * 100, "b", "c"]}, "{}")
    together = with_passenger(ticket, passenger)
    assert together.dtype == ticket.dtype
    assert together[:, :4].tolist() == ticket.tolist()
    assert unpack(passenger_of(together)) == unpack(passenger)
    assert passenger_of(ticket) == b""


def test_a_folder_keeps_to_its_limits_and_ages(tmp_path: Path) -> None:
    folder = tmp_path / "samples" / "p"

    def write(lines: int, **limits: int) -> None:
        bounds = {"most_rows": 10, "most": 1000, **limits}
        write_file(folder, "p", [b"x" * 9 + b"\n"] * lines, rows=lines, **bounds)

    for _ in range(6):
        write(3)
    files = list_files(folder, "p")
    assert [file.rows for file in files] == [3, 3, 3]
    assert {stat.S_IMODE(file.path.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    write(3, most=65)
    assert sum(file.size for file in list_files(folder, "p")) == 60
    (folder / "another.1.1.aa.jsonl").write_text("not ours")
    now = time.time()
    remove_old(folder, "p", 1.0, now + 3590)
    assert len(list_files(folder, "p")) == 2
    remove_old(folder, "p", 1.0, now + 3610)
    assert not list_files(folder, "p")
    write(1)
    remove_old(folder, "p", 1.0, now - 7200)  # the clock went back: nobody knows its age
    assert [path.name for path in folder.iterdir()] == ["another.1.1.aa.jsonl"]


def write_sampling(folder: Path, model: Path, **sample: Any) -> Path:
    """A pipeline of the tiny classifier that samples every row."""
    serving = {"sample": {**SAMPLE, **sample}}
    fields = {"task": "text-classification", "model": {"source": str(model)}, "serving": serving}
    made = write_pipeline(folder, **fields)
    (made / "hooks.py").write_text(HOOKS, encoding="utf-8")
    return made


def test_steps_that_do_not_sample_have_nothing_of_it() -> None:
    decode = "postprocess_classification.py"
    steps = {"preprocess.py": {"rows.py": "rows_text.py"}, "postprocess.py": {"decode.py": decode}}
    for step, own in steps.items():
        assert not [file for file in with_imports({"model.py": step, **own}) if "sampl" in file]
    written = with_imports({"sample_writer.py": "sample_writer.py"})
    assert {"sampling.py", "sample_files.py", "sample_writer.py"} <= written.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    return text_classifier(tmp_path_factory.mktemp("model"), minilm_folder, traffic_texts())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with `pipelines/` and `repository/`: `sampled`, and `stale` with old labels."""
    folder = tmp_path_factory.mktemp("sampling")
    for name in ("sampled", "stale"):
        build_into(write_sampling(folder / "pipelines" / name, model), folder / "repository")
    config = folder / "repository/stale_postprocess/config.pbtxt"
    text = config.read_text(encoding="utf-8")
    config.unlink()  # it may be one file with others
    for topic in TOPICS:
        text = text.replace(topic, f"old {topic}")
    config.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Server]:
    environment = {FOLDER_VARIABLE: str(built / "samples")}
    with Server(built / "repository", environment=environment) as server:
        yield server


def counts(server: Server) -> Counter[str]:
    """``kept``, ``bytes`` and reasons of dropped rows to their counts on the metrics page."""
    return Counter(
        {
            labels.get("reason", name.removeprefix("triptych_sample_")): int(value)
            for name, labels, value in fetch_metrics(server.metrics_url)
            if name.startswith("triptych_sample_") and labels["pipeline"] == "sampled"
        }
    )


def wait_for(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def records(folder: Path) -> list[dict[str, Any]]:
    """Every row in the folder."""
    return [
        json.loads(line)
        for file in list_files(folder, "sampled")
        for line in file.path.read_text(encoding="utf-8").split("\n")[1:-1]
    ]


@pytest.mark.server
def test_rows_and_answers_are_kept_and_nothing_of_them_elsewhere(
    server: Server, built: Path
) -> None:
    folder = built / "samples" / "sampled"
    before = counts(server)
    with Client("sampled", server.grpc_url) as client:
        asked = [f"hello {SECRET}", "drop me", "break", "plain"]
        answers = client.classify(asked, top_k=2)
    wait_for(lambda: counts(server)["kept"] - before["kept"] == 2, "two rows kept")
    found = {row["inputs"]["text"]: row for row in records(folder)}
    assert found.keys() == {"hello #", "plain"}
    assert (found["hello #"]["redacted"], found["plain"]["redacted"]) == (True, False)
    assert found["plain"]["parameters"] == {"top_k": 2}
    answer = found["plain"]["answer"]
    assert answer["label"]["texts"] == [label.label for label in answers[3]]
    scores = np.frombuffer(base64.b64decode(answer["score"]["base64"]), answer["score"]["dtype"])
    assert scores.tolist() == [label.score for label in answers[3]]
    (file,) = list_files(folder, "sampled")
    head = file.path.read_text(encoding="utf-8").partition("\n")[0]
    assert json.loads(head)["build"] == build_id(built / "repository", "sampled")
    now = counts(server)
    assert now["redact"] - before["redact"] == 2
    assert now["bytes"] == file.size
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert server.log_file is not None
    seen = [path for path in built.rglob("*") if path.is_file()]
    for path in (*seen, server.log_file):
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.server
def test_a_folder_that_is_gone_costs_samples_and_no_answers(server: Server, built: Path) -> None:
    folder = built / "samples" / "sampled"
    before = counts(server)
    folder.rename(built / "away")
    folder.write_text("in the way", encoding="utf-8")
    try:
        with Client("sampled", server.grpc_url) as client:
            assert len(client.classify(["one", "two"])) == 2
        wait_for(lambda: counts(server)["disk"] - before["disk"] == 2, "two rows lost")
    finally:
        folder.unlink()
        (built / "away").rename(folder)
    assert counts(server)["kept"] == before["kept"]


def triptych(built: Path, *words: str | Path, samples: Path | None = None) -> Result:
    """The command on the folder of `built`, in this process: torch is there already."""
    folders = {name: built / name for name in ("pipelines", "repository")}
    variables = {FOLDER_VARIABLE: str(samples or built / "samples")}
    options = [part for name, folder in folders.items() for part in (f"--{name}", str(folder))]
    return CliRunner().invoke(app, [*map(str, words), *options], env=variables)


@pytest.mark.server
def test_the_watch_tells_what_is_right_from_what_is_wrong(server: Server, built: Path) -> None:
    asked = [f"{text} {SECRET}" if row % 10 == 0 else text for row, text in enumerate(TEXTS)]
    for name in ("sampled", "stale"):
        with Client(name, server.grpc_url) as client:
            client.classify(asked)
        folder = built / "samples" / name
        wait_for(lambda: sum(f.rows for f in list_files(folder, name)) >= len(asked), "files")  # noqa: B023
    gauges = built / "gauges.prom"
    reports = ("--reports", built / "reports")
    done = triptych(built, "watch", "sampled", "--json", "--textfile", gauges, *reports)
    assert done.exit_code == 0, done.output
    look = json.loads(done.stdout)
    assert (look["alarms"], look["drifts"]) == ([], [])
    assert look["rows"] >= len(asked) - 5
    assert look["redacted"] >= 3
    assert {test["name"] for test in look["tests"]} == {"label_agreement", "rows_beyond_the_gate"}
    assert {test["mean"] for test in look["tests"]} == {0.0}
    assert 'triptych_watch_alarms{pipeline="sampled"} 0.0' in gauges.read_text()
    done = triptych(built, "watch", "sampled", *reports)  # nothing new
    assert done.exit_code == 0
    assert "0 new rows compared" in done.stdout

    done = triptych(built, "watch", "stale", *reports)
    assert done.exit_code == 1, done.output
    assert "alarm: label_agreement" in done.stdout
    assert "not as it was built: stale_postprocess/config.pbtxt" in done.stdout
    assert "labels go by other names: account is old account" in done.stdout
    page = (built / "reports/stale/watch/report.html").read_text(encoding="utf-8")
    assert "labels go by other names" in page
    for path in (built / "reports").rglob("*"):
        if path.is_file():
            content = path.read_text(encoding="utf-8")
            assert not any(text in content for text in (*TEXTS, SECRET)), path
    timeline = json.loads((built / "reports/sampled/watch/timeline.json").read_text())
    assert len(timeline["looks"]) == 2


AFTER = """

def after(rows):
    names = ["billing", "delivery", "returns", "technical", "account"]
    following = dict(zip(names, names[1:] + names[:1]))
    return [{**row, "label": [following[label] for label in row["label"]]} for row in rows]
"""


@pytest.mark.server
def test_a_candidate_is_taken_where_it_answers_as_well(
    server: Server, built: Path, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(built / "repository", built / "alike")
    lock = lock_data(built / "alike", "sampled")
    lock["versions"]["numpy"] = "0.0"  # the same files, as if built with another library
    (built / "alike/sampled/triptych.lock.json").unlink()  # it may be one file with others
    write_lock(built / "alike", "sampled", lock)
    swapped = write_sampling(built / "swapped/sampled", model)
    (swapped / "hooks.py").write_text(HOOKS + AFTER, encoding="utf-8")
    build_into(swapped, built / "other")
    with Client("sampled", server.grpc_url) as client:
        client.classify(traffic_texts()[:250])
    folder = built / "samples/sampled"
    wait_for(lambda: len(records(folder)) >= 230, "enough rows")
    before = len(records(folder))

    def shadow(candidate: Path, *words: str) -> dict[str, Any]:
        done = triptych(built, "shadow", "sampled", "--candidate", candidate, "--json", *words)
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.exit_code == (0 if found["verdict"] == "take it" else 1), done.output
        return found

    found = shadow(built / "alike", "--rounds", "0")
    assert found["verdict"] == "take it", found
    assert "no difference in the answers" in found["reasons"][0]
    assert {test["state"] for test in found["answers"]["tests"]} == {"right"}
    assert (found["source"], found["speeds"], found["notes"]) == ("sample", [], [])

    found = shadow(built / "other", "--rounds", "1", "--seconds", "0.6")
    assert found["verdict"] == "keep the old one", found
    assert "label_agreement" in found["reasons"][0]
    agreement = next(one for one in found["answers"]["figures"] if "agreement" in one["metric"])
    assert (agreement["in_place"], agreement["candidate"], agreement["between"]) == (1, 0, 0)
    assert {"p50 ms", "p99 ms", "core ms a request"} <= {one["name"] for one in found["speeds"]}
    assert all(min(one["in_place"] + one["candidate"]) > 0 for one in found["speeds"])
    assert "built with another hooks.py" in str(found["notes"])
    assert not any(text in json.dumps(found) for text in (*TEXTS, SECRET))
    assert len(records(folder)) == before  # what is replayed is not sampled

    lock["spec"]["task"] = "token-classification"
    (tmp_path / "tags/sampled").mkdir(parents=True)
    write_lock(tmp_path / "tags", "sampled", lock)
    (tmp_path / "samples/sampled").mkdir(parents=True)
    for candidate, samples, said in (
        (built / "repository", built / "samples", "must be another build than the one in place"),
        (built / "nowhere", built / "samples", "must be a pipeline built into"),
        (tmp_path / "tags", built / "samples", "must have the task of the build in place"),
        (built / "alike", tmp_path / "samples", "must have sampled requests"),
    ):
        error = triptych(built, "shadow", "sampled", "--candidate", candidate, samples=samples)
        assert isinstance(error.exception, UserError), error.output
        assert said in error.exception.message


@pytest.mark.server
def test_traffic_grows_by_what_was_sampled(server: Server, built: Path) -> None:
    file = built / "pipelines/sampled/traffic.jsonl"
    before = file.read_text(encoding="utf-8").splitlines()
    with Client("sampled", server.grpc_url) as client:
        client.classify([*(f"a new request, number {row}" for row in range(40)), TEXTS[0]])
    folder = built / "samples/sampled"
    wait_for(lambda: "number 39" in str(records(folder)), "the new rows")
    done = triptych(built, "traffic", "sampled", "--from-sample", "--json")
    assert done.exit_code == 0, done.output
    change = json.loads(done.stdout)
    after = file.read_text(encoding="utf-8").splitlines()
    assert after[: len(before)] == before  # each row stays where it was
    assert change["added"] == len(after) - len(before) >= 40
    assert change["gate"][0] > change["gate"][1]
    texts = [json.loads(line)["text"] for line in after]
    assert len(set(texts[len(before) :])) == change["added"]
    assert SECRET not in str(texts)
    again = json.loads(triptych(built, "traffic", "sampled", "--from-sample", "--json").stdout)
    assert (again["added"], again["before"]) == (0, len(after))


@pytest.mark.server
def test_what_a_look_proposes_is_built_and_put_in_place(
    server: Server, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts six times as long: proposed, hindered, failed, applied, taken back."""
    pipeline, repository = built / "pipelines/sampled", built / "repository"
    first = build_id(repository, "sampled")
    reports = ("--reports", built / "adapting")

    def watch(*words: str) -> tuple[int, dict[str, Any]]:
        done = triptych(built, "watch", "sampled", "--json", *words, *reports)
        return done.exit_code, json.loads(done.stdout)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in pipeline.iterdir() if path.is_file()}

    def ask(texts: list[str]) -> None:
        with Client("sampled", server.grpc_url) as client:
            client.classify(texts)
        rows = built / "samples/sampled"
        wait_for(lambda: texts[-1] in str(records(rows)), "the rows of a request")

    before = files()
    ask([*TEXTS, "the last of the short ones"])
    watch()
    ask([f"{' '.join([text] * 6)} {row}" for row, text in enumerate(TEXTS * 8)])
    code, look = watch()
    assert (code, look["drift"]["action"], look["alarms"]) == (1, "tune again", [])
    assert look["drift"]["first"] == "run triptych traffic sampled --from-sample --replace"
    assert look["drift"]["proposal"]["core_work"] == pytest.approx(1, abs=0.05)
    told = triptych(built, "watch", "sampled", *reports).stdout
    assert "0 new rows" in told  # and what the last ones told still holds
    assert "triptych watch sampled --apply" in told
    assert "all is well" not in told

    hooks = pipeline / "hooks.py"
    hooks.write_bytes(before["hooks.py"] + b"# edited\n")
    code, look = watch("--apply")
    assert (code, "hooks.py is not as built" in look["applied"]["failure"]) == (1, True)
    hooks.write_bytes(before["hooks.py"])

    def breaks(inputs: PipelineInputs, folder: Path, progress: Progress) -> Built:
        """As an engine that differs from its graph, which is in place by then."""
        build(inputs, folder, progress)
        assert build_id(repository, "sampled") != first
        raise UserError("engine", "must compute what its graph does")

    with monkeypatch.context() as patch:
        patch.setattr("triptych.watch.apply.build", breaks)
        code, look = watch("--apply")
    assert (code, "must compute" in look["applied"]["failure"]) == (1, True)
    assert (build_id(repository, "sampled"), files()) == (first, before)

    code, look = watch("--apply")
    applied = look["applied"]
    assert (code, applied["replaced"], applied["set"]) == (0, first, {}), look
    assert applied["build"] == build_id(repository, "sampled") != first
    assert applied["rows"] >= 200
    now = files()
    assert now.pop("traffic.jsonl.before") == before["traffic.jsonl"]
    assert len(now["traffic.jsonl"].splitlines()) == applied["rows"]
    assert lock_data(repository, "sampled")["traffic"]["rows"] == applied["rows"]
    assert SECRET not in str(now)
    code, look = watch("--apply")
    assert (code, look["drift"], look["applied"]) == (0, None, None)
    done = CliRunner().invoke(app, ["rollback", "sampled", "-r", str(repository)])
    assert done.exit_code == 0, done.output
    assert build_id(repository, "sampled") == first


def test_redact_must_be_there(tmp_path: Path, model: Path) -> None:
    made = write_sampling(tmp_path / "sampled", model)
    (made / "hooks.py").write_text("def before(rows):\n    return rows\n", encoding="utf-8")
    with pytest.raises(UserError, match="must have the function `redact`"):
        read_inputs(load_spec(made), lambda *_: None)
