"""YAML with reasons: read from templates, and written."""

from pathlib import Path

import yaml

from triptych.base.explained import (
    ExplainedValue,
    parse_yaml,
    plain,
    reasons_of,
    render_yaml,
    yaml_of,
)

TEMPLATE = """\
# reason of the name
name: {{ name }}
count: {{ count }}
list:
  # first
  - key: 1
    text: |-
      # no comment
      two lines
  - {flow: [1, 2]} # not of the inner values
  # a word
  - word
block: # behind a key
  {{ key }}: {{ "a" ~ "b" }}
"""


def test_comments_above_and_behind_a_value_are_its_reason(tmp_path: Path) -> None:
    (tmp_path / "one.yaml.j2").write_text(TEMPLATE)
    text = "yes: no # \"quoted\" 'twice' \u00b5s"
    count = ExplainedValue(3, "because of\nthat")
    data = render_yaml(tmp_path / "one.yaml.j2", name=text, count=count, key="on")
    assert plain(data) == {
        "name": text,
        "count": 3,
        "list": [{"key": 1, "text": "# no comment\ntwo lines"}, {"flow": [1, 2]}, "word"],
        "block": {"on": "ab"},
    }
    assert {path: reason for path, _, reason in reasons_of(data)} == {
        "name": "reason of the name",
        "count": "because of that",
        "list[0].key": "first",
        "list[2]": "a word",
        "block": "behind a key",
    }
    assert plain(parse_yaml(yaml_of(data))) == yaml.safe_load(yaml_of(data)) == plain(data)
    assert list(reasons_of(parse_yaml(yaml_of(data)))) == list(reasons_of(data))


def test_text_that_kubernetes_would_read_as_a_number_is_quoted() -> None:
    for text in ("047976016330", "1234e5678901", "0o17", "1.5", "-3", "4797e601633"):
        assert yaml_of({"version": text}) == f"version: '{text}'\n"
    for text in ("2.51.0", "10m", "4797f6016330"):
        assert yaml_of({"version": text}) == f"version: {text}\n"


def test_text_of_several_lines_keeps_its_ends() -> None:
    for text in ("a\nb", "a\nb\n", "a\n\n", "\n", " a\n  b", "a \nb", "a\tb\n", "\u00e9\n"):
        assert parse_yaml(yaml_of({"script": {"text": text}})) == {"script": {"text": text}}
    assert yaml_of({"text": "a\nb"}) == "text: |-\n  a\n  b\n"
