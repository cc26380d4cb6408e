"""The example pipelines: their data is what their READMEs say, and training them is repeatable."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from examples import labeled, pii, pii_data, ticket_routing
from examples.fitting import base_model
from examples.train import EXAMPLES, PIPELINES, read_records
from tests.support.project import ROOT

SPLITS = {"ticket_routing": ("train", "test"), "pii": ("train", "dev", "test")}
TRAINED_VALUES = ("first", "last", "street", "city", "domain", "phone", "id", "product", "company")
MIN_F1 = 0.90
APART, PART_APART = 0.02, 0.06
"""By how much F1, of all and of one class, may differ from the README's on another machine."""


def records(name: str, split: str) -> list[Any]:
    return list(read_records(PIPELINES / name / "data" / f"{split}.jsonl"))


def plain(text: str) -> str:
    """A text without what a tokenizer or a careless copy could blur."""
    return " ".join(re.findall(r"\w+", text.lower()))


def run_training(name: str, output: Path, *options: str) -> dict[str, Any]:
    """Train in a process of its own, as a user does; returns what quality.json says."""
    command = [sys.executable, str(ROOT / "build_scripts/examples/train.py"), name]
    # Waiting threads that spin would take the cores from whatever else runs here.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    words = [*command, "--output", str(output), *options]
    subprocess.run(words, check=True, capture_output=True, env=environment)
    quality: dict[str, Any] = json.loads((output / "quality.json").read_text(encoding="utf-8"))
    return quality


def test_held_out_texts_are_in_no_other_split_and_not_in_the_traffic() -> None:
    assert set(SPLITS) == set(EXAMPLES)
    for name, splits in SPLITS.items():
        texts = {split: {plain(row["text"]) for row in records(name, split)} for split in splits}
        assert all(texts.values())
        for one, other in combinations(splits, 2):
            assert not texts[one] & texts[other], (name, one, other)
        lines = (PIPELINES / name / "traffic.jsonl").read_text(encoding="utf-8").splitlines()
        traffic = [plain(json.loads(line)["text"]) for line in lines]
        assert len(traffic) >= 150
        for split in set(splits) - {"train"}:
            assert not set(traffic) & texts[split], (name, split)


def test_labeled_rows_are_the_held_out_data() -> None:
    for name in EXAMPLES:
        written = (PIPELINES / name / "eval.jsonl").read_text(encoding="utf-8")
        assert written == labeled.render(name)
        rows = [json.loads(line) for line in written.splitlines()]
        held_out = records(name, "test")
        assert [row["text"] for row in rows] == [record["text"] for record in held_out]
        for row, record in zip(rows, held_out, strict=True):
            spans = [[e["start"], e["end"], e["entity"]] for e in row.get("entities", ())]
            assert (row.get("label"), spans) == (record.get("label"), record.get("spans", []))


def test_every_class_and_language_has_enough_rows() -> None:
    for split, least in (("train", 45), ("test", 18)):
        counts = Counter(row["label"] for row in records("ticket_routing", split))
        assert set(counts) == set(ticket_routing.LABELS)
        assert min(counts.values()) >= least
    languages = Counter(row["language"] for row in records("pii", "test"))
    assert set(languages) == set(pii_data.LANGUAGES)
    assert min(languages.values()) >= 70


def test_pii_data_is_what_its_frames_give_with_spans_of_whole_values() -> None:
    for split in SPLITS["pii"]:
        written = (pii_data.DATA / f"{split}.jsonl").read_text(encoding="utf-8")
        assert written == pii_data.render(split)
        rows = records("pii", split)
        for row in rows:
            spans = sorted(row["spans"])
            for start, end, _ in spans:
                assert row["text"][start:end].strip() == row["text"][start:end] != ""
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert {kind for row in rows for *_, kind in row["spans"]} == set(pii.TYPES)
        assert sum(not row["spans"] for row in rows) >= 0.1 * len(rows)


def pii_values(split: str) -> set[tuple[str, str]]:
    """Return each kind and value of personal data in a split."""
    rows = records("pii", split)
    return {(kind, r["text"][start:end].lower()) for r in rows for start, end, kind in r["spans"]}


def test_pii_splits_share_no_frame_and_no_value() -> None:
    for one, other in combinations(SPLITS["pii"], 2):
        trained, held_out = (
            pii_data.read_frames(pii_data.DATA / f"{split}.frames.txt") for split in (one, other)
        )
        assert set(trained) >= set(held_out)
        for section, frames in trained.items():
            if section.split(".")[0] in (*TRAINED_VALUES, "frames", "negative", "written"):
                found = {v.lower() for v in frames} & {v.lower() for v in held_out.get(section, [])}
                assert not found, (one, other, section)
        assert not pii_values(one) & pii_values(other), (one, other)


@pytest.mark.build
def test_pii_tags_mark_first_and_other_tokens() -> None:
    from transformers import AutoTokenizer

    text = "Jörg Weiß, Am Markt 3"
    record = {"text": text, "spans": [[0, 9, "NAME"], [11, 21, "ADDRESS"]]}
    tokenizer = AutoTokenizer.from_pretrained(base_model())
    (row,) = pii.encode(tokenizer, [record])
    tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
    tags = dict(zip(tokens, (pii.LABELS[label] for label in row["labels"]), strict=True))
    assert tags["[CLS]"] == tags[","] == tags["[SEP]"] == "O"
    assert tags["jo"] == "B-NAME"
    assert tags["##rg"] == tags["wei"] == "I-NAME"
    assert tags["am"] == "B-ADDRESS"
    assert tags["markt" if "markt" in tags else "mark"] == tags["3"] == "I-ADDRESS"


@pytest.mark.long
def test_training_twice_gives_the_same_weights(tmp_path: Path) -> None:
    hashes = set()
    for turn in ("one", "two"):
        run_training("pii", tmp_path / turn, "--steps", "5")
        weights = tmp_path / turn / "model.safetensors"
        hashes.add(hashlib.sha256(weights.read_bytes()).hexdigest())
    assert len(hashes) == 1
    assert not list(tmp_path.glob(".*"))  # the scratch folder of a training is gone


@pytest.mark.long
def test_a_short_training_already_finds_personal_data(tmp_path: Path) -> None:
    """A full one takes minutes: `make examples` runs it."""
    quality = run_training("pii", tmp_path / "model", "--steps", "60")
    assert stated_names(quality)["all"] > 0.35


@pytest.mark.long
def test_a_full_training_has_the_quality_of_the_readme(tmp_path: Path) -> None:
    """On the same machine the figures are equal; another processor rounds other weights."""
    measured = stated_names(run_training("ticket_routing", tmp_path / "model"))
    readme = (PIPELINES / "ticket_routing/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w -]+?) \|.* (\d\.\d+) \| \d+ \|$", readme, re.MULTILINE)
    stated = {row: float(f1) for row, f1 in rows}
    assert set(stated) == set(measured)
    assert measured["all"] >= MIN_F1
    for row, f1 in measured.items():
        assert stated[row] == pytest.approx(f1, abs=APART if row == "all" else PART_APART), row


def stated_names(quality: dict[str, Any]) -> dict[str, float]:
    """F1 by the first column of a README's table."""
    groups = [quality.get(group, {}) for group in ("classes", "types", "languages")]
    whole = quality.get("macro_f1", quality.get("all", {}))
    parts = {part: score["f1"] for group in groups for part, score in group.items()}
    return {"all": whole if isinstance(whole, float) else whole["f1"], **parts}
