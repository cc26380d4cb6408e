"""What a server keeps of its requests: uniform, bounded, private, and never in the way."""

import base64
import json
import os
import resource
import shutil
import signal
import stat
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype
from typer.testing import CliRunner, Result

from tests.support.client_toy import wait_until
from tests.support.project import build_into, lock_data, traffic_texts, write_lock, write_pipeline
from tests.support.task_models import TOPICS, text_classifier
from triptych.base.errors import UserError
from triptych.client import Client
from triptych.container.supervisor import step_processes
from triptych.core.inputs import read_inputs
from triptych.interface.cli import app
from triptych.repository.config import CONFIG_FILE, read_config
from triptych.repository.manifest import build_id
from triptych.runtime.row_types import NO_TICKET, PAYLOAD, TICKET, write_ticket
from triptych.runtime.sampling import FOLDER_VARIABLE, PARTIAL, list_files
from triptych.serving.bench.resources import fetch_metrics
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

SECRET = "4711-0815-SECRET"
HOOKS = """
import os
import re
import time

if "CLOCK" in os.environ and not hasattr(time, "right"):
    # A fake: the clock of this step is wrong by the file's seconds.
    time.right = time.time_ns
    time.time_ns = lambda: time.right() + 10**9 * int(open(os.environ["CLOCK"]).read() or 0)


def redact(inputs, answer):
    if "drop me" in inputs["text"]:
        return None
    if "break" in inputs["text"]:
        raise KeyError(inputs["text"])
    if "end the writer" in inputs["text"]:
        raise SystemExit(inputs["text"])
    return {"text": re.sub("[0-9]{4}-[0-9]{4}-SECRET", "#", inputs["text"])}, answer
"""
FAILS = """

def {name}(rows, inputs=None):
    if "{planted}" in str([rows, inputs]):
        raise {error}(str([rows, inputs]))
    return rows
"""


def write_sampling(folder: Path, model: Path) -> Path:
    """A pipeline of the tiny classifier that samples every row."""
    serving = {"sample": {"rate": 1.0, "window_s": 0.2, "redact": "hooks.redact"}}
    fields = {"task": "text-classification", "model": {"source": str(model)}, "serving": serving}
    made = write_pipeline(folder, **fields)
    (made / "hooks.py").write_text(HOOKS, encoding="utf-8")
    return made


def replace_file(file: Path, text: str) -> None:
    """Write another text; the old file may be one with files of other pipelines or builds."""
    file.unlink()
    file.write_text(text, encoding="utf-8")


def change_labels(repository: Path, pipeline: str, labels: Sequence[str]) -> None:
    """Let a pipeline answer with other labels than those of its model."""
    file = repository / f"{pipeline}_postprocess/1/settings.json"
    settings = json.loads(file.read_bytes())
    assert settings["labels"] == list(TOPICS)
    replace_file(file, json.dumps({**settings, "labels": list(labels)}))


COUNTS = {
    "triptych_samples_written_total": "kept",
    "triptych_sample_written_bytes_total": "bytes",
}


def counts(server: Server) -> Counter[str]:
    """``kept``, ``bytes`` and reasons of dropped rows to their counts on the metrics page."""
    return Counter(
        {
            labels.get("reason", COUNTS.get(name, name)): int(value)
            for name, labels, value in fetch_metrics(server.metrics_url)
            if name.startswith("triptych_sample") and labels["pipeline"] == "sampled"
        }
    )


def records(folder: Path) -> list[dict[str, Any]]:
    """Every row in the folder of a pipeline; who shares it may remove files meanwhile."""
    return [
        json.loads(line)
        for file in list_files(folder, folder.name)
        if file.path.exists()
        for line in file.path.read_text(encoding="utf-8").split("\n")[1:-1]
    ]


def texts_in(folder: Path) -> list[str]:
    return [row["inputs"]["text"] for row in records(folder)]


def wait_for_texts(folder: Path, texts: list[str]) -> None:
    """Until every text is in the folder: a request's parts are answered in any order."""
    wait_until(lambda: {*texts} <= {*texts_in(folder)}, "the rows")


def files_with(text: str, folder: Path, *, since: float = 0.0) -> list[Path]:
    """Files below the folder, changed since then, that hold the text."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_mtime >= since and text.encode() in path.read_bytes()
    ]


pytestmark = pytest.mark.build

TEXTS = traffic_texts()[:30]
NUMPY = {8: np.int32, 11: np.float32}
"""Type of numpy by that of a ModelConfig."""
PLANTED = "planted by nobody else 2718281828"  # which `redact` leaves as it is
SAID: list[str] = []
"""All that the command said in this module: output, errors, what was raised."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    return text_classifier(tmp_path_factory.mktemp("model"), minilm_folder, traffic_texts())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with `pipelines/` and `repository/`: `sampled`, and `stale` with old labels."""
    folder = tmp_path_factory.mktemp("sampling")
    for name in ("sampled", "stale"):
        build_into(write_sampling(folder / "pipelines" / name, model), folder / "repository")
    change_labels(folder / "repository", "stale", [f"old {topic}" for topic in TOPICS])
    return folder


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Server]:
    environment = {FOLDER_VARIABLE: str(built / "samples")}
    with Server(built / "repository", environment=environment) as server:
        yield server


@pytest.mark.server
def test_rows_and_answers_are_kept_and_nothing_of_them_elsewhere(
    server: Server, built: Path
) -> None:
    folder, before = built / "samples/sampled", counts(server)
    with Client("sampled", server.grpc_url) as client:
        asked = [f"hello {SECRET}", "drop me", "break", "plain"]
        answers = client.classify(asked, top_k=2)
    for count in ("kept", "redact"):
        wait_until(lambda: counts(server)[count] - before[count] == 2, count)  # noqa: B023
    found = {row["inputs"]["text"]: row for row in records(folder)}
    assert found.keys() == {"hello #", "plain"}
    assert (found["hello #"]["redacted"], found["plain"]["redacted"]) == (True, False)
    assert found["plain"]["parameters"] == {"top_k": 2}
    answer = found["plain"]["answer"]
    assert answer["label"]["texts"] == [label.label for label in answers[3]]
    scores = np.frombuffer(base64.b64decode(answer["score"]["base64"]), answer["score"]["dtype"])
    assert scores.tolist() == [label.score for label in answers[3]]
    files = list_files(folder, "sampled")
    heads = [file.path.read_text(encoding="utf-8").partition("\n")[0] for file in files]
    builds = {json.loads(head)["build"] for head in heads}
    assert builds == {build_id(built / "repository", "sampled")}
    assert counts(server)["bytes"] == sum(file.size for file in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert server.log_file is not None
    assert SECRET.encode() not in server.log_file.read_bytes()
    assert files_with(SECRET, built) == []


@pytest.mark.server
def test_what_goes_wrong_costs_samples_and_no_answers(server: Server, built: Path) -> None:
    """Two servers in one folder; of one: no disk, wrong clocks, what ends a thread, SIGKILL."""
    folder, clock = built / "samples/sampled", built / "clock"
    clock.write_text("0")
    environment = {FOLDER_VARIABLE: str(built / "samples"), "CLOCK": str(clock)}

    def classify(asked: Server, texts: list[str], dropped: str = "") -> int:
        """Rows in the folder after all are kept, or dropped for that reason; all are answered."""
        before = counts(asked)
        with Client("sampled", asked.grpc_url) as client:
            assert len(client.classify(texts)) == len(texts)
        wait_until(
            lambda: (counts(asked) - before)[dropped or "kept"] == len(texts), str(texts[:3])
        )
        assert (counts(asked) - before).keys() <= {dropped} if dropped else {"kept", "bytes"}
        return len(records(folder))

    with Server(built / "repository", environment=environment) as other:
        rows = [len(records(folder)), *(counts(each)["kept"] for each in (server, other))]
        threads = [
            threading.Thread(target=lambda each=each: [classify(each, TEXTS[:3]) for _ in range(5)])
            for each in (server, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(records(folder)) - rows[0] == 30
        assert [counts(each)["kept"] for each in (server, other)] == [rows[1] + 15, rows[2] + 15]

        (pid,) = (
            process
            for process, step in step_processes(other.pid).items()
            if step == "sampled_postprocess"
        )
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        now = classify(other, TEXTS[:9], dropped="disk")  # a write stops amid, as on a full disk
        assert not list(folder.glob(f"{PARTIAL}*"))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        folder.rename(built / "away")
        folder.write_text("in the way", encoding="utf-8")
        before = counts(other)
        with Client("sampled", other.grpc_url) as client:
            assert len(client.classify(["one", "two"])) == 2
        wait_until(lambda: (counts(other) - before)["disk"] == 2, "two rows lost")
        folder.unlink()
        (built / "away").rename(folder)
        assert classify(other, TEXTS[:9]) == now + 9
        for seconds, found in ((1700, now + 18), (-1700, now + 27)):  # files stay whole and known
            clock.write_text(str(seconds))
            assert classify(other, TEXTS[:9]) == found
        day = 24 * 3600
        for seconds in (100 * day, -100 * day):  # the servers take each other's files for too old
            clock.write_text(str(seconds))
            assert classify(other, TEXTS[:9]) <= 9
        clock.write_text("0")
        assert classify(server, TEXTS[:9]) == 9
        classify(other, ["end the writer"] * 2, dropped="redact")
        assert classify(other, TEXTS[:9]) == 18

        os.kill(pid, signal.SIGKILL)
        assert classify(server, TEXTS[:9]) == 27
    assert not [path for path in folder.iterdir() if path.suffix != ".jsonl"]


def triptych(built: Path, *words: str | Path, samples: Path | None = None) -> Result:
    """The command on the folder of `built`, in this process: torch is there already."""
    folders = {name: built / name for name in ("pipelines", "repository")}
    variables = {FOLDER_VARIABLE: str(samples or built / "samples")}
    options = [part for name, folder in folders.items() for part in (f"--{name}", str(folder))]
    done = CliRunner().invoke(app, [*map(str, words), *options], env=variables)
    SAID.extend((done.output, done.stderr, repr(done.exception)))
    if done.exc_info is not None:
        SAID.extend(traceback.format_exception(*done.exc_info))
    return done


@pytest.mark.server
def test_the_watch_tells_what_is_right_from_what_is_wrong(server: Server, built: Path) -> None:
    asked = [f"{text} {SECRET}" if row % 10 == 0 else text for row, text in enumerate(TEXTS)]
    asked.append(PLANTED)
    for name in ("sampled", "stale"):
        folder = built / "samples" / name
        wanted = len(records(folder)) + len(asked)
        with Client(name, server.grpc_url) as client:
            client.classify(asked)
        wait_until(lambda: len(records(folder)) >= wanted, "files")  # noqa: B023
    gauges = built / "gauges.prom"
    reports = ("--reports", built / "reports")
    done = triptych(built, "monitor", "sampled", "--json", "--textfile", gauges, *reports)
    assert done.exit_code == 0, done.output
    look = json.loads(done.stdout)
    assert (look["alarms"], look["drifts"]) == ([], [])
    assert look["rows"] >= len(asked) - 5
    assert look["redacted"] >= 3
    assert {test["name"] for test in look["tests"]} == {"label_agreement", "rows_beyond_the_gate"}
    assert {test["mean"] for test in look["tests"]} == {0.0}
    assert 'triptych_monitor_alarms{pipeline="sampled"} 0.0' in gauges.read_text()
    done = triptych(built, "monitor", "sampled", *reports)  # nothing new
    assert done.exit_code == 0
    assert "nothing was compared in this run" in done.stdout

    done = triptych(built, "monitor", "stale", *reports)
    assert done.exit_code == 1, done.output
    assert "alarm: label_agreement" in done.stdout
    assert "changed since the build: stale_postprocess/1/settings.json" in done.stdout
    assert "labels were renamed: account is now old account" in done.stdout
    for path in (built / "reports").rglob("*"):
        if path.is_file():
            content = path.read_text(encoding="utf-8")
            assert not any(text in content for text in (*TEXTS, SECRET, PLANTED)), path


@pytest.mark.server
def test_a_candidate_is_taken_where_it_answers_as_well(
    server: Server, built: Path, tmp_path: Path
) -> None:
    """One candidate is the same; one has other labels, another hook and a slower queue."""
    lock = lock_data(built / "repository", "sampled")
    lock["versions"]["numpy"] = "0.0"  # as if built with another library
    for name in ("alike", "other"):
        shutil.copytree(built / "repository", built / name)
        replace_file(built / name / "sampled/triptych.lock.json", json.dumps(lock))
        lock["files"]["sampled_preprocess/1/hooks.py"] = "0" * 64
    change_labels(built / "other", "sampled", [*TOPICS[1:], TOPICS[0]])
    config = built / "other/sampled_core" / CONFIG_FILE
    text = config.read_text(encoding="utf-8")
    assert "dynamic_batching { }" in text
    slow = "dynamic_batching { max_queue_delay_microseconds: 15000 }"
    replace_file(config, text.replace("dynamic_batching { }", slow))
    folder = built / "samples/sampled"
    before = len(records(folder)) + 250
    with Client("sampled", server.grpc_url) as client:
        client.classify(traffic_texts()[:250])
    wait_until(lambda: len(records(folder)) == before, "all rows")

    def shadow(candidate: Path, *words: str) -> dict[str, Any]:
        done = triptych(built, "shadow", "sampled", candidate, "--json", *words)
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.exit_code == (0 if found["verdict"] == "promote" else 1), done.output
        return found

    found = shadow(built / "alike", "--max-rounds", "0")
    assert found["verdict"] == "promote", found
    assert "no difference in the answers" in found["reasons"][0]
    assert {test["state"] for test in found["answers"]["tests"]} == {"within limit"}
    assert (found["source"], found["speeds"], found["notes"]) == ("sample", [], [])

    few = ("--max-rows", "40", "--max-rounds", "2", "--window-seconds", "0.4", "--clients", "1")
    found = shadow(built / "other", *few)
    assert found["verdict"] == "reject", found
    assert "label_agreement" in found["reasons"][0]
    agreement = next(one for one in found["answers"]["metrics"] if "agreement" in one["metric"])
    assert (agreement["active"], agreement["candidate"], agreement["between"]) == (1, 0, 0)
    assert "built with another hooks.py" in str(found["notes"])
    assert not any(text in json.dumps(found) for text in (*TEXTS, SECRET))
    assert found["answers"]["unanswered"] == [0, 0]
    speeds = {one["name"]: one for one in found["speeds"]}
    assert {"p50 ms", "p99 ms"} <= speeds.keys()
    assert all(min(one["active"] + one["candidate"]) > 0 for one in speeds.values())
    assert min(speeds["p50 ms"]["candidate"]) > 15
    assert 1 <= found["rounds"] <= 2
    assert len(records(folder)) == before  # what is replayed is not sampled

    lock["spec"]["task"] = "token-classification"
    (tmp_path / "tags/sampled").mkdir(parents=True)
    write_lock(tmp_path / "tags", "sampled", lock)
    (tmp_path / "samples/sampled").mkdir(parents=True)
    for candidate, samples, said in (
        (built / "repository", built / "samples", "must be another build than the active one"),
        (built / "nowhere", built / "samples", "is not built into"),
        (tmp_path / "tags", built / "samples", "must have the task of the active build"),
        (built / "alike", tmp_path / "samples", "must have sampled requests"),
    ):
        error = triptych(built, "shadow", "sampled", candidate, samples=samples)
        assert isinstance(error.exception, UserError), error.output
        assert said in error.exception.message


@pytest.mark.server
def test_traffic_grows_by_what_was_sampled(server: Server, built: Path, tmp_path: Path) -> None:
    file = built / "pipelines/sampled/traffic.jsonl"
    before = file.read_text(encoding="utf-8").splitlines()
    with Client("sampled", server.grpc_url) as client:
        new = [f"a new request, number {row}" for row in range(40)]
        client.classify([*new, TEXTS[0]])
    wait_for_texts(built / "samples/sampled", new)
    done = triptych(built, "traffic", "sampled", "--json")
    assert done.exit_code == 0, done.output
    change = json.loads(done.stdout)
    after = file.read_text(encoding="utf-8").splitlines()
    assert after[: len(before)] == before  # each row stays where it was
    assert change["added"] == len(after) - len(before) >= 40
    assert change["gate"][0] > change["gate"][1]
    texts = [json.loads(line)["text"] for line in after]
    assert len(set(texts[len(before) :])) == change["added"]
    assert SECRET not in str(texts)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # Rows of a build with other inputs and parameters, which the pipeline refuses now.
    sampled = list_files(built / "samples/sampled", "sampled")[-1].path
    head, row = sampled.read_bytes().splitlines()[:2]
    fields = json.loads(row)
    others = ({"inputs": {"image": "x"}}, {"parameters": {"width": 7}})
    lines = [head, *(json.dumps({**fields, **other}).encode() for other in others)]
    other = sampled.with_name(sampled.name.replace(".jsonl", "0.jsonl"))
    other.write_bytes(b"\n".join(lines) + b"\n")
    again = json.loads(triptych(built, "traffic", "sampled", "--json").stdout)
    alone = tmp_path / "samples/sampled"
    alone.mkdir(parents=True)
    other.rename(alone / other.name)
    assert (again["added"], again["before"], again["refused"]) == (0, len(after), 2)
    refused = triptych(built, "traffic", "sampled", "--replace", samples=alone.parent)
    assert "must have sampled rows that it accepts" in str(refused.exception)
    assert file.read_text(encoding="utf-8").splitlines() == after


@pytest.mark.server
def test_a_forged_sample_is_counted_and_reported_and_not_kept(server: Server, built: Path) -> None:
    """A client that sends requests to the steps itself can add one row for each request."""
    config = read_config(built / "repository/sampled_postprocess" / CONFIG_FILE)
    before = counts(server)

    with triton.InferenceServerClient(server.grpc_url) as client:

        def ask(step: str, inputs: dict[str, NDArray[Any]], *outputs: str) -> Any:
            tensors = [
                triton.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
                for name, value in inputs.items()
            ]
            for tensor, value in zip(tensors, inputs.values(), strict=True):
                tensor.set_data_from_numpy(value)
            wanted = [triton.InferRequestedOutput(name) for name in outputs]
            return client.infer(f"sampled_{step}", tensors, outputs=wanted or None)

        def ask_ticket(text: str) -> dict[str, NDArray[Any]]:
            """A ticket as the ensemble gets it, with a sample of the text."""
            asked = {"text": np.array([[text.encode()]], object)}
            answer = ask("preprocess", asked, TICKET, PAYLOAD)
            return {name: np.asarray(answer.as_numpy(name)) for name in (TICKET, PAYLOAD)}

        def send(ticket: dict[str, NDArray[Any]]) -> None:
            inputs = {
                tensor.name: np.zeros((1, *tensor.dims), NUMPY[tensor.data_type])
                for tensor in config.input
                if not tensor.optional
            }
            ask("postprocess", {**inputs, **ticket})

        own = ask_ticket("forged and sent again")
        numbers, payload = own[TICKET][0].tolist(), own[PAYLOAD][0, 0]
        for _ in range(100):
            send(own)
            send(write_ticket(NO_TICKET, payload, 1))  # made by nobody
            other = payload.replace(b"forged", b"Forged")
            send(write_ticket((numbers[0], numbers[1] ^ 1), other, 1))
    wait_until(lambda: counts(server)["forged"] - before["forged"] == 299, "forged samples")
    with Client("sampled", server.grpc_url) as honest:
        honest.classify(["honest and after them"])
    wait_for_texts(built / "samples/sampled", ["honest and after them", "forged and sent again"])
    texts = texts_in(built / "samples/sampled")
    assert texts.count("forged and sent again") == 1
    assert not [text for text in texts if "Forged" in text]
    done = triptych(built, "traffic", "sampled")
    assert "299 requests with forged samples" in done.output


@pytest.mark.long
@pytest.mark.server
def test_texts_six_times_as_long_are_a_drift_until_the_traffic_has_them(
    server: Server, built: Path
) -> None:
    reports = ("--reports", built / "adapting")

    def watch() -> tuple[int, dict[str, Any]]:
        done = triptych(built, "monitor", "sampled", "--json", *reports)
        return done.exit_code, json.loads(done.stdout)

    def classify(texts: list[str]) -> None:
        with Client("sampled", server.grpc_url) as client:
            client.classify(texts)
        wait_for_texts(built / "samples/sampled", texts)

    classify([*TEXTS, "the last of the short ones"])
    watch()
    classify([f"{' '.join([text] * 6)} {row}" for row, text in enumerate(TEXTS * 8)])
    code, look = watch()
    assert (code, look["alarms"]) == (1, [])
    assert look["drifts"][0].startswith("lengths changed: ")
    change = look["lengths"]
    ratio = change["now"]["mean"] / change["before"]["mean"]
    assert 3 < ratio == pytest.approx(change["computed"])
    told = triptych(built, "monitor", "sampled", *reports).stdout
    assert "0 new rows" in told  # and what the last ones told still holds
    assert "to adapt the build: triptych traffic sampled --replace, triptych tune" in told
    assert "no alarms" not in told


@pytest.mark.server
def test_a_planted_text_is_in_the_sample_and_nowhere_else(server: Server, built: Path) -> None:
    """After all that the tests above did with it, and hooks that fail on it in their own words."""
    for name, error in (("before", "KeyError"), ("before", "ValueError"), ("after", "KeyError")):
        hooks = HOOKS + FAILS.format(name=name, planted=PLANTED[:9], error=error)
        (built / "pipelines/stale/hooks.py").write_text(hooks, encoding="utf-8")
        reports = built / f"reports {name} {error}"  # to which all rows are new
        done = triptych(built, "monitor", "stale", "--reports", reports, "--textfile", built / "a")
        assert done.exit_code == 1, done.output
    triptych(built, "history", "sampled", "--json")
    with urlopen(server.metrics_url) as page:
        SAID.append(page.read().decode())
    started = (built / "pipelines/sampled/pipeline.yaml").stat().st_mtime
    cache = Path(os.environ["TRIPTYCH_CACHE"])
    holding = [*files_with(PLANTED, built), *files_with(PLANTED, cache, since=started)]
    assert server.log_file is not None
    assert PLANTED.encode() not in server.log_file.read_bytes()
    wanted = {built / "samples/sampled", built / "samples/stale", built / "pipelines/sampled"}
    assert {path.parent for path in holding} == wanted  # traffic grew by it, as was asked for
    assert len(SAID) > 20
    assert not [said for said in SAID if PLANTED in said]


def test_redact_must_be_there(tmp_path: Path, model: Path) -> None:
    made = write_sampling(tmp_path / "sampled", model)
    (made / "hooks.py").write_text("def before(rows):\n    return rows\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no function `redact`"):
        read_inputs(load_spec(made), lambda *_: None)
