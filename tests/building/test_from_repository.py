"""`triptych new --from-repository`: an ensemble that was written by hand becomes a pipeline."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.support.hand_written import write_repository
from tests.support.own_models import folders_of
from tests.support.processes import running
from tests.support.scaffolding import run
from triptych.serving.server import Server


def ask(server: Server, model: str, names: list[str], texts: list[str]) -> list[Any]:
    """Send texts to an input; return outputs; the input is the first of `names`."""
    values = np.array([[text.encode()] for text in texts], object)
    tensor = grpc.InferInput(names[0], values.shape, "BYTES")
    tensor.set_data_from_numpy(values)
    with grpc.InferenceServerClient(server.grpc_url) as client:
        answer = client.infer(model, [tensor])
    return [answer.as_numpy(name) for name in names[1:]]


@pytest.mark.server
@pytest.mark.build
def test_the_pipeline_answers_as_the_ensemble(tmp_path: Path) -> None:
    written = write_repository(tmp_path / "written")
    folders = folders_of(tmp_path, "pipelines")
    done = run("new", "mine", "--from-repository", written, *folders)
    assert done.exit_code == 0, (done.output, done.exception)
    done = run("test", "mine", *folders)
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output
    done = run("build", "mine", *folders_of(tmp_path, "pipelines", "repository", "reports"))
    assert done.exit_code == 0, (done.output, done.exception)
    assert "warning" not in done.output
    shutil.copytree(written, tmp_path / "repository", dirs_exist_ok=True)
    texts = ["The parcel is late", "a", "Where is it?"]
    with running(Server(tmp_path / "repository")) as server:
        wanted = ask(server, "moods", ["TEXT", "LABEL", "SCORES"], texts)
        found = ask(server, "mine", ["text", "label", "scores"], texts)
        with pytest.raises(grpc.InferenceServerException, match="a text is empty"):
            ask(server, "mine", ["text", "label"], ["a", ""])
    assert found[0].tolist() == wanted[0].tolist()
    assert found[1] == pytest.approx(wanted[1], abs=1e-6)


def unbatched(root: Path) -> None:
    config = root / "moods/config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 16", ""))


def streaming(root: Path) -> None:
    with (root / "decode/config.pbtxt").open("a") as file:
        file.write("model_transaction_policy { decoupled: true }\n")


def unmapped(root: Path) -> None:
    config = root / "moods/config.pbtxt"
    config.write_text(config.read_text().replace('value: "mask"', 'value: "masks"', 1))


def unreadable(root: Path) -> None:
    (root / "net/config.pbtxt").write_text("max_batch_size: many")


def doubled(root: Path) -> None:
    shutil.copytree(root / "moods", root / "more_moods")


CHANGES: dict[str, Callable[[Path], None]] = {
    "a batch axis.*max_batch_size: 0 in moods": unbatched,
    "one answer for each request.*decode: decoupled": streaming,
    "one ensemble.*moods, more_moods": doubled,
    "a model for each step.*decode: no config": lambda root: shutil.rmtree(root / "decode"),
    "the files of each step.*decode: no version": lambda root: shutil.rmtree(root / "decode/1"),
    "configs that Triton can read.*net/config": unreadable,
    "around one model with a file.*net: onnxruntime": lambda root: shutil.rmtree(root / "net/1"),
    "make each output.*LABEL, SCORES of moods": unmapped,
    "not be a repository of Triptych": lambda root: (root / "moods/triptych.lock.json").touch(),
}


@pytest.mark.parametrize("said", CHANGES)
def test_another_form_is_refused(tmp_path: Path, said: str) -> None:
    CHANGES[said](write_repository(tmp_path / "written"))
    done = run(
        "new", "mine", "--from-repository", tmp_path / "written", *folders_of(tmp_path, "pipelines")
    )
    assert re.search(said, str(done.exception), re.DOTALL), done.exception
    assert not (tmp_path / "pipelines/mine").exists()


def test_an_ensemble_of_several_is_chosen_and_its_checkpoint_is_named(tmp_path: Path) -> None:
    root = write_repository(tmp_path / "written")
    doubled(root)
    (root / "tokenize/1/config.json").write_text('{"architectures": ["BertModel"]}')
    chosen = root / "more_moods"
    done = run("new", "mine", "--from-repository", chosen, *folders_of(tmp_path, "pipelines"))
    assert done.exit_code == 0, (done.output, done.exception)
    spec = (tmp_path / "pipelines/mine/pipeline.yaml").read_text()
    assert "the ensemble more_moods" in spec
    assert "tokenize has files of BertModel" in spec
    done = run("new", "other", "text-embedding", "--from-repository", chosen)
    assert "takes the place of TASK" in str(done.exception)
