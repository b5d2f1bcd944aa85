"""KServe v2 area by area, over REST and gRPC alike; `make conformance` prints the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.serve.api.kserve.kserve_tensors import DATATYPES
from infer.serve.limits import ServeLimits
from infer.serve.workers.messages import ModelSource
from infer.serve.workers.model_loading import StartingModel
from infer.spec import TensorSpec
from tests.support.fake_predictors import Fake, Live, double, embedder, live
from tests.support.kserve_areas import OTHERS, ROOT, WIRES, Row, node_ids
from tests.support.kserve_clients import Rest, Tensor, clients

Ask = Any  # Rest | Rpc
ROWS: list[Row] = []
HALVES = ("FP16", "BF16")
TYPES = {named[0]: dtype for dtype, named in DATATYPES.items()}


def row(area: str, what: str) -> Callable[[Callable[[Ask], None]], Callable[[Ask], None]]:
    def keep(check: Callable[[Ask], None]) -> Callable[[Ask], None]:
        ROWS.append(Row(area, what, check))
        return check

    return keep


def mirror(
    path: str = "mirror", *, shape: tuple[int | str, ...] = ("batch", "n"), typed: bool = False
) -> Fake:
    """Return a model that gives back a tensor of every datatype, called like it.

    `path`: its name; `typed`: without FP16 and BF16, which travel as raw bytes alone.
    """
    kinds = {kind: dtype for kind, dtype in TYPES.items() if not typed or kind not in HALVES}
    inputs = tuple(TensorSpec(kind, dtype, shape) for kind, dtype in kinds.items())
    outputs = tuple(TensorSpec(f"{kind}_out", dtype, shape) for kind, dtype in kinds.items())
    sizes = {"n": (0, 9)} if "n" in shape else {}

    def run(given: dict[str, Any]) -> dict[str, Any]:
        return {f"{kind}_out": array for kind, array in given.items()}

    return Fake(path, inputs, outputs, run, sizes=sizes)


def flatten() -> Fake:
    """Return a model whose output has another rank than its input."""
    x, y = TensorSpec("x", "float32", ("batch", 2, 3)), TensorSpec("y", "float32", ("batch", 6))
    return Fake("flatten", (x,), (y,), lambda given: {"y": given["x"].reshape(-1, 6)})


def large() -> Fake:
    x, y = TensorSpec("x", "float32", ("batch", "n")), TensorSpec("y", "float32", ("batch", "n"))
    return Fake("large", (x,), (y,), lambda given: {"y": given["x"]}, sizes={"n": (1, 1 << 23)})


def adder() -> Fake:
    """Return a model that carries the sum of what it was given."""
    x, total = TensorSpec("x", "float32", ("batch", 1)), TensorSpec("total", "float32", ("batch", 1))
    y, after = TensorSpec("y", "float32", ("batch", 1)), TensorSpec("next_total", "float32", ("batch", 1))
    fake = Fake(
        "adder",
        (x, total),
        (y, after),
        lambda given: dict.fromkeys(("y", "next_total"), given["x"] + given["total"]),
    )
    fake.change(states={"total": "next_total"})
    return fake


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Start a live server; the tensors of `mirror` go through shared memory to a worker process."""
    source = ModelSource(path="mirror", opener="tests.serve.api.test_kserve_areas:mirror")
    models = [
        StartingModel(source).wait_ready(),
        mirror("unbatched", shape=("n",)),
        mirror("scalars", shape=()),
        mirror("typed", typed=True),
        mirror("typed-scalars", shape=(), typed=True),
        *(flatten(), large(), adder(), double(), embedder()),
    ]
    with live(*models, limits=ServeLimits(max_queue_rows=64), rpc=True) as server:
        yield server


@pytest.fixture(scope="module")
def wires(server: Live) -> Iterator[dict[str, Ask]]:
    with clients(server) as wires:
        yield wires


def every_type(make: Callable[[np.dtype[Any]], np.ndarray], *, typed: bool = False) -> list[Tensor]:
    """Return an input of every datatype; `typed`: as JSON or typed contents, without FP16 and BF16."""
    return [
        Tensor(kind, kind, make(DATATYPES[dtype][2]), typed=typed)
        for kind, dtype in TYPES.items()
        if not typed or kind not in HALVES
    ]


def mirrored(ask: Ask, model: str, tensors: list[Tensor]) -> None:
    answer = ask.infer(model, *tensors)
    assert answer.status == 200, answer.error
    for one in tensors:
        got = answer.outputs[f"{one.name}_out"]
        assert list(got.shape) == one.sizes, one.name
        assert got.tobytes() == one.raw, one.name


X = Tensor("x", "FP32", np.arange(8, dtype=np.float32).reshape(2, 4))


@row("zero-size tensors", "every datatype, beside a batch")
def _(ask: Ask) -> None:
    mirrored(ask, "mirror", every_type(lambda to: np.zeros((3, 0), to)))
    mirrored(ask, "typed", every_type(lambda to: np.zeros((3, 0), to), typed=True))


@row("zero-size tensors", "every datatype, without a batch")
def _(ask: Ask) -> None:
    mirrored(ask, "unbatched", every_type(lambda to: np.zeros(0, to)))


@row("zero-size tensors", "a batch of no rows is refused")
def _(ask: Ask) -> None:
    answer = ask.infer("mirror", *every_type(lambda to: np.zeros((0, 2), to)))
    assert (answer.status, "batch" in answer.error) == (400, True), answer


@row("variable sizes", "every size of a range, and none beyond it")
def _(ask: Ask) -> None:
    for size in (1, 5, 9):
        mirrored(ask, "mirror", every_type(lambda to: np.ones((2, size), to)))  # noqa: B023 - called at once
    answer = ask.infer("mirror", *every_type(lambda to: np.ones((2, 10), to)))
    assert (answer.status, "10" in answer.error) == (400, True), answer


@row("variable sizes", "inputs that share a size must agree")
def _(ask: Ask) -> None:
    tensors = every_type(lambda to: np.ones((2, 3), to))
    tensors[0].values = np.ones((2, 4))
    assert ask.infer("mirror", *tensors).status == 400


@row("reshaped outputs", "rank and sizes are the output's own")
def _(ask: Ask) -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    answer = ask.infer("flatten", Tensor("x", "FP32", x))
    assert answer.outputs["y"].tolist() == x.reshape(2, 6).tolist()
    config = ask.get("config", "flatten").parameters
    config = config.get("config", config)
    assert [int(n) for n in config["input"][0]["dims"]] == [2, 3]
    assert [int(n) for n in config["output"][0]["dims"]] == [6]


@row("scalars", "tensors of rank 0, raw and typed")
def _(ask: Ask) -> None:
    mirrored(ask, "scalars", every_type(lambda to: np.ones((), to)))
    mirrored(ask, "typed-scalars", every_type(lambda to: np.ones((), to), typed=True))


@row("datatypes", "extreme values of every datatype, raw and typed")
def _(ask: Ask) -> None:
    def ends(to: np.dtype[Any]) -> np.ndarray:
        info = np.iinfo(to) if to.kind in "iu" else np.finfo(to) if to.kind == "f" else None
        return np.array([[0, 1]] if info is None else [[info.min, info.max]], to)

    mirrored(ask, "mirror", every_type(ends))
    mirrored(ask, "typed", every_type(ends, typed=True))


@row("strings", "NUL, the empty text and every plane of Unicode are text")
def _(ask: Ask) -> None:
    texts = ["a\0b", "\0", "é", "漢字", "🙂", "x" * 300]
    for typed in (False, True):
        given = Tensor("text", "BYTES", [text.encode() for text in texts], typed=typed)
        answer = ask.infer("embedder", given)
        assert answer.outputs["embedding"].tolist() == embedder().embed(texts).tolist()


@row("strings", "bytes that are no UTF-8 are refused")
def _(ask: Ask) -> None:
    answer = ask.infer("embedder", Tensor("text", "BYTES", [b"fine", b"\xff\xfe"]))
    assert (answer.status, "element 1 is not valid UTF-8" in answer.error) == (400, True)


@row("NaN and infinities", "bits are kept in raw tensors, both ways")
def _(ask: Ask) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)
    tensors = every_type(lambda to: np.ones((1, 4), to))
    for one in tensors:
        if one.datatype in ("FP16", "FP32", "FP64"):
            one.values = values
        elif one.datatype == "BF16":
            one.values = np.array([[0x7FC0, 0x7F80, 0xFF80, 0x8000]])
    mirrored(ask, "mirror", tensors)


@row("NaN and infinities", "text of JSON refuses them, typed contents carry them")
def _(ask: Ask) -> None:
    given = Tensor("x", "FP32", np.array([[np.nan, np.inf, -np.inf, 1]], np.float32), typed=True)
    answer = ask.infer("double", given)
    if isinstance(ask, Rest):
        assert answer.status == 400
        out = ask.infer("double", Tensor("x", "FP32", given.values), raw_out=False)
        assert np.array_equal(out.outputs["y"], given.values * 2, equal_nan=True)
    else:
        assert np.array_equal(answer.outputs["y"], given.values * 2, equal_nan=True)


@row("compression", "gzip and deflate requests; answers to clients that take both")
def _(ask: Ask) -> None:
    for squeeze in ("gzip", "deflate"):
        answer = ask.infer("double", X, squeeze=squeeze, headers={"accept-encoding": "gzip, deflate"})
        assert answer.outputs["y"].tolist() == (X.values * 2).tolist()


@row("large payloads", "16 MiB in and out")
def _(ask: Ask) -> None:
    values = np.arange(1 << 22, dtype=np.float32)[None]
    assert np.array_equal(ask.infer("large", Tensor("x", "FP32", values)).outputs["y"], values)


@row("parameters", "id comes back; priority and timeout are read, unknown ones passed over")
def _(ask: Ask) -> None:
    given = {"priority": 1, "timeout": 20_000_000, "mine": "text", "flag": True, "rate": 0.5}
    answer = ask.infer("double", X, id="an id", parameters=given)
    assert (answer.status, answer.id) == (200, "an id")


@row("parameters", "wrong values of known ones are refused by name")
def _(ask: Ask) -> None:
    for name, value in (("priority", -1), ("timeout", "soon"), ("timeout", True), ("sequence_start", 1)):
        answer = ask.infer("double", X, parameters={name: value})
        assert (answer.status, name in answer.error) == (400, True), (name, value, answer)
    for name in ("sequence_wild", "shared_memory_region"):
        assert name in ask.infer("double", X, parameters={name: 1}).error


@row("versions", "unknown models and versions are not found, the known one is")
def _(ask: Ask) -> None:
    assert ask.infer("double", X, version="1").status == 200
    for model, version in (("double", "2"), ("double", "x"), ("nope", ""), ("nope", "1")):
        assert ask.infer(model, X, version=version).status == 404
        assert ask.get("metadata", model, version).status == 404
        assert ask.get("config", model, version).status == 404
        assert ask.get("stats", model, version).status == 404


@row("requested outputs", "in the order asked for; unknown and repeated ones are refused")
def _(ask: Ask) -> None:
    assert list(ask.infer("double", X, outputs=["rows", "y"]).outputs) == ["rows", "y"]
    assert list(ask.infer("double", X, outputs=["rows"]).outputs) == ["rows"]
    for names in (["z"], ["y", "y"]):
        assert ask.infer("double", X, outputs=names).status == 400


@row("classification", "refused by name")
def _(ask: Ask) -> None:
    answer = ask.infer("double", X, outputs=[{"name": "y", "parameters": {"classification": 1}}])
    assert (answer.status, "classification" in answer.error) == (400, True)


@row("shared memory", "refused by name, of inputs and of outputs")
def _(ask: Ask) -> None:
    shared = {"shared_memory_region": "r", "shared_memory_byte_size": 32}
    given = Tensor("x", "FP32", X.values, parameters=shared)
    outputs = [{"name": "y", "parameters": shared}]
    for answer in (ask.infer("double", given), ask.infer("double", X, outputs=outputs)):
        assert (answer.status, "shared" in answer.error) == (400, True)


@row("sequence", "the state of a sequence is the server's, by numbers and texts")
def _(ask: Ask) -> None:
    def add(id: int | str, value: float, **flags: bool) -> Any:
        given = Tensor("x", "FP32", np.full((1, 1), value, np.float32))
        return ask.infer("adder", given, parameters={"sequence_id": id, **flags})

    for id in (type(ask).__name__, 7):
        assert add(id, 1, sequence_start=True).outputs["y"].item() == 1
        assert add(id, 2).outputs["y"].item() == 3
        last = add(id, 3, sequence_end=True)
        assert (last.outputs["y"].item(), list(last.outputs)) == (6, ["y"])
        assert add(id, 4).status == 404
    assert add(0, 4).outputs["y"].item() == 4


@row("batching", "rows beyond the largest batch are split, beyond the queue refused")
def _(ask: Ask) -> None:
    x = np.random.default_rng(0).random((30, 4), dtype=np.float32)
    assert np.array_equal(ask.infer("double", Tensor("x", "FP32", x)).outputs["y"], x * 2)
    assert ask.infer("double", Tensor("x", "FP32", np.ones((65, 4)))).status == 413


@row("statistics", "every request and row is counted, failures apart")
def _(ask: Ask) -> None:
    def counts() -> tuple[int, int, int]:
        (stats,) = ask.get("stats", "flatten").parameters["model_stats"]
        done = stats["inference_stats"]["success"]
        return int(stats.get("inference_count", 0)), int(done.get("count", 0)), int(done.get("ns", 0))

    before = counts()
    for _ in range(3):
        assert ask.infer("flatten", Tensor("x", "FP32", np.ones((2, 2, 3)))).status == 200
    assert ask.infer("flatten", Tensor("x", "FP32", np.ones((2, 2)))).status == 400
    after = counts()
    assert (after[0] - before[0], after[1] - before[1]) == (6, 3)
    assert after[2] > before[2]


@row("trace and log settings", "are options of the server: no route, refused by name")
def _(ask: Ask) -> None:
    if isinstance(ask, Rest):
        assert [ask.http.get(f"/v2/{what}").status_code for what in ("trace/setting", "logging")] == [
            404,
            404,
        ]
    else:
        said = [ask.call(name, b"")[1] for name in ("TraceSetting", "LogSettings")]
        assert [(one.status, "options of infer serve" in one.error) for one in said] == [(501, True)] * 2


@row("metadata", "what is served is what is said: platform, inputs, outputs, sizes")
def _(ask: Ask) -> None:
    said = ask.get("metadata", "mirror").parameters
    assert {one["name"]: one["datatype"] for one in said["inputs"]} == {kind: kind for kind in TYPES}
    assert {tuple(int(n) for n in one["shape"]) for one in said["outputs"]} == {(-1, -1)}
    assert ask.get("metadata").parameters["name"] == "infer"
    assert ask.get("live").status == ask.get("ready").status == ask.get("ready", "mirror").status == 200


@row("errors", "a failing model answers 500 and shows nothing of its insides")
def _(ask: Ask) -> None:
    answer = ask.infer("double", Tensor("x", "FP32", np.full((1, 4), 666)))
    assert (answer.status, "secret" in answer.error) == (500, False)
    assert ask.infer("double", X).status == 200


@pytest.mark.filterwarnings("ignore:overflow encountered")  # as server.serve sets numpy
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("at", range(len(ROWS)), ids=lambda at: f"{ROWS[at].area}: {ROWS[at].what}")
def test_the_promise_of_a_row_is_kept(
    wires: dict[str, Ask], at: int, wire: str, record_property: Callable[[str, object], None]
) -> None:
    chosen = ROWS[at]
    for name, value in (("area", chosen.area), ("what", chosen.what), ("wire", wire)):
        record_property(name, value)
    assert chosen.check is not None
    chosen.check(wires[wire])


def test_rows_name_tests_that_exist_or_a_reason() -> None:
    for name in node_ids():
        path, _, test = name.partition("::")
        text = Path(ROOT / path).read_text()
        assert not test or re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), name
    assert all(bool(one.elsewhere) != bool(one.why) for one in OTHERS)
