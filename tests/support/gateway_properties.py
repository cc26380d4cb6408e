"""Script that sends generated requests to a gateway, by the documents of OpenAI, TEI and its own.

``python gateway_properties.py ADDRESS PATHS`` runs schemathesis in an environment of
`gateway_clients.txt` and exits with its status. PATHS is a regular expression. The pipelines are
those of the gateway's tests.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import schemathesis
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types import completion_create_params as completion
from openai.types import embedding_create_params as embedding
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat
from pydantic import TypeAdapter
from schemathesis.openapi.checks import RejectedPositiveData
from schemathesis.specs.openapi.checks import positive_data_acceptance

TEI = Path(__file__).parents[1] / "data/tei_openapi.yaml"
NAMES = {"rerank": "ranks", "predict": "topics", "completions": "quick"}
CHECKS = (
    *("not_a_server_error", "response_schema_conformance", "content_type_conformance"),
    *("status_code_conformance", "response_headers_conformance", "unsupported_method"),
)
OWN_CHECKS = ("all", "refusals_are_expected")
EXPECTED = {
    "one of passage, query|name a prompt|no prompt|prompt` is not known": "its own prompts",
    r"must name a pipeline (for|that)": "a pipeline has one task",
    r"must have the input `text`": "a pipeline takes texts or pairs",
    r"must have one text or one pair": "the rows of a request are alike",
    r"must have exactly the inputs": "a pipeline has its own inputs",
    r"^/(tei/\{name\})? .*`(inputs|query|texts)[^`]*`: ": "the task of the pipeline",
    r"`normalize` must be true": "the model normalizes",
    r"parameter dimensions|`dimensions` must be at most": "vectors have a size",
    r"max_tokens(_per_doc)?` must not be below": "the pipeline has a limit of its own",
    r"must be a text, or its ids as /tokenize": "token ids are those of the pipeline's tokenizer",
    r"parameters\.|parameter [a-z_]+`": "a pipeline has its own parameters",
    r"adapter`": "a pipeline has its own adapters",
    r"json_schema": "this engine follows no schemas",
    r"`tool_choice` (needs|must name)": "a choice of the given tools",
    r"`top_logprobs` needs logprobs": "as OpenAI has it",
    r"a message of the role \w+ must have": "as OpenAI has it",
    r"text_input` must have|messages` must|tokens, the number of tokens that fit": "its length",
    r"sampling_parameters: min_tokens": "not above the maximum",
    r"chat template|tools` ": "what the model was trained for",
    r"lone surrogates|must not be empty": "no text",
    r"must be a data URL with base64": "no image",
}
"""Refusals of requests that fit the document, and what it cannot say."""


def name_for(path: str) -> str:
    """Name of a pipeline that has the task of a path."""
    return "topics" if "pipelines" in path else NAMES.get(path.rpartition("/")[2], "minilm")


def map_body(context: Any, body: Any) -> Any:
    """Name a pipeline of the gateway, so that most requests reach one, and end answers soon."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = name_for(context.operation.path)
        if "completions" in context.operation.path:
            body["max_tokens"] = 8
    return body


def map_path_parameters(context: Any, parameters: Any) -> Any:
    return {name: name_for(context.operation.path) for name in parameters or {}}


def refusals_are_expected(context: Any, response: Any, case: Any) -> None:
    """Fail if a valid request is refused for another reason than those of `EXPECTED`."""
    try:
        positive_data_acceptance(context, response, case)
    except RejectedPositiveData:
        said = f"{case.operation.path} {json.dumps(response.json())}"
        if not re.search("|".join(EXPECTED), said):
            raise


schemathesis.check(refusals_are_expected)
schemathesis.hook(map_body)
schemathesis.hook(map_path_parameters)


def openai_document() -> dict[str, Any]:
    """OpenAI's document as far as it is served, from the types of its client, made from it."""
    models: dict[str, tuple[Any, Any]] = {
        "/v1/embeddings": (embedding.EmbeddingCreateParams, CreateEmbeddingResponse),
        "/v1/completions": (completion.CompletionCreateParamsNonStreaming, Completion),
        "/v1/chat/completions": (chat.CompletionCreateParamsNonStreaming, ChatCompletion),
        "/v1/models/{model}": (None, Model),
    }
    schemas: dict[str, Any] = {}

    def schema(kind: Any) -> dict[str, Any]:
        made = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(made.pop("$defs", {}))
        return dict(made)

    error = {"type": "object", "required": ["message", "type", "param", "code"]}
    wrapped = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    paths: dict[str, Any] = {}
    for path, (body, result) in models.items():
        contents = {"200": schema(result), "default": wrapped}
        operation: dict[str, Any] = {
            "responses": {
                status: {"description": "", "content": {"application/json": {"schema": content}}}
                for status, content in contents.items()
            }
        }
        if body is None:
            place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [place]
        else:
            given = schema(body)
            # Vectors as base64 are no numbers, which the document does not say.
            given["properties"].pop("encoding_format", None)
            content = {"application/json": {"schema": given}}
            operation["requestBody"] = {"required": True, "content": content}
        paths[path] = {"get" if body is None else "post": operation}
    known = {"info": {"title": "OpenAI", "version": "1"}, "components": {"schemas": schemas}}
    return {"openapi": "3.1.0", "paths": paths, **known}


def main(address: str, paths: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        published = Path(folder) / "openai.json"
        published.write_text(json.dumps(openai_document()), encoding="utf-8")
        runs = [(f"{address}/openapi.json", OWN_CHECKS), (str(published), CHECKS)]
        if "completions" not in paths.partition("!")[0]:
            runs.append((str(TEI), CHECKS))
        here = Path(__file__)
        hooks = {"PYTHONPATH": str(here.parent), "SCHEMATHESIS_HOOKS": here.stem}
        failed = 0
        for document, checks in runs:
            failed |= subprocess.run(
                [
                    *(sys.executable, "-m", "schemathesis.cli", "run", document, "--url", address),
                    *("--checks", ",".join(checks), "--phases", "examples,coverage,fuzzing"),
                    *("--exclude-checks", "positive_data_acceptance"),
                    *("--max-examples", "20", "--seed", "36", "--continue-on-failure"),
                    *("--include-path-regex", paths, "--suppress-health-check", "all"),
                ],
                env={**os.environ, **hooks},
                cwd=folder,
            ).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
