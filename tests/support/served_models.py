"""Small random models of many architectures with tokenizers of their own kind, to be served."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.project import selected_names, traffic_texts
from tests.support.tokenizers_of_kinds import LONGEST, train

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
INFERENCE = ["contradiction", "neutral", "entailment"]
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,  # a second one proves nothing more, and takes seconds to export
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.1,  # far apart, or every text comes to the same vector
}
OFFSET = {"max_position_embeddings": LONGEST + 2}  # two that padding takes
ROBERTA = {**OFFSET, "type_vocab_size": 1}
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 16,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
}
MODERN = {
    "num_hidden_layers": 2,
    "global_attn_every_n_layers": 2,
    "local_attention": 16,
    "initializer_cutoff_factor": 2.0,
}
BART = {
    "d_model": 32,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "init_std": 0.1,
}
DISTIL: Mapping[str, Any] = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
QWEN = {"num_key_value_heads": 1, "head_dim": 16}


def each_of(names: Iterable[str], everyday: Collection[str]) -> pytest.MarkDecorator:
    """Run a test for each name; those that are not for every day are long."""
    marks = [pytest.param(n, marks=() if n in everyday else pytest.mark.long) for n in names]
    return pytest.mark.parametrize("name", marks)


def write_chosen(
    request: pytest.FixtureRequest,
    names: Iterable[str],
    always: str,
    write: Callable[[str], Path],
) -> dict[str, Path]:
    """Write the models that a selected test of the file needs, and the one that is `always`."""
    chosen = selected_names(request)
    return {name: write(name) for name in names if name in chosen or name == always}


class Served(NamedTuple):
    """A pipeline: its task, its model's type, tokenizer and settings beside `SIZES`."""

    task: str
    kind: str
    tokenizer: str
    settings: Mapping[str, Any] = {}
    layout: str = "packed"
    truncation_side: str = "right"


TOPICS, TAGGER, RANKER, MASKS, VECTORS = (
    "text-classification",
    "token-classification",
    "reranking",
    "fill-mask",
    "text-embedding",
)
UNIGRAM, DEBERTA_V3 = "XLMRobertaTokenizer", "DebertaV2Tokenizer"
SERVED: Mapping[str, Served] = {
    "xlm_tags": Served(TAGGER, "xlm-roberta", UNIGRAM, ROBERTA),
    "deberta_ranks": Served(RANKER, "deberta-v2", DEBERTA_V3, {**DEBERTA, "type_vocab_size": 2}),
    "modern_masks": Served(MASKS, "modernbert", "PreTrainedTokenizerFast", MODERN),
    "mpnet_vectors": Served(VECTORS, "mpnet", "MPNetTokenizer", OFFSET, "bucketed"),
    "t5_vectors": Served(VECTORS, "t5", "T5Tokenizer", T5),
    "qwen_topics": Served(TOPICS, "qwen3", "Qwen2Tokenizer", QWEN),
    "bart_labels": Served("zero-shot-classification", "bart", "RobertaTokenizer", BART),
    "roberta_answers": Served("question-answering", "roberta", "RobertaTokenizer", ROBERTA),
    "distil_topics": Served(TOPICS, "distilbert", "BertTokenizer", DISTIL, "bucketed", "left"),
    "albert_tags": Served(TAGGER, "albert", "AlbertTokenizer", {"embedding_size": 16}, "bucketed"),
    "conv_topics": Served(TOPICS, "deberta-v2", DEBERTA_V3, {**DEBERTA, "conv_kernel_size": 3}),
}
"""Each kind of model and tokenizer once, each task at least once; test_export exports more.

`conv_topics` mixes neighboring tokens and `bart_labels` shifts them, so that neither can be
packed."""

PAIRS = (RANKER, "zero-shot-classification", "question-answering")
NO_PADDING = Served(TOPICS, "fnet", "AlbertTokenizer")
HEADS: Mapping[str, tuple[str, list[str]]] = {
    TOPICS: ("AutoModelForSequenceClassification", ["one", "two", "three"]),
    RANKER: ("AutoModelForSequenceClassification", ["score"]),
    "zero-shot-classification": ("AutoModelForSequenceClassification", INFERENCE),
    TAGGER: ("AutoModelForTokenClassification", TAGS),
    MASKS: ("AutoModelForMaskedLM", []),
    "question-answering": ("AutoModelForQuestionAnswering", ["start", "end"]),
    VECTORS: ("AutoModel", []),
}


def save(served: Served, folder: Path) -> Path:
    """Write a random model and its tokenizer into `folder`."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = train(served.tokenizer, traffic_texts())
    tokenizer.truncation_side = served.truncation_side
    head, labels = HEADS[served.task]
    named = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "bos", "eos", "cls", "sep")
    }
    sizes = {k: v for k, v in SIZES.items() if "dim" not in served.settings or "_h" not in k}
    config = transformers.AutoConfig.for_model(
        served.kind,
        vocab_size=len(tokenizer),
        **{**sizes, **ids, **(named if labels else {}), **served.settings},
    )
    model = getattr(transformers, head).from_config(config).eval()
    spread(model, tokenizer, classes=len(labels), pairs=served.task in PAIRS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def spread(model: Any, tokenizer: Any, *, classes: int, pairs: bool) -> None:
    """Shift and scale the head, so that scores are far apart and no class wins everywhere."""
    import torch

    base = set(model.base_model.modules())
    with torch.no_grad():
        if not classes:
            for module in model.modules():
                if isinstance(module, torch.nn.LayerNorm) and module not in base:
                    module.weight.mul_(10.0)
            return
        heads = [m for m in model.modules() if m not in base]
        last = [m for m in heads if isinstance(m, torch.nn.Linear)][-1]
        texts = traffic_texts()[:40]
        rows = [["where is my parcel"] * len(texts), texts] if pairs else [texts]
        encoded = tokenizer(*rows, padding=True, truncation=True, return_tensors="pt")
        output = model(**encoded)
        if "logits" in output:
            logits = output.logits.reshape(-1, classes)
        else:
            logits = torch.stack((output.start_logits, output.end_logits), -1).reshape(-1, 2)
        scale = 2.0 / logits.std(0)
        last.weight.mul_(scale[:, None])
        if last.bias is not None:
            last.bias.sub_(logits.mean(0)).mul_(scale)
