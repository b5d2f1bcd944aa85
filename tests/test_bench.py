"""The benchmarks import, print their help, and can be started both as modules and by path."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shared import results, results_page

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
FILES = sorted(path for path in BENCH.rglob("*.py") if path.name != "__init__.py")
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]
PROJECT = ("bench", "infer", "backends", "tests", "models", *(p.stem for p in (ROOT / "models").glob("*.py")))

# Runs alone, because benchmarks change sys.path and set threads. Prints a sentence for each module that fails.
LOADER = """
import ast, contextlib, importlib, importlib.util, io, json, sys
project, failed = json.loads(sys.argv[1]), {}

def late_imports(name):
    'Names of this project that functions import, or take from a module, and that are not there.'
    with open(importlib.util.find_spec(name).origin) as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.col_offset and node.module.partition(".")[0] in project:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            held = getattr(sys.modules[name], node.value.id, None)
            if type(held) is type(ast) and held.__name__.partition(".")[0] in project:
                getattr(held, node.attr)

for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
        late_imports(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in project:
            failed[name] = repr(error)
        continue
    except SystemExit as error:
        if error.code != 2:  # a benchmark of the GPU, and there is none
            failed[name] = repr(error)
        continue
    except Exception as error:
        failed[name] = repr(error)
        continue
    if not hasattr(module, "main") or not {"argparse", "parser_of", "suite"} & vars(module).keys():
        continue
    sys.argv[1:], shown = ["--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            module.main()
    except SystemExit as error:
        if error.code == 0 and "usage:" in shown.getvalue():
            continue
    failed[name] = "no --help"
print(json.dumps(failed))
"""


def test_every_benchmark_imports_and_prints_its_help() -> None:
    command = [sys.executable, "-c", LOADER, json.dumps(PROJECT), *MODULES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_no_benchmark_hides_a_package_when_it_is_run_by_path() -> None:
    """Python puts the script's folder in front of sys.path, so a neighbour's name must not be a package's."""
    names = {path.stem for path in FILES}
    assert not names & sys.stdlib_module_names
    assert [name for name in names if importlib.util.find_spec(name) is not None] == []


def test_the_makefile_starts_benchmarks_that_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    started = set(re.findall(r"-m (bench\.[\w.]+\w)", text)) - {"bench.serve"}
    listed = re.search(r"SERVE_BENCHES := (.*)", text)
    assert listed is not None
    started |= {f"bench.serve.{name}" for name in listed[1].split()}
    assert started <= set(MODULES)
    assert len(started) > 10


def test_the_readme_of_the_benchmarks_lists_every_script() -> None:
    text = (BENCH / "README.md").read_text()
    scripts = {str(p.relative_to(BENCH)) for p in FILES if '__name__ == "__main__"' in p.read_text()}
    assert scripts <= set(re.findall(r"`([\w/]+\.py)`", text))
    listed = set(re.findall(r"^\| `([\w/]+\.py)`", text, flags=re.M))
    assert listed <= {str(path.relative_to(BENCH)) for path in FILES}


def test_the_results_page_keeps_what_a_newer_run_did_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lm(date: str, *works: str) -> None:
        rows = "\n".join(f"| {work} | rival | 1 ms | 2 ms | ≥ 1 | 2 | met |" for work in works)
        (tmp_path / f"lm-{date}-cpu.md").write_text(rows)

    def table(date: str, *cells: str) -> None:
        (tmp_path / f"table-{date}-cpu{date[-1]}.md").write_text(
            "\n".join(f"| m | none | {c} | x |" for c in cells)
        )

    lm("2026-01-01", "a", "b", "c")
    lm("2026-01-02", "a", "b", "c", "d")
    lm("2026-01-03", "d", "e", "f", "g", "h")
    table("2026-01-01", "eager", "ort")
    table("2026-01-02", "eager")
    table("2026-01-03", "openvino")
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    shown = {(one.name, one.date[-1]) for one in results_page.newest()}
    assert shown == {("lm", "3"), ("lm", "2"), ("table", "1"), ("table", "3")}


@pytest.mark.parametrize(
    ("brand", "cpuinfo", "name"),
    [
        ("AMD EPYC", "cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n", "amd-epyc-19h-01h"),
        ("Intel(R) Xeon(R) CPU @ 2.50GHz", "cpu family\t: 6\nmodel\t\t: 85\n", "intel-xeon-2-50ghz-06h-55h"),
        ("Neoverse-N1", "processor\t: 0\n", "neoverse-n1"),
    ],
)
def test_result_files_name_the_model_behind_a_brand(brand: str, cpuinfo: str, name: str) -> None:
    assert results.file_name_of(brand, cpuinfo) == name


def test_pages_of_older_result_files_have_the_brand_alone() -> None:
    shown = [
        results_page.ResultFile("lm", "2026-01-01", cpu, Path()).machine
        for cpu in ("amd-epyc", "amd-epyc-19h-01h")
    ]
    assert shown == ["AMD EPYC, 2026-01-01", "AMD EPYC (19h 01h), 2026-01-01"]


def test_a_row_measured_again_replaces_the_former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def rows() -> results.TodaysRows[dict[str, int]]:
        return results.TodaysRows("x", dict, str, key=lambda row: row["n"], order=lambda row: row["n"])

    rows().keep([{"n": 2, "v": 1}, {"n": 1, "v": 1}])
    assert rows().keep([{"n": 2, "v": 5}]) == rows().read() == [{"n": 1, "v": 1}, {"n": 2, "v": 5}]
    assert rows().path.with_suffix(".md").read_text().endswith("[{'n': 1, 'v': 1}, {'n': 2, 'v': 5}]")
