"""Script that sends texts through the clients of vendors, unchanged, and prints what they return.

``python gateway_clients.py ADDRESS TEXTS`` runs in an environment of `gateway_clients.txt`.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import cohere
import litellm
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

QUERY, KEY = "refund", "none"


def vectors(address: str, texts: list[str]) -> dict[str, Callable[[list[str]], Any]]:
    """Embeddings of the texts by client."""
    api = f"{address}/v1"

    def of_litellm() -> Any:
        made = litellm.embedding(model="openai/minilm", input=texts, api_base=api, api_key=KEY)
        assert made.usage.prompt_tokens > len(texts)
        return [each["embedding"] for each in made.data]

    return {
        "langchain": OpenAIEmbeddings(
            model="minilm", base_url=api, api_key=KEY, check_embedding_ctx_length=False
        ).embed_documents,
        "litellm": lambda _: of_litellm(),
        "llama_index": OpenAILikeEmbedding(
            model_name="minilm", api_base=api, api_key=KEY
        ).get_text_embedding_batch,
        "llama_index_tei": TextEmbeddingsInference(
            model_name="minilm", base_url=address
        ).get_text_embedding_batch,
        "huggingface_hub": lambda _: [
            InferenceClient(model=address, token=KEY).feature_extraction(text)[0].tolist()
            for text in texts
        ],
    }


def orders(address: str, texts: list[str]) -> dict[str, Callable[[], list[int]]]:
    """Indexes of the texts, best first, by client."""
    words = {"model": "ranks", "query": QUERY, "documents": texts}

    def of_litellm(vendor: str, path: str) -> list[int]:
        made = litellm.rerank(
            **{**words, "model": f"{vendor}/ranks"}, api_base=address + path, api_key=KEY
        )
        return [each["index"] for each in made.results]

    return {
        "cohere_v1": lambda: [
            each.index for each in cohere.Client(KEY, base_url=address).rerank(**words).results
        ],
        "cohere_v2": lambda: [
            each.index for each in cohere.ClientV2(KEY, base_url=address).rerank(**words).results
        ],
        "litellm_cohere": lambda: of_litellm("cohere", "/v2/rerank"),
        "litellm_jina": lambda: of_litellm("jina_ai", "/v1/rerank"),
    }


def main(address: str, texts: list[str]) -> None:
    found = {
        "vectors": {name: call(texts) for name, call in vectors(address, texts).items()},
        "orders": {name: call() for name, call in orders(address, texts).items()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
