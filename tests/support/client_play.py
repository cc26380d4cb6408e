"""Pipelines with the interface of every task; one Python step plays them all."""

PLAY = """
import hashlib, json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name)
                   for name in ("text", "text_pair", "image")}
        columns = [tensor.as_numpy()[:, 0] for tensor in tensors.values() if tensor]
        asked = json.loads(request.parameters())
        names = sorted(request.requested_output_names())
        play = getattr(self, "_".join(names))
        rows = []
        for index, row in enumerate(zip(*columns)):
            if b"refuse" in b"".join(row):
                refusal = pb_utils.TritonError(
                    f"[invalid_request row={index}] `text` must not be refused.",
                    pb_utils.TritonError.INVALID_ARG)
                return pb_utils.InferenceResponse([], error=refusal)
            rows.append(play(asked, *row))
        types = {"score": np.float32, "start": np.int32, "end": np.int32,
                 "embedding": np.float32, "embedding_int8": np.int8}
        return pb_utils.InferenceResponse([
            pb_utils.Tensor(name, np.array(column, types.get(name, np.object_)))
            for name, column in zip(names, zip(*rows))])

    def label_score(self, asked, row):
        if "candidate_labels" not in asked:
            count = asked.get("top_k", 1)
            word = hashlib.sha256(row).hexdigest()[:8]
            return [f"{word} {i}".encode() for i in range(count)], [0.5 ** i for i in range(count)]
        labels = json.loads(asked["candidate_labels"])
        template = asked.get("hypothesis_template", "{}")
        full = 1.0 if asked.get("multi_label") else 1 / len(labels)
        return [template.format(label).encode() for label in labels], [full] * len(labels)

    def score_token(self, asked, row):
        count = asked.get("top_k", 5)
        return [0.5 ** i for i in range(count)], [row + b"%d" % i for i in range(count)]

    def entities(self, asked, row):
        text = row.decode()
        found = [{"entity": asked.get("aggregation_strategy", "simple"), "text": word,
                  "start": text.index(word), "end": text.index(word) + len(word),
                  "score": None if word == "Nobody" else 0.75}
                 for word in text.split() if word.istitle()]
        return [[json.dumps(found, ensure_ascii=False).encode()]]

    def answer_end_score_start(self, asked, question, context):
        question, context = question.decode(), context.decode()
        start = context.find(question)
        if start < 0 and asked.get("handle_impossible_answer"):
            return [b""], [0], [0.875], [0]
        end = start + asked.get("max_answer_len", 15)
        return [context[start:end].encode()], [end], [0.25], [start]

    def score(self, asked, query, passage):
        return [[float(passage.count(query))]]

    def embedding_embedding_int8(self, asked, row):
        vector = np.frombuffer(hashlib.sha256(row).digest()[:8], np.uint8) + 1.0
        if asked.get("encoding", "int8") == "float":
            return vector, []
        packed = vector - 128 if asked.get("encoding") != "binary" else vector[:1] / 2
        return [], packed.astype(np.int8)
"""

PLAY_CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "text" data_type: TYPE_STRING dims: [1] optional: true },
       { name: "text_pair" data_type: TYPE_STRING dims: [1] optional: true },
       { name: "image" data_type: TYPE_STRING dims: [1] optional: true }]
output [{ name: "label" data_type: TYPE_STRING dims: [-1] },
        { name: "token" data_type: TYPE_STRING dims: [-1] },
        { name: "score" data_type: TYPE_FP32 dims: [-1] },
        { name: "entities" data_type: TYPE_STRING dims: [1] },
        { name: "answer" data_type: TYPE_STRING dims: [1] },
        { name: "start" data_type: TYPE_INT32 dims: [1] },
        { name: "end" data_type: TYPE_INT32 dims: [1] },
        { name: "embedding" data_type: TYPE_FP32 dims: [-1] },
        { name: "embedding_int8" data_type: TYPE_INT8 dims: [-1] }]
instance_group { kind: KIND_CPU count: 1 }
"""

# Name -> inputs, and outputs with type and size.
PLAYED: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, int]]]] = {
    "embedder": (("text",), {"embedding": ("FP32", -1), "embedding_int8": ("INT8", -1)}),
    "classifier": (("text",), {"label": ("STRING", -1), "score": ("FP32", -1)}),
    "seer": (("image",), {"label": ("STRING", -1), "score": ("FP32", -1)}),
    "filler": (("text",), {"token": ("STRING", -1), "score": ("FP32", -1)}),
    "tagger": (("text",), {"entities": ("STRING", 1)}),
    "reader": (
        ("text", "text_pair"),
        {"answer": ("STRING", 1), "score": ("FP32", 1), "start": ("INT32", 1), "end": ("INT32", 1)},
    ),
    "reranker": (("text", "text_pair"), {"score": ("FP32", 1)}),
}


def play_config(inputs: tuple[str, ...], outputs: dict[str, tuple[str, int]]) -> str:
    lines, maps = ['platform: "ensemble"', "max_batch_size: 8"], []
    sides = {"input": dict.fromkeys(inputs, ("STRING", 1)), "output": outputs}
    for side, tensors in sides.items():
        for name, (kind, size) in tensors.items():
            lines.append(f'{side} {{ name: "{name}" data_type: TYPE_{kind} dims: [{size}] }}')
            maps.append(f'{side}_map {{ key: "{name}" value: "{name}" }}')
    step = f'step {{ model_name: "play" model_version: -1 {" ".join(maps)} }}'
    return "\n".join([*lines, f"ensemble_scheduling {{ {step} }}"])
