"""The table of Triton releases, and wheels that a package index does not have."""

import importlib.util
from pathlib import Path

import pytest

from triptych.base.errors import UserError
from triptych.base.extras import download_wheels
from triptych.base.releases import (
    BACKEND_PARAMETERS,
    CONFIG_FIELDS,
    OLDEST,
    SERVER_FLAGS,
    TENSORRT_VERSIONS,
    TRITON_VERSIONS,
    Release,
    fields_newer_than,
    flags_newer_than,
    parameters_newer_than,
    parse_release,
    releases_with,
    tensorrt_major,
    without_newer_fields,
)
from triptych.repository.config import new_config, parse_config

NEW = """
input [{ name: "a" is_non_linear_format_io: true }, { name: "b" }]
model_metrics { }
ensemble_scheduling {
  step [{ model_name: "m" }, { model_name: "n" model_namespace: "s" }]
  max_inflight_requests: 4
}
"""


def test_a_release_is_read_from_its_tag_or_version() -> None:
    for text in ("24.10", "24.10-py3", "24.10-trtllm-python-py3", "2.51.0"):
        assert parse_release(text) == Release(24, 10), text
        assert str(parse_release(text)) == "24.10"
    for rule, texts in (
        (r"YY\.MM", ("", "24", "24.13", "24.00", "2410", "24.10py3", "2.51", "latest")),
        (r"must be Triton 24\.10 or later", ("24.09", "23.05-py3", "24.04")),
    ):
        for text in texts:
            with pytest.raises(UserError, match=rule) as refused:
                parse_release(text)
            assert refused.value.given == text


def test_every_field_of_the_table_is_in_the_schema() -> None:
    for field in CONFIG_FIELDS:
        descriptor = new_config().DESCRIPTOR
        for name in field.name.split("."):
            assert name in descriptor.fields_by_name, field.name
            descriptor = descriptor.fields_by_name[name].message_type


def test_the_embedded_server_knows_what_the_tables_say() -> None:
    found = importlib.util.find_spec("pytriton")
    assert found is not None
    assert found.origin is not None
    binary = (Path(found.origin).parent / "tritonserver/bin/tritonserver").read_bytes()
    # Settings within a flag are read by code that the binary holds no names of.
    flags = (flag for flag in SERVER_FLAGS if "." not in flag.name)
    for since in (*CONFIG_FIELDS, *flags):
        known = since.name.rpartition(".")[2].encode() in binary
        assert known == (since.release <= Release(24, 10)), since


def test_the_tables_are_in_order_of_release() -> None:
    """Nothing inside an image gets older with its release."""
    assert min(TRITON_VERSIONS) == OLDEST
    for versions in (TRITON_VERSIONS, TENSORRT_VERSIONS):
        assert list(versions) == sorted(versions)
        numbers = [tuple(map(int, version.split("."))) for version in versions.values()]
        assert numbers == sorted(numbers)
    for table in (CONFIG_FIELDS, SERVER_FLAGS):
        assert all(since.release > OLDEST for since in table)
    assert list(SERVER_FLAGS) == sorted(SERVER_FLAGS, key=lambda flag: flag.release)


def test_newer_fields_are_found_and_left_out() -> None:
    for triton, newer in (
        ("24.10", {"model_metrics", "max_inflight_requests"}),
        ("24.11", {"max_inflight_requests"}),
        ("25.11", set()),
    ):
        config, release = parse_config(NEW), parse_release(triton)
        assert {f.name.rpartition(".")[2] for f in fields_newer_than(config, release)} == newer
        older = without_newer_fields(config, release)
        assert fields_newer_than(older, release) == []
        assert not any(name in str(older) for name in newer)
        assert [step.model_name for step in older.ensemble_scheduling.step] == ["m", "n"]
        assert config == parse_config(NEW)


def test_flags_that_a_release_does_not_know_are_found() -> None:
    for words, newer, first in (
        ("--http-port=8000 --model-repository /models", "", "24.10"),
        ("--grpc-infer-thread-count=8 --exit-timeout-secs=60", "grpc-infer-thread-count", ""),
        ("--http-max-input-size 1000", "http-max-input-size", ""),
        ("grpc-max-response-pool-size", "grpc-max-response-pool-size", "25.03"),
        ("--allow-client-shm --http-restricted-api=x:k=v", "allow-client-shm", ""),
        ("--metrics-config=counter_latencies=true", "", "24.10"),
        (
            "--metrics-config=histogram_latencies=true",
            "metrics-config.histogram_latencies",
            "26.01",
        ),
        ("--metrics-config histogram_latencies=true", "metrics-config.histogram_latencies", ""),
    ):
        flags = words.split()
        assert [flag.name for flag in flags_newer_than(flags, OLDEST)] == newer.split(), words
        assert flags_newer_than(flags, Release(26, 8)) == []
        if first and newer:  # the release whose branch has the flag
            release = parse_release(first)
            before = max(other for other in TRITON_VERSIONS if other < release)
            assert flags_newer_than(flags, before), words
            assert not flags_newer_than(flags, release), words


def test_parameters_that_a_backend_does_not_know_are_found_and_left_out() -> None:
    (strategy,) = BACKEND_PARAMETERS["tensorrt"]
    keys = ("execution_context_allocation_strategy", "mine")
    values = (f'parameters {{ key: "{key}" value {{ string_value: "x" }} }}' for key in keys)
    text = " ".join(values)
    config = parse_config(f'backend: "tensorrt" {text}')
    before = Release(25, 4)
    assert parameters_newer_than(config, before) == [strategy]
    assert parameters_newer_than(config, Release(25, 5)) == []
    assert set(without_newer_fields(config, before).parameters) == {"mine"}
    assert parameters_newer_than(parse_config(f'backend: "python" {text}'), before) == []


def test_the_tensorrt_of_a_release_is_known_or_said_to_be_unknown() -> None:
    for triton, tensorrt, major in (
        ("24.10", None, 10),
        ("26.05", "10.16.1.11", 10),
        ("26.06", "11.0.0.114", 11),
        ("26.08-py3", "11.2.1.2", 11),
        ("26.09", None, 11),
        ("27.01", None, None),
    ):
        release = parse_release(triton)
        assert TENSORRT_VERSIONS.get(release) == tensorrt
        assert tensorrt_major(release) == major
        if tensorrt is not None:
            assert releases_with(tensorrt) == [release]


def test_a_package_that_is_not_there_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    said = download_wheels(["no-such-package==1.0"], tmp_path / "wheels", "--no-index")
    assert said == "ERROR: No matching distribution found for no-such-package==1.0"
    assert not list(tmp_path.rglob("*.whl"))


def test_pip_has_a_time_limit(tmp_path: Path) -> None:
    said = download_wheels(["no-such-package==1.0"], tmp_path, "--no-index", timeout_s=0.0)
    assert said == "no answer within 0 s"
