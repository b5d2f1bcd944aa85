"""Import order: a file imports only from packages above its own, from plug-in folders only through `plugins`, and no
two files import each other, directly or in a ring. Imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import itertools
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    "errors", "distribution", "sanitize", "spec", "rows", "carried_state", "options", "plan", "coverage", "results",
    "reporter", "budgets", "paths", "regular_files", "library_errors", "module_hooks", "named_inputs",
    "refused_backends", "plugins", "process", "machine", "device", "latency", "hub", "kernels", "preprocess",
    "families", "weights", "load",
    "attention", "graph", "fidelity", "onnx", "compress", "artifact", "llm", "tasks", "predict", "report", "tune",
    "run", "live", "pretrained", "budget_search", "export", "bench", "serve", "cli", "__main__",
]  # fmt: skip
FILES = sorted((ROOT / "infer").rglob("*.py"))
BACKENDS = sorted((ROOT / "backends").rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in (*FILES, *BACKENDS)}


@cache
def imports(path: Path) -> set[str]:
    """Absolute names of every module of `infer` and `backends` that the file imports."""
    package = [*module_of(path).split("."), *([""] if path.name == "__init__.py" else [])][:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{stem}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else stem for name in names}
    return {name for name in found if name.split(".")[0] in ("infer", "backends")}


def rings(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected groups of two or more modules (Tarjan, 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    count = itertools.count()

    def visit(node: str) -> None:
        index[node] = lowest[node] = next(count)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            group = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(group)

    for node in edges:
        if node not in index:
            visit(node)
    return found


def file_edges() -> dict[str, set[str]]:
    """Collect imports between files; a package's `__init__` that re-exports its own files is no edge back to it."""
    return {
        name: {other for other in imports(path) if other in MODULES and not name.startswith(f"{other}.")}
        - {name}
        for name, path in MODULES.items()
    }


def test_every_package_is_in_the_import_order() -> None:
    assert {module_of(path).split(".")[1] for path in FILES if module_of(path) != "infer"} <= set(ORDER)


def test_a_file_imports_only_from_packages_above_its_own() -> None:
    """Backends it reaches through `infer.plugins` alone."""
    wrong = []
    for path in FILES:
        own = module_of(path).partition(".")[2].partition(".")[0]
        for name in imports(path) if own else ():
            first, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            below = other in ORDER and other != own and ORDER.index(other) > ORDER.index(own)
            if first == "backends" or below:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_two_files_import_each_other() -> None:
    assert [sorted(group) for group in rings(file_edges())] == []


def test_only_the_start_of_the_server_imports_the_fast_path() -> None:
    fast = "infer.serve.fast_path"
    known = {name for name, others in file_edges().items() if any(other.startswith(fast) for other in others)}
    assert {name for name in known if not name.startswith(fast)} == {"infer.serve.server"}


def test_the_reference_of_onnx_files_shares_no_code_with_backends() -> None:
    shared = {"infer.device", "infer.distribution", "infer.errors", "infer.spec"}
    assert imports(MODULES["infer.onnx.ort_session"]) == shared


def test_a_backend_imports_no_other_and_nothing_that_calls_it() -> None:
    callers = ORDER[ORDER.index("onnx") + 1 :]
    wrong = []
    for path in BACKENDS:
        own = path.relative_to(ROOT / "backends").parts[0].removesuffix(".py")
        for name in imports(path):
            first, *rest = name.split(".")
            if rest and (rest[0] != own if first == "backends" else rest[0] in callers):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []
