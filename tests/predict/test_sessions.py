"""A session carries the state of a model from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from infer import Predictor
from infer.errors import InputError, UsageError
from tests.support import stateful_models as models


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Predictor]:
    with Predictor.load(models.make(tmp_path_factory.mktemp("lstm"), "lstm")) as opened:
        yield opened


@pytest.mark.parametrize("backend", ["eager", "ort", "inductor"])
def test_a_session_gives_what_calls_with_the_state_by_hand_give(tmp_path: Path, backend: str) -> None:
    xs = models.pieces(0, 30)
    with Predictor.load(models.make(tmp_path, "lstm", backend=backend)) as made, made.session() as session:
        assert made.states == {"h": "output_1", "c": "output_2"}
        got = [session.predict(x)["output_0"] for x in xs]
    np.testing.assert_allclose(got, models.by_hand(xs), atol=1e-5)


def test_the_manifest_and_the_verdict_name_the_states(predictor: Predictor) -> None:
    assert predictor.manifest.states == {"h": "output_1", "c": "output_2"}
    said = "carries state from call to call (h from output_1, c from output_2), which begins as zeros"
    assert any(line.startswith(said) for line in predictor.manifest.verdict)


def test_states_that_are_not_given_are_zeros(predictor: Predictor) -> None:
    (x,) = models.pieces(1, 1, rows=3)
    zeros = np.zeros((2, 3, 16), np.float32)
    whole = predictor.predict({"x": x, "h": zeros, "c": zeros})
    for given in ({"x": x}, {"x": x, "c": zeros}):
        np.testing.assert_array_equal(predictor.predict(given)["output_0"], whole["output_0"])
    assert predictor.predict({"x": torch.from_numpy(x)})["output_1"].shape == (2, 3, 16)


def test_rows_along_a_later_axis_are_split_and_joined(predictor: Predictor) -> None:
    (x,) = models.pieces(2, 1, rows=19)
    draw = np.random.default_rng(3)
    h, c = (draw.standard_normal((2, 19, 16), np.float32) for _ in range(2))
    whole = predictor.predict({"x": x, "h": h, "c": c})
    rows = [{"x": x[i : i + 1], "h": h[:, i : i + 1], "c": c[:, i : i + 1]} for i in range(19)]
    for i, one in enumerate(predictor.predict(rows)):
        np.testing.assert_allclose(one["output_1"], whole["output_1"][:, i : i + 1], atol=1e-5)
        np.testing.assert_allclose(one["output_0"], whole["output_0"][i : i + 1], atol=1e-5)


def test_sessions_do_not_see_each_other_from_many_threads(predictor: Predictor) -> None:
    def follow(seed: int) -> list[np.ndarray]:
        with predictor.session() as session:
            return [session.predict({"x": x})["output_0"] for x in models.pieces(seed, 12)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(follow, range(8)))
    for seed, got in enumerate(found):
        np.testing.assert_allclose(got, models.by_hand(models.pieces(seed, 12)), atol=1e-5)


def test_a_session_is_reset_restored_and_closed(predictor: Predictor) -> None:
    first, second = models.pieces(4, 2)
    session = predictor.session()
    begun = session.predict(first)["output_0"]
    kept = session.state
    went_on = session.predict(second)["output_0"]
    session.restore(kept)
    np.testing.assert_array_equal(session.predict(second)["output_0"], went_on)
    session.reset()
    np.testing.assert_array_equal(session.predict(first)["output_0"], begun)
    session.close()
    with pytest.raises(UsageError, match="this session is closed"):
        session.predict(first)


def test_a_call_that_fails_leaves_the_state_as_it_was(predictor: Predictor) -> None:
    first, second = models.pieces(5, 2)
    with predictor.session() as session:
        session.predict(first)
        for wrong in ({"x": second[:, :3]}, {"x": second.repeat(2, 0)}, {"x": second, "h": np.zeros(1)}):
            with pytest.raises(InputError):
                session.predict(wrong)
        np.testing.assert_allclose(
            session.predict(second)["output_0"], models.by_hand([first, second])[1], atol=1e-5
        )


def test_a_streaming_convolution_gives_what_the_whole_signal_gives(tmp_path: Path) -> None:
    signal = np.random.default_rng(0).standard_normal((1, 4, 60), np.float32)
    space: dict[str, object] = {}
    exec(models.SOURCE, space)  # noqa: S102
    whole = np.concatenate([np.zeros((1, 4, 2), np.float32), signal], 2)
    with torch.no_grad():
        want = space["stream"]().conv(torch.from_numpy(whole)).numpy()  # type: ignore[operator]
    with Predictor.load(models.make(tmp_path, "stream")) as made, made.session() as session:
        assert made.states == {"cache": "next_cache"}
        got = [session.predict({"x": signal[:, :, i : i + 6]})["y"] for i in range(0, 60, 6)]
    np.testing.assert_allclose(np.concatenate(got, 2), want, atol=1e-5)
