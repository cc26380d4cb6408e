"""The table of Triton releases: versions, and the config fields that each one knows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from triptych.errors import UserError
from triptych.repository.config import new_config, parse_config
from triptych.versions import (
    CONFIG_FIELDS,
    TRITON_VERSIONS,
    Release,
    fields_newer_than,
    parse_release,
    without_newer_fields,
)

NEW = """
input [{ name: "a" is_non_linear_format_io: true }, { name: "b" }]
runtime: "x"
model_metrics { }
ensemble_scheduling {
  step [{ model_name: "m" }, { model_name: "n" model_namespace: "s" }]
  max_inflight_requests: 4
}
"""


@pytest.mark.parametrize("text", ["24.10", "24.10-py3", "24.10-trtllm-python-py3", "2.51.0"])
def test_a_release_is_read_from_its_tag_or_version(text: str) -> None:
    assert parse_release(text) == Release(24, 10)
    assert str(parse_release(text)) == "24.10"


@pytest.mark.parametrize("text", ["", "24", "24.13", "24.00", "2410", "24.10py3", "2.51", "latest"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"YY\.MM") as refused:
        parse_release(text)
    assert refused.value.given == text


def test_releases_are_ordered_by_date_and_so_are_their_versions() -> None:
    releases = list(TRITON_VERSIONS)
    numbers = [tuple(map(int, version.split("."))) for version in TRITON_VERSIONS.values()]
    assert releases == sorted(releases)
    assert numbers == sorted(numbers)
    assert parse_release("25.12") < parse_release("26.01")


def test_every_field_of_the_table_is_in_the_schema() -> None:
    for field in CONFIG_FIELDS:
        descriptor = new_config().DESCRIPTOR
        for name in field.name.split("."):
            assert name in descriptor.fields_by_name, field.name
            descriptor = descriptor.fields_by_name[name].message_type


def test_the_embedded_server_knows_the_fields_that_the_table_says() -> None:
    found = importlib.util.find_spec("pytriton")
    assert found is not None
    assert found.origin is not None
    binary = (Path(found.origin).parent / "tritonserver/bin/tritonserver").read_bytes()
    for field in CONFIG_FIELDS:
        known = field.name.rpartition(".")[2].encode() in binary
        assert known == (field.release <= Release(24, 10)), field.name


@pytest.mark.parametrize(
    ("triton", "newer"),
    [
        ("23.05", {"model_namespace", "is_non_linear_format_io", "runtime", "model_metrics"}),
        ("24.07", {"is_non_linear_format_io", "model_metrics"}),
        ("24.10", {"model_metrics"}),
        ("25.10", set()),
    ],
)
def test_newer_fields_are_found_and_left_out(triton: str, newer: set[str]) -> None:
    config = parse_config(NEW)
    expected = newer | {"max_inflight_requests"}
    assert {f.name.rpartition(".")[2] for f in fields_newer_than(config, triton)} == expected
    older = without_newer_fields(config, triton)
    assert fields_newer_than(older, triton) == []
    assert not any(name in str(older) for name in expected)
    assert [step.model_name for step in older.ensemble_scheduling.step] == ["m", "n"]
    assert config == parse_config(NEW)


def test_a_config_without_new_fields_stays_as_it_is() -> None:
    config = parse_config('name: "a" ensemble_scheduling { step [{ model_name: "m" }] }')
    assert fields_newer_than(config, Release(23, 1)) == []
    assert without_newer_fields(config, "23.01") == config
    assert fields_newer_than(parse_config(NEW), "25.11") == []
