"""Text of config.pbtxt in a spec is merged into the generated configs."""

from mistakes import refusal
from triptych.repository.config import parse_config
from triptych.repository.config_text import GENERATED, check_config_texts, merge_config_text

CORE = """
name: "minilm_core" backend: "onnxruntime" max_batch_size: 32
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 100 }
parameters { key: "enable_mem_pattern" value { string_value: "0" } }
"""


def test_a_text_is_merged_by_the_rules_of_protobuf() -> None:
    for text, expected in (
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
            CORE.replace("count: 1", "count: 2").replace("_CPU", '_CPU host_policy: "numa0"'),
        ),
        *(
            (more, CORE + more)
            for more in (
                'parameters { key: "mine" value { string_value: "1" } }',
                "version_policy { specific { versions: [1, 3] } }",
            )
        ),
    ):
        config = parse_config(CORE)
        assert merge_config_text(config, {"core": text}, "core") == parse_config(expected), text
        # The generated config and other steps stay as they are.
        assert config == merge_config_text(config, {"ensemble": text}, "core") == parse_config(CORE)


def test_what_the_build_decides_cannot_be_set() -> None:
    for field in GENERATED:
        values = {"max_batch_size": ": 4", "ensemble_scheduling": " { }"}
        kinds = ("input", "output", "batch_input", "batch_output", "model_warmup")
        value = values.get(field, " { }" if field in kinds else ': "x"')
        error = refusal(check_config_texts, {"core": field + value})
        assert "must not set what is decided elsewhere" in error.message, field
        assert (error.field, error.given) == ("serving.config.core", field)
    own = {"core": 'parameters { key: "enable_mem_pattern" value { string_value: "1" } }'}
    error = refusal(merge_config_text, parse_config(CORE), own, "core")
    assert error.given == "parameters enable_mem_pattern"
    error = refusal(check_config_texts, {"preprocess": "dynamic_batching {\n  priority: 2\n}"})
    assert error.field == "serving.config.preprocess"
    assert "is not a ModelConfig" in error.message
    assert "2:3" in str(error.given)
    versions = "version_policy { all { } }"  # a shared core is configured by its owner
    check_config_texts({"ensemble": versions}, shares_core=True)
    error = refusal(check_config_texts, {"core": versions}, shares_core=True)
    assert "decided elsewhere" in error.message
