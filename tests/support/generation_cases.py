"""A tiny model that generates text, and raw streams to a server: a call each, as many as wanted."""

import importlib.util
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.tokenizers_of_kinds import byte_level
from triptych.building.generation.adapters import CONFIG, WEIGHTS
from triptych.building.generation.inputs import GeneratingInputs, Prompt
from triptych.building.generation.reference import Reference
from triptych.building.generation.render import ENGINES, EngineModule
from triptych.spec.generation_fields import GENERATION_BACKENDS

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Über den Wolken muß die Freiheit wohl grenzenlos sein.",
    "日本語の文字 🙂 👩‍👩‍👧 é",
)
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
    "{% for call in message['tool_calls'] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<{{ message['role'] }}> {{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def byte_pairs() -> Tokenizer:
    """A byte-level BPE that adds a token at the beginning: few merges, so characters are split."""
    tokenizer = byte_level(TEXTS[:2], ["<s>", "</s>"], vocabulary=300)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """A tokenizer in the manner of sentencepiece: its decoder drops the space of a first token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    return tokenizer


def write_tiny_model(folder: Path) -> Path:
    """A folder as `save_pretrained` writes it, with weights that nothing reads."""
    folder.mkdir(parents=True)
    byte_pairs().save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    header = b"{}      "
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def write_adapter(
    folder: Path,
    model: Path,
    *,
    modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"),
    rank: int = 4,
    strength: float = 0.3,
    **settings: object,
) -> Path:
    """A LoRA adapter of random weights as PEFT saves it, for a model in the manner of Llama."""
    config = json.loads((model / "config.json").read_bytes())
    width, heads = config["hidden_size"], config["num_attention_heads"]
    keys = width // heads * config.get("num_key_value_heads", heads)
    outputs = {"q_proj": width, "v_proj": keys, "down_proj": width}
    rng = np.random.default_rng(rank)
    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            name = module.rpartition(".")[2]
            inputs = config["intermediate_size"] if name == "down_proj" else width
            key = f"base_model.model.model.layers.{layer}.{module}"
            inner = rng.standard_normal((rank, inputs), np.float32) / np.float32(inputs**0.5)
            outer = rng.standard_normal((outputs[name], rank), np.float32) * np.float32(strength)
            tensors |= {f"{key}.lora_A.weight": inner, f"{key}.lora_B.weight": outer}
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **settings}
    (folder / CONFIG).write_text(json.dumps({**said, "target_modules": list(modules)}))
    return folder


FAKE_FILE = Path(__file__).with_name("fake_engine.py")


class RepeatedPrompt:
    """Answers of the fake engine: the prompt again, or backwards where an adapter is named."""

    def answer(self, inputs: GeneratingInputs, prompt: Prompt, max_tokens: int) -> Reference:
        ids = (prompt.ids[::-1] if prompt.adapter else prompt.ids)[:max_tokens]
        return Reference(
            prompt=prompt.ids,
            ids=ids,
            text=inputs.model.decoding().decode(list(ids), skip_special_tokens=True),
            margins=(math.inf,) * len(ids),
            logprobs=tuple(-float(index) for index in range(len(ids))),
        )


def fake_backend(token_delay_ms: float = 0.0) -> str:
    """Register the fake engine, which takes a time for each token; its name for `core.backend`."""
    name = f"fake_{token_delay_ms:g}ms"
    settings = {"token_delay_ms": token_delay_ms}
    ENGINES[name] = EngineModule(str(FAKE_FILE), fake=RepeatedPrompt(), settings=settings)
    GENERATION_BACKENDS[name] = False
    return name


def fake_engine() -> Any:
    """The class of the fake engine, loaded as the module of `runtime` that it is in a step."""
    name = "triptych.runtime.fake_engine"
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, FAKE_FILE)
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name].Engine


def write_pipeline(
    folder: Path,
    model: Path,
    adapters: Mapping[str, str] | None = None,
    *,
    token_delay_ms: float = 0.0,
    **core: object,
) -> Path:
    """A pipeline of the fake engine."""
    folder.mkdir(parents=True)
    spec = {
        "task": "text-generation",
        "model": {"source": str(model)},
        "adapters": adapters or {},
        "core": {"backend": fake_backend(token_delay_ms), "kv_cache": {"memory_mib": 2}, **core},
        "serving": {"queue": {"max_in_flight": 12}},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    lines = [{"text_input": text} for text in TEXTS]
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@dataclass
class Answer:
    """What came back of one request; `error` is empty where nothing failed."""

    chunks: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.chunks)


class Streams:
    """Streams to one pipeline of a server."""

    def __init__(self, url: str, pipeline: str) -> None:
        self._channel = grpc.insecure_channel(url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._pipeline = pipeline

    def close(self) -> None:
        self._channel.close()

    def open(self, *requests: Mapping[str, object]) -> Any:
        """The call of one or more requests: inputs by name (strings, booleans, and plain data as
        JSON), and `id` for its own.
        """
        return self._stub.ModelStreamInfer(iter(map(self._message, requests)), timeout=120)

    def _message(self, request: Mapping[str, object]) -> Any:
        values = dict(request)
        name = str(values.pop("id", ""))
        message = service_pb2.ModelInferRequest(model_name=self._pipeline, id=name)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, value in values.items():
            if isinstance(value, bool):
                dtype, data = "BOOL", bytes([value])
            else:
                text = value if isinstance(value, str | bytes) else json.dumps(value)
                content = text.encode() if isinstance(text, str) else text
                dtype, data = "BYTES", struct.pack("<I", len(content)) + content
            message.inputs.add(name=name, datatype=dtype, shape=[1])
            message.raw_input_contents.append(data)
        return message

    def ask(self, **values: object) -> Answer:
        """All that one request gets."""
        return read_answer(self.open(values))


def responses_of(call: Any) -> Iterator[Any]:
    """Its responses up to the final one."""
    for response in call:
        yield response
        if response.error_message:
            return
        if response.infer_response.parameters["triton_final_response"].bool_param:
            return


def read_answer(call: Any) -> Answer:
    """All that the one request of a call gets."""
    answer = Answer()
    for response in responses_of(call):
        take(answer, response)
    return answer


def take(answer: Answer, response: Any) -> None:
    """Add what a response says."""
    answer.error = response.error_message
    result = response.infer_response
    if not result.outputs:
        return
    raw = {
        output.name: data
        for output, data in zip(result.outputs, result.raw_output_contents, strict=True)
    }

    def text(name: str) -> str:
        return str(raw[name][4:], "utf-8")

    assert np.frombuffer(raw["index"], np.uint32).tolist() == [len(answer.ids)]
    answer.chunks.append(text("text_output"))
    answer.ids += np.frombuffer(raw["token_ids"], np.int32).tolist()
    answer.counted += np.frombuffer(raw["num_output_tokens"], np.uint32).tolist()
    answer.finish = text("finish_reason")
    answer.usage = json.loads(text("usage") or "{}")
    answer.logprobs += json.loads(text("logprobs") or "[]")
