"""Tiers of the suite: what `make test-fast` and `make test` run, by seconds that were measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from tests.conftest import TESTS
from tests.support import durations

FUNCTIONS = {
    ("a", "quick"): [*range(9)],
    ("a", "many"): [*range(100, 140)],
    ("b", "long"): [200, 201],
    ("c", "new"): [300],
}
SECONDS = {"a": {"": 81.0, "many": 80.0}, "b": {"": 30.0, "long": 30.0}}


def test_usual_and_nightly_tests_are_all_tests_once() -> None:
    usual, nightly = (durations.chosen(FUNCTIONS, tier, SECONDS) for tier in ("usual", "nightly"))
    assert sorted(usual + nightly) == sorted(durations.chosen(FUNCTIONS, "all", SECONDS))


def test_usual_tests_of_a_function_take_no_longer_than_its_limit() -> None:
    kept = durations.chosen(FUNCTIONS, "usual", SECONDS)
    for (file, function), items in FUNCTIONS.items():
        each = SECONDS.get(file, {}).get(function, 0.0) / len(items)
        assert sum(each for item in items if item in kept) <= durations.USUAL_FUNCTION
    assert {*FUNCTIONS["a", "quick"], 300} <= set(kept), "what was never slow is in it"


def test_parameters_of_a_slow_function_are_chosen_from_all_over() -> None:
    assert [item for item in durations.chosen(FUNCTIONS, "usual", SECONDS) if 100 <= item < 140] == [100, 120]


def test_fast_tests_are_those_of_quick_files() -> None:
    assert durations.chosen(FUNCTIONS, "fast", SECONDS) == [300]


def test_a_report_of_pytest_is_summed_by_function() -> None:
    case = '<testcase classname="tests.run.test_x" name="{}" time="{}"/>'
    cases = "".join(case.format(*each) for each in (("test_a[1]", 0.6), ("test_a[2]", 0.7), ("test_b", 0.1)))
    report = ElementTree.fromstring(f"<suite>{cases}</suite>").iter("testcase")  # noqa: S314 - written above
    assert durations.read(report) == {"run/test_x": {"": 1.4, "test_a": 1.3}}


def test_most_files_have_known_seconds() -> None:
    files = {path.relative_to(TESTS).with_suffix("").as_posix() for path in TESTS.rglob("test_*.py")}
    assert len(files & durations.known().keys()) > 0.8 * len(files), "measure them again: see the module"
