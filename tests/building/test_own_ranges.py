"""GraphRanges of the inputs of own models, and that a row out of range costs no other request."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnx
import pytest

from tests.support.mistakes import check_refused
from tests.support.own_models import FLOAT, MAKE, NODE, build_own, read_own, save_graph, write_rows
from tests.support.project import quiet
from triptych.base.errors import UserError
from triptych.client import AsyncClient, BatchFailedError, Client, InvalidRequestError, Retry, retry
from triptych.core.export.own_ranges import GraphRanges, find_ranges
from triptych.core.own_inputs import read_own_inputs
from triptych.gateway.app import make_app
from triptych.gateway.http import Shared
from triptych.gateway.pipelines import Pipelines
from triptych.serving.server import Server
from triptych.spec.model_fields import load_model_spec

INT64 = onnx.TensorProto.INT64
INF = float("inf")

DERIVED: dict[str, tuple[list[Any], list[Any]]] = {
    "y = Gather(t, x)": ([-7.0], [6.0]),
    "one = Constant<value_ints=[1]>() m = Sub(x, one) y = Gather(t, m)": ([-6.0], [7.0]),
    "three = Constant<value_ints=[3]>() m = Mul(x, three) y = Gather(t, m)": ([-7 / 3], [2.0]),
    "three = Constant<value_ints=[3]>() m = Div(x, three) y = Gather(t, m)": ([-23.0], [20.0]),
    "f = Cast<to=1>(x) i = Cast<to=6>(f) y = Gather(t, i)": ([-8 + 7e-6], [7 - 6e-6]),
    "a = Constant<value_ints=[1]>() s = Squeeze(x, a) y = Gather(t, s)": ([-7.0], [6.0]),
    "a = Constant<value_ints=[-1]>() r = Reshape(x, a) y = Gather(t, r)": ([-7.0], [6.0]),
    "a = Constant<value_ints=[2]>() u = Unsqueeze(x, a) y = GatherND(t, u)": ([-7.0], [6.0]),
    "i = Concat<axis=1>(x, x) y = GatherND(t, i)": ([-5.0], [4.0]),
    "z = Constant<value_int=0>() w = Constant<value_int=6>() c = Clip(x, z, w) y = Gather(t, c)": (
        [],
        [],
    ),
    "seven = Constant<value_ints=[7]>() m = Mod(x, seven) y = Gather(t, m)": ([], []),
    "k = ArgMax(x) y = Gather(t, k)": ([], []),
}
"""Graphs of x INT64 [n, 1] and a table of 7 rows of 5; the bounds of x."""


def ranges_of(nodes: str, axes: str = "n, 1", *, negative: bool = True) -> GraphRanges:
    table = ", ".join(["0"] * 35)
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (int64[{axes}] x) => (float y)'
    text += f" <float[7, 5] t = {{{table}}}> {{ {nodes} }}"
    return find_ranges(onnx.parser.parse_model(text), negative=negative)


@pytest.mark.parametrize("nodes", DERIVED)
def test_the_range_of_an_index_is_derived(nodes: str) -> None:
    low, high = DERIVED[nodes]
    ranges = ranges_of(nodes)
    assert not ranges.unknown
    found = ranges.bounds.get("x", np.empty((2, 0)))
    np.testing.assert_allclose(found, [low, high], rtol=1e-9)


def test_each_column_has_its_own_range() -> None:
    columns = (
        "i = Constant<value_int=2>() c = Gather<axis=1>(x, i) a = Gather(t, c)"
        " s = Constant<value_ints=[0]>() e = Constant<value_ints=[2]>()"
        " o = Constant<value_ints=[1]>() p = Slice(x, s, e, o) y = GatherND(t, p)"
    )
    ranges = ranges_of(columns, "n, 4", negative=False)
    assert ranges.bounds["x"].tolist() == [[0, 0, 0, -INF], [6, 4, 6, INF]]
    # The same bound for all tokens; none for the first one alone.
    assert ranges_of("y = Gather(t, x)", "n, tokens").bounds["x"].tolist() == [[-7], [6]]
    first = ranges_of(
        "i = Constant<value_int=0>() c = Gather<axis=1>(x, i) y = Gather(t, c)", "n, k"
    )
    assert "variable axis" in first.unknown["x"]
    assert not first.bounds


def test_a_range_that_cannot_be_derived_names_the_operator() -> None:
    assert "Mul" in ranges_of("m = Mul(x, x) y = Gather(t, m)").unknown["x"]
    free = "f = Cast<to=1>(x) y = GatherElements<axis=1>(f, x)"
    assert "variable size" in ranges_of(free, "n, k").unknown["x"]


NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.day = torch.nn.Embedding(7, 4)
        self.month = torch.nn.Embedding(12, 4)

    def forward(self, day, month):
        return {"score": (self.day(day) + self.month(month - 1)).sum(2)}
"""


def write_days(folder: Path, *, is_module: bool, **day: Any) -> Path:
    """Write a pipeline without functions that reads two tables, as a module or an ONNX file."""
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(NET)
    table = np.random.default_rng(0).normal(size=(7, 12)).astype(np.float32)
    nodes = [
        NODE("Sub", ["month", "one"], ["place"]),
        NODE("Concat", ["day", "place"], ["both"], axis=1),
        NODE("GatherND", ["table", "both"], ["value"]),
        NODE("Unsqueeze", ["value", "one"], ["score"]),
    ]
    inputs = [MAKE(name, INT64, ["n", 1]) for name in ("day", "month")]
    weights = {"table": table, "one": np.array([1])}
    save_graph(folder / "net.onnx", nodes, inputs, [MAKE("score", FLOAT, ["n", 1])], weights)
    hooks = "def preprocess(rows):\n    return {n: v[:, None] for n, v in rows.items()}\n"
    (folder / "hooks.py").write_text(hooks)
    write_rows(folder, [{"day": i % 7, "month": i % 12 + 1} for i in range(24)])
    spec = {
        "task": "model",
        "model": {"module": "net.py:Net"} if is_module else {"onnx": "net.onnx"},
        "inputs": {"day": {"type": "int", **day}, "month": {"type": "int"}},
        "outputs": {"score": {"type": "float"}},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    base = tmp_path_factory.mktemp("ranges")
    for name in ("module", "graph"):
        write_days(base / "pipelines" / name, is_module=name == "module", choices=[*range(6), 9])
        (base / "pipelines" / name / "traffic.jsonl").write_text('{"day": 5, "month": 12}\n' * 9)
        build_own(base, name)
    with Server(base / "repository") as server:
        yield server


ROWS_OF_A_CLIENT = 30


@pytest.mark.server
@pytest.mark.parametrize("name", ["module", "graph"])
def test_rows_out_of_range_fail_no_request_of_another_client(name: str, server: Any) -> None:
    bad = {"day": [9], "month": [1]} if name == "module" else {"day": [0], "month": [14]}

    def ask(client: Client, is_good: bool) -> list[str]:
        errors = []
        for index in range(ROWS_OF_A_CLIENT):
            row = {"day": [index % 6], "month": [index % 12 + 1]} if is_good else bad
            try:
                client.infer(row)
            except InvalidRequestError as error:
                errors.append(str(error))
        return errors

    with Client(name, server.grpc_url) as client, ThreadPoolExecutor(14) as pool:
        kinds = [index >= 2 for index in range(14)]
        errors = list(pool.map(lambda is_good: ask(client, is_good), kinds))
    assert not any(errors[2:])
    refused = {
        "module": "`day` must be from 0 to 6. Given: 9",
        "graph": "`month` must be from -11 to 12",
    }
    assert [len(each) for each in errors[:2]] == [ROWS_OF_A_CLIENT] * 2
    assert all(refused[name] in each for each in errors[0])


BAD = 100
"""A value that no range describes: the graph divides integers by its distance from 100."""
BAD_REQUESTS = 10
"""Number of requests with it of each of the two other clients, which send each once."""
PATIENT = Retry(attempts=10**6, first_pause_s=0.001, longest_pause_s=0.01, budget=10**6)


def write_divider(folder: Path, *, bad: int) -> None:
    """Write a pipeline around a graph that fails for one value."""
    folder.mkdir(parents=True)
    nodes = [
        NODE("Sub", ["amount", "bad"], ["distance"]),
        NODE("Div", ["whole", "distance"], ["quotient"]),
        NODE("Cast", ["quotient"], ["share"], to=FLOAT),
    ]
    weights = {"whole": np.array([[1000]]), "bad": np.array([[bad]])}
    inputs, outputs = [MAKE("amount", INT64, ["n", 1])], [MAKE("share", FLOAT, ["n", 1])]
    save_graph(folder / "net.onnx", nodes, inputs, outputs, weights)
    hooks = "def preprocess(rows):\n    return {n: v[:, None] for n, v in rows.items()}\n"
    (folder / "hooks.py").write_text(hooks)
    write_rows(folder, [{"amount": i % 7 + 1} for i in range(24)])
    spec = {
        "task": "model",
        "model": {"onnx": "net.onnx"},
        "inputs": {"amount": {"type": "int"}},
        "outputs": {"share": {"type": "float"}},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))


@pytest.fixture(scope="module")
def divider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    base = tmp_path_factory.mktemp("divider")
    write_divider(base / "pipelines/divide", bad=BAD)
    build_own(base, "divide")
    with Server(base / "repository") as server:
        yield server


@pytest.mark.build
def test_a_made_up_row_that_the_model_refuses_ends_the_build_with_the_remedy(
    tmp_path: Path,
) -> None:
    """Rows of 0 are among the edge cases of a build."""
    write_divider(tmp_path / "pipelines/divide", bad=0)
    with pytest.raises(UserError, match=r"amount=\[0\]: .*division by zero\. Declare min, max or"):
        build_own(tmp_path, "divide")
    build_own(tmp_path, "divide", "inputs.amount.min=1")


@pytest.mark.server
@pytest.mark.parametrize("way", ["client", "gateway"])
def test_rows_that_no_range_describes_fail_no_request_of_another_client(
    way: str, divider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a failed batch one request at least is bad, so there are fewer such batches than attempts.

    This holds at any speed of the machine.
    """
    monkeypatch.setattr(retry, "_ALONE_ATTEMPTS", 2 * BAD_REQUESTS + 2)
    amounts = [index % 7 + 1 for index in range(ROWS_OF_A_CLIENT)]
    url = divider.grpc_url

    async def ask_client() -> list[list[float]]:
        async with AsyncClient("divide", url, retry=PATIENT) as client:

            async def ask() -> list[float]:
                return [
                    (await client.infer({"amount": [amount]}))["share"].item() for amount in amounts
                ]

            return await asyncio.gather(*[ask() for _ in range(12)])

    async def ask_gateway() -> list[list[float]]:
        pipelines = Pipelines(["divide"], {}, None, {"url": url, "retry": PATIENT})
        transport = httpx2.ASGITransport(make_app(pipelines, Shared()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:

            async def ask() -> list[float]:
                answers = [
                    await http.post("/v1/pipelines/divide", json={"rows": [{"amount": amount}]})
                    for amount in amounts
                ]
                return [answer.json()["rows"][0]["share"] for answer in answers]

            found = await asyncio.gather(*[ask() for _ in range(12)])
        await pipelines.close()
        return found

    def attack(_: int) -> None:
        with Client("divide", url, retry=None) as bad:
            for _ in range(BAD_REQUESTS):
                with pytest.raises(BatchFailedError, match="division by zero"):
                    bad.infer({"amount": [BAD]})

    with ThreadPoolExecutor(2) as pool:
        attacks = pool.map(attack, range(2))
        answers = asyncio.run(ask_client() if way == "client" else ask_gateway())
        list(attacks)
    assert answers == [[float(int(1000 / (amount - BAD))) for amount in amounts]] * 12


@pytest.mark.server
def test_a_range_of_the_spec_names_row_field_and_value(server: Any) -> None:
    with Client("module", server.grpc_url) as client:
        with pytest.raises(InvalidRequestError, match=r"`day` must be one of .*Given: 8") as caught:
            client.infer({"day": [1, 8], "month": [1, 1]})
        assert caught.value.row == 1
        with pytest.raises(InvalidRequestError, match="row 2: `month` must be from 1 to 12"):
            client.infer({"day": [1, 1, 1], "month": [1, 1, 0]})


@pytest.mark.build
def test_ranges_are_shown_and_fields_are_checked(tmp_path: Path) -> None:
    lines = list[str]()
    folder = write_days(tmp_path / "pipelines/days", is_module=True)
    inputs = read_own_inputs(load_model_spec(folder), lambda _, line: lines.append(line))
    own = inputs.plan.info.own
    assert own is not None
    assert own.ranges == {"day": [[0], [6]], "month": [[1], [12]]}
    assert "day 0 to 6, month 1 to 12; a row out of range fails alone" in lines
    # A module that gets negative indices takes them as ONNX does.
    text = NET.replace("self.day(day)", "self.day.weight[day]")
    (folder / "net.py").write_text(text)
    write_rows(folder, [{"day": -1, "month": 12}, {"day": 6, "month": 1}])
    own = read_own(tmp_path, "days").plan.info.own
    assert own is not None
    assert own.ranges["day"] == [[-7], [6]]
    (folder / "net.py").write_text(NET.replace("self.day(day)", "self.day(day * day)"))
    write_rows(folder, [{"day": 1, "month": 12}, {"day": 2, "month": 1}])
    lines.clear()
    read_own_inputs(load_model_spec(folder), lambda _, line: lines.append(line))
    assert any("Add `inputs: day: {min: 0, max: SIZE - 1}`" in line for line in lines)
    lines.clear()
    declared = load_model_spec(folder, ["inputs.day.min=0", "inputs.day.max=2"])
    read_own_inputs(declared, lambda _, line: lines.append(line))
    assert not any("SIZE" in line for line in lines)
    write_rows(folder, [{"day": 3, "month": 1}])
    check_refused("`day` must be from 0 to 2", read_own_inputs, declared, quiet)
    for bad in ("min=5", "type=text"):
        spec = [f"inputs.day.{bad}", "inputs.day.max=2"]
        check_refused(
            "must not be greater" if "5" in bad else "only supported", load_model_spec, folder, spec
        )


def test_a_value_has_at_most_max_items(tmp_path: Path) -> None:
    folder = write_days(tmp_path / "pipelines/days", is_module=True)
    spec = load_model_spec(folder, ["inputs.day.shape=[k]", "inputs.day.max_items=2"])
    write_rows(folder, [{"day": [1, 2, 3], "month": 1}])
    check_refused("`day` must have at most 2 elements", read_own_inputs, spec, quiet)
