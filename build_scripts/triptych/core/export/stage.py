"""The export stage, cached: a plan and a model's folder -> the fp32 ``model.onnx``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from triptych.base.cache import cached_stage, code_hash, key_of, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_files import MODEL_FILE, hashes_of_graph
from triptych.spec.model_cached import CODE as MODEL_CODE
from triptych.spec.plan import Plan

LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
CODE = ("core/export/*.py", "base/onnx_files.py")
REFUSAL_FILE = "cannot_pack.txt"


@dataclass(frozen=True)
class Exported:
    """What the export made.

    Attributes:
        file: the graph; missing where there is a `refusal`.
        key: hash of all that decided it, in hex.
        refusal: why the model's rows cannot be packed; empty where they are, or need not be.
        files: hashes of the graph's files, by name.
    """

    file: Path
    key: str
    refusal: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def export_model(plan: Plan, model_folder: Path, progress: Progress) -> Exported:
    """Export the model in the plan's layout.

    Raises:
        UserError: the model does not run with the task's head.
    """
    inputs: dict[str, object] = {
        "facts": plan.facts.of_core,
        "layout": plan.layout,
        "core": asdict(plan.core),
        "inputs": [tensor.name for tensor in plan.core_inputs],
        "versions": versions_of(*LIBRARIES),
        "code": code_hash(*CODE, *MODEL_CODE),
    }

    def work(target: Path) -> None:
        from triptych.core.export.packing import CannotPack
        from triptych.core.export.to_onnx import export_onnx

        progress("export", f"{plan.facts.architecture} to ONNX, {plan.layout} ...")
        try:
            export_onnx(
                model_folder,
                plan.facts,
                plan.core,
                plan.core_inputs,
                packed=plan.packed,
                target=target,
            )
        except CannotPack as reason:
            (target / REFUSAL_FILE).write_text(str(reason), encoding="utf-8")
        except (IndexError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            reason_text = " ".join(str(error).split())[:300]
            raise UserError(
                "model.source",
                f"must be a model that runs with this task's head ({plan.core.auto_class})",
                given=f"{plan.facts.architecture}: {type(error).__name__}: {reason_text}",
                remedy="Choose a model fine-tuned for this task",
            ) from error

    folder, cached, files = cached_stage("export", inputs, work, progress)
    key = key_of("export", inputs)
    note = folder / REFUSAL_FILE
    if note.is_file():
        return Exported(folder / MODEL_FILE, key, note.read_text(encoding="utf-8"))
    graph = hashes_of_graph(files)
    size = sum((folder / name).stat().st_size for name in graph) / 1e6
    progress("export", f"{MODEL_FILE}, {size:.1f} MB{' (cached)' if cached else ''}")
    return Exported(folder / MODEL_FILE, key, files=graph)
