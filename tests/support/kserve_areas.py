"""Areas that an inference server of KServe v2 is tested in, as a table: each row runs, or does not apply.

The areas are those of Triton's own list of tests. A row that has a function runs over each wire, in
tests/serve/api/test_kserve_areas.py; one with `elsewhere` names the tests that state it; one with `why` does not apply.
As a plug-in of pytest (`-p tests.support.kserve_areas`, `make conformance`) this runs all of them and prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WIRES = ("REST", "gRPC")
ROOT = Path(__file__).resolve().parents[2]
SERVE = "tests/serve"


@dataclass(frozen=True)
class Row:
    """`area`, and `what` is promised in it; `check` takes a client of one wire."""

    area: str
    what: str
    check: Callable[[Any], None] | None = None
    elsewhere: tuple[str, ...] = ()
    why: str = ""


OTHERS = [
    Row(
        "texts",
        "rows keep their order; lengths that contradict are refused",
        elsewhere=(
            f"{SERVE}/api/test_kserve.py::test_text_input_as_bytes_keeps_row_order",
            f"{SERVE}/api/test_kserve.py::test_inconsistent_text_bytes_are_refused",
            f"{SERVE}/api/test_grpc.py::test_texts_are_tokenized_in_their_order",
        ),
    ),
    Row(
        "compression",
        "a body that grows beyond the limit is refused",
        elsewhere=(
            f"{SERVE}/http/test_bad_requests.py::test_a_bad_request_has_its_response_and_the_server_goes_on",
            f"{SERVE}/api/test_grpc.py::test_a_message_above_the_limit_is_refused_squeezed_or_not",
        ),
    ),
    Row(
        "cancellation",
        "a client that leaves takes its request out of the queue",
        elsewhere=(
            f"{SERVE}/http/test_http_protocol.py::test_a_disconnect_cancels_a_waiting_request",
            f"{SERVE}/api/test_grpc.py::test_a_cancelled_call_leaves_the_queue",
        ),
    ),
    Row(
        "deadlines",
        "a request ends at its time, in the queue and while it runs",
        elsewhere=(
            f"{SERVE}/api/test_kserve.py::test_timeout_parameter_in_microseconds_is_enforced",
            f"{SERVE}/api/test_grpc.py::test_deadlines_and_timeouts_end_a_request",
        ),
    ),
    Row(
        "sequence",
        "order, tenants, idle time, number and memory of sequences",
        elsewhere=(f"{SERVE}/test_sequences.py",),
    ),
    Row(
        "repository",
        "index, load and unload, by --allow-reload alone",
        elsewhere=(
            f"{SERVE}/test_model_repository.py::test_only_repository_models_load_and_unload",
            f"{SERVE}/test_model_repository.py::test_load_and_unload_routes_need_allow_reload",
            f"{SERVE}/api/test_grpc.py::test_models_of_the_repository_load_and_unload",
        ),
    ),
    Row(
        "lifecycle",
        "a new version takes over under load, and a failed one does not",
        elsewhere=(
            f"{SERVE}/test_model_repository.py::test_version_change_under_load_drops_no_request",
            f"{SERVE}/test_model_repository.py::test_failed_load_keeps_the_served_version_and_reports_why",
        ),
    ),
    Row(
        "shutdown",
        "what was accepted is answered, then exit 0",
        elsewhere=(
            f"{SERVE}/test_shutdown.py",
            f"{SERVE}/api/test_grpc.py::test_shutdown_answers_what_was_accepted_and_exits_zero",
        ),
    ),
    Row(
        "rate limits",
        "a full queue refuses with a time to come back; tenants share",
        elsewhere=(
            f"{SERVE}/api/test_kserve.py::test_overload_returns_503_with_retry_after_and_serves_admitted",
            f"{SERVE}/api/test_grpc.py::test_overload_is_unavailable_with_a_time_to_come_back",
            f"{SERVE}/batching/test_fair_queue_http.py",
        ),
    ),
    Row(
        "keys and TLS",
        "a wrong key, plain text and old TLS get no answer",
        elsewhere=(
            f"{SERVE}/test_security.py::test_old_tls_and_plain_http_get_no_response",
            f"{SERVE}/api/test_grpc.py::test_keys_are_asked_for_but_for_liveness",
            f"{SERVE}/api/test_grpc.py::test_tls_is_that_of_http",
        ),
    ),
    Row(
        "fuzz",
        "every route by its schema; bodies and messages with bytes changed",
        elsewhere=(
            f"{SERVE}/http/test_openapi.py::test_the_openapi_document_holds_for_every_route_in_all_modes",
            f"{SERVE}/http/test_body_fuzz.py",
            f"{SERVE}/api/test_grpc.py::test_mutated_messages_are_answered_or_refused",
        ),
    ),
    Row(
        "Triton's clients",
        "tritonclient's http and grpc",
        elsewhere=(f"{SERVE}/api/test_triton_client.py",),
    ),
    Row("response cache", "", why="answers are computed each time: statistics say cache_hit 0"),
    Row("decoupled models", "", why="a tensor request has one answer; language models stream over /v1"),
    Row("ensembles, custom backends, agents", "", why="an artifact is one model, made by `infer optimize`"),
    Row("instance groups", "", why="--replicas is one number for all models; docs/cli.md"),
    Row("cloud storage", "", why="artifacts are local folders"),
    Row("custom metrics, ORCA", "", why="metrics are the server's own, at /metrics"),
]


def node_ids(rows: Sequence[Row] = OTHERS) -> list[str]:
    """Return the tests that rows name."""
    return list(dict.fromkeys(name for row in rows for name in row.elsewhere))


class Table:
    """Plug-in that runs the tests of all rows and prints what became of each."""

    def __init__(self) -> None:
        self.outcomes: dict[str, set[str]] = {}
        self.rows: dict[tuple[str, str], dict[str, set[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" and report.passed:
            return
        self.outcomes.setdefault(report.nodeid, set()).add(report.outcome)
        said = dict(report.user_properties)
        if "area" in said:
            row = self.rows.setdefault((str(said["area"]), str(said["what"])), {})
            row.setdefault(str(said["wire"]), set()).add(report.outcome)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """Return the table as Markdown."""
        lines = ["", "| area | promise | " + " | ".join(WIRES) + " |", "|---|---|---|---|"]
        for (area, what), wires in sorted(self.rows.items()):
            lines.append(
                f"| {area} | {what} | {' | '.join(_word(wires.get(wire, set())) for wire in WIRES)} |"
            )
        for row in OTHERS:
            if row.why:
                lines.append(f"| {row.area} | | does not apply: {row.why} | |")
                continue
            seen = {
                outcome
                for name in row.elsewhere
                for test, outcomes in self.outcomes.items()
                if test == name or test.startswith((f"{name}[", f"{name}::"))
                for outcome in outcomes
            }
            files = ", ".join(dict.fromkeys(Path(name.partition("::")[0]).name for name in row.elsewhere))
            lines.append(f"| {row.area} | {row.what} | {_word(seen)} | {files} |")
        return lines


def _word(outcomes: set[str]) -> str:
    if "failed" in outcomes:
        return "FAILS"
    return "runs" if "passed" in outcomes else "skipped" if outcomes else "not run"


def pytest_configure(config: pytest.Config) -> None:
    config.args += node_ids()
    config.pluginmanager.register(Table(), "kserve-areas")
