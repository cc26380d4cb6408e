"""Answers of FlagEmbedding for texts: ``MODEL TEXTS.json TARGET.npz``; run in its environment."""

import json
import sys
from pathlib import Path

import numpy as np
from FlagEmbedding import BGEM3FlagModel  # type: ignore[import-not-found]

model, texts, target = sys.argv[1:]
found = BGEM3FlagModel(model, use_fp16=False, devices="cpu").encode(
    json.loads(Path(texts).read_text(encoding="utf-8")),
    batch_size=4,
    max_length=128,
    return_dense=True,
    return_sparse=True,
    return_colbert_vecs=True,
)
arrays = {"dense": found["dense_vecs"]}
for row, (terms, vectors) in enumerate(
    zip(found["lexical_weights"], found["colbert_vecs"], strict=True)
):
    arrays[f"ids_{row}"] = np.array([int(each) for each in terms], np.int32)
    arrays[f"weights_{row}"] = np.array(list(terms.values()), np.float32)
    arrays[f"vectors_{row}"] = vectors
np.savez(target, **arrays)
