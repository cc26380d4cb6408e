"""Sparse models with a `Router` of sentence-transformers, whose queries need no transformer.

Documents go through a transformer. A term of a query has its weight in a table, such as its IDF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.errors import UserError
from triptych.models.info import Loader
from triptych.models.roles import DOCUMENT, QUERY
from triptych.models.text import read_json, read_module_list
from triptych.runtime.decode_queries import WEIGHTS_FILE

CONFIG = "router_config.json"
LIBRARY = "sentence_transformers."
SERVED = tuple(
    {QUERY: ("SparseStaticEmbedding",), DOCUMENT: (first, "SpladePooling")}
    for first in ("Transformer", "MLMTransformer")
)
"""Classes of the modules of each route that are served."""


def check_routes(folder: Path, loader: Loader) -> None:
    """Check that a Router is one that is served, and that all its modules are of the library.

    Raises:
        UserError: It is not.
    """
    first, *others = read_module_list(folder)
    router = read_json(folder / first["path"] / CONFIG, default={})
    types, structure = router.get("types", {}), router.get("structure", {})
    routes = {
        name: tuple(str(types.get(part)).rsplit(".", 1)[-1] for part in parts)
        for name, parts in structure.items()
    }
    is_plain = not others and not router.get("parameters", {}).get("route_mappings")
    is_own = not all(str(name).startswith(LIBRARY) for name in types.values())
    if loader != "SparseEncoder" or routes not in SERVED or is_own or not is_plain:
        parts = [f"{name}: {', '.join(kinds)}" for name, kinds in routes.items()]
        raise UserError(
            "model.source",
            "must not have a Router, but for a sparse-embedding model with SparseStaticEmbedding "
            "for queries, a Transformer and SpladePooling for documents, and nothing else",
            given="; ".join([*parts, *(each["type"] for each in others)]),
            remedy="Serve the model of each route as a pipeline of its own",
        )


def write_parts(model: Any, target: Path) -> None:
    """Write the documents' part of a `SparseEncoder`, and the queries' weights `WEIGHTS_FILE`.

    Raises:
        ValueError: Queries have another tokenizer, or a weight is not finite.
    """
    (static,), documents = (model[0].sub_modules[name] for name in (QUERY, DOCUMENT))
    one, other = (
        {**json.loads(each.backend_tokenizer.to_str()), "truncation": None, "padding": None}
        for each in (static.tokenizer, documents[0].tokenizer)
    )
    weights = static.weight.detach().float().numpy()
    if one != other or not np.isfinite(weights).all():
        raise ValueError("queries have another tokenizer, or a weight that is not finite")
    names = ("prompts", "default_prompt_name", "similarity_fn_name", "max_active_dims")
    settings = {name: getattr(model, name) for name in names}
    plain = type(model)(modules=list(documents), device="cpu", **settings)
    plain.save(str(target), create_model_card=False)
    np.save(target / WEIGHTS_FILE, weights)
