"""Text of config.pbtxt in a spec is merged into the generated configs."""

from pathlib import Path

import pytest

from triptych.base.errors import UserError
from triptych.repository.config import parse_config
from triptych.repository.config_text import GENERATED, check_config_texts, merge_config_text

CORE = """
name: "minilm_core" backend: "onnxruntime" max_batch_size: 32
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 100 }
parameters { key: "enable_mem_pattern" value { string_value: "0" } }
"""


def merge(text: str) -> str:
    return str(merge_config_text(parse_config(CORE), {"core": text}, "core"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 2 }",
            CORE.replace("100 }", "100 priority_levels: 2 default_priority_level: 2 }"),
        ),
        (
            "dynamic_batching { max_queue_delay_microseconds: 7 }",
            CORE.replace("microseconds: 100", "microseconds: 7"),
        ),
        (
            'instance_group { count: 2 kind: KIND_CPU host_policy: "numa0" }',
            CORE.replace("count: 1 kind: KIND_CPU", 'count: 2 kind: KIND_CPU host_policy: "numa0"'),
        ),
        (
            'parameters { key: "mine" value { string_value: "1" } }',
            CORE + 'parameters { key: "mine" value { string_value: "1" } }',
        ),
        (
            "version_policy { specific { versions: [1, 3] } }",
            CORE + "version_policy { specific { versions: [1, 3] } }",
        ),
    ],
)
def test_a_text_is_merged_by_the_rules_of_protobuf(text: str, expected: str) -> None:
    assert merge(text) == str(parse_config(expected))


def test_the_generated_config_and_other_steps_stay_as_they_are() -> None:
    config = parse_config(CORE)
    assert merge_config_text(config, {"ensemble": "version_policy { all { } }"}, "core") == config
    merge_config_text(config, {"core": "version_policy { all { } }"}, "core")
    assert config == parse_config(CORE)


@pytest.mark.parametrize("field", sorted(GENERATED))
def test_what_the_build_generates_cannot_be_set(field: str) -> None:
    values = {"max_batch_size": ": 4", "ensemble_scheduling": " { }"}
    kinds = ("input", "output", "batch_input", "batch_output", "model_warmup")
    value = values.get(field, " { }" if field in kinds else ': "x"')
    with pytest.raises(UserError, match="must not set what is decided elsewhere") as refused:
        check_config_texts({"core": field + value})
    assert (refused.value.field, refused.value.given) == ("serving.config.core", field)


def test_a_parameter_that_a_step_reads_cannot_be_set() -> None:
    with pytest.raises(UserError, match="must not set") as refused:
        merge('parameters { key: "enable_mem_pattern" value { string_value: "1" } }')
    assert refused.value.given == "parameters enable_mem_pattern"


def test_a_text_that_is_no_config_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match="is not a ModelConfig") as refused:
        check_config_texts({"preprocess": "dynamic_batching {\n  priority: 2\n}"})
    assert refused.value.field == "serving.config.preprocess"
    assert "2:3" in str(refused.value.given)


def test_a_shared_core_is_configured_by_its_owner() -> None:
    check_config_texts({"ensemble": "version_policy { all { } }"}, shares_core=True)
    with pytest.raises(UserError, match="decided elsewhere"):
        check_config_texts({"core": "version_policy { all { } }"}, shares_core=True)


@pytest.mark.server
def test_a_built_pipeline_has_the_settings_and_serves(tmp_path: Path, tiny_model: Path) -> None:
    from conftest import build_into, lock_data, write_pipeline
    from triptych.client import Client, InferenceError
    from triptych.serving.server import Server

    # No request of level 2 is served in a microsecond.
    levels = """dynamic_batching { priority_queue_policy {
        key: 2 value { timeout_action: REJECT default_timeout_microseconds: 1 } } }"""
    folder = write_pipeline(
        tmp_path / "mine",
        model={"source": str(tiny_model)},
        core={
            "session": {"inter_threads": 2, "memory_arena": "none", "memory_pattern": True},
        },
        serving={
            "priority": {"levels": 2},
            "instances": {"core": 2},
            "config": {"core": levels, "ensemble": "version_policy { latest { num_versions: 1 } }"},
        },
    )
    build_into(folder, tmp_path / "repository")
    text = (tmp_path / "repository/mine_core/config.pbtxt").read_text(encoding="utf-8")
    batching = parse_config(text).dynamic_batching
    assert (batching.priority_levels, batching.default_priority_level) == (2, 2)
    assert list(batching.priority_queue_policy) == [2]
    assert lock_data(tmp_path / "repository", "mine")["spec"]["serving"]["config"]["core"] == levels
    with (
        Server(tmp_path / "repository") as server,
        Client("mine", server.grpc_url, retry=None) as client,
    ):
        # Triton passes the priority of an ensemble's request on to its steps.
        first = client.infer({"text": ["a text"]}, parameters={"priority": 1})
        assert first["embedding"].shape == (1, 32)
        for parameters in ({"priority": 2}, {}):
            with pytest.raises(InferenceError, match="timeout"):
                client.infer({"text": ["a text"]}, parameters=parameters)
