"""Every TensorRT name that our code uses exists in TensorRT's own Python bindings, of version 10 and of version 11.

The bindings come from the package index without the 1 GB of libraries behind them; a stub of a few C functions
stands in, so that they import. Nothing is built or run: names, enum members, methods and keywords are compared.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "backends" / "trt"
ENGINES = (FOLDER / "builder.py", FOLDER / "runner.py")
SOURCES = (*ENGINES, FOLDER / "__init__.py")
STUB = Path(__file__).parent / "trt_stub" / "stub.cpp"
PACKAGES = ["tensorrt-cu13-bindings==11.4.0.106", "tensorrt-cu12-bindings==10.16.1.11"]
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")

# Names of TensorRT-RTX, which are used with it alone; tests/backends/trt/test_trt_builder.py runs them.
RTX_ONLY = {"ComputeCapability", "num_compute_capabilities", "set_compute_capability"}

# Which class each of our variables holds; a method called on any other variable is not TensorRT's.
HOLDS = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "parser": "OnnxParser",
    "error": "ParserError",
    "shapes": "IOptimizationProfile",
    "timings": "ITimingCache",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "inspector": "EngineInspector",
    "runtime": "Runtime",
    "_runtime": "Runtime",
    "_context": "IExecutionContext",
}

PROBE = """
import json, sys
import tensorrt_bindings as trt
names, methods = json.load(sys.stdin)
wrong = []
for name in names:
    thing = trt
    for part in name.split("."):
        thing = getattr(thing, part, None)
    if thing is None:
        wrong.append(name)
for owner, method, count, keywords in methods:
    found = getattr(getattr(trt, owner), method, None)
    if found is None:
        wrong.append(f"{owner}.{method}")
        continue
    text = getattr(found, "__doc__", None) or ""
    for keyword in keywords:
        if f"{keyword}:" not in text:
            wrong.append(f"{owner}.{method}({keyword}=)")
    signatures = [line for line in text.splitlines() if f"{method}(self" in line]
    if count is not None and signatures:
        fits = [s for s in signatures if count <= s.partition("->")[0].count(": ") - 1]
        if not fits:
            wrong.append(f"{owner}.{method} with {count} arguments: {signatures}")
print(json.dumps({"version": trt.__version__, "wrong": wrong}))
"""


def used() -> tuple[list[str], list[tuple[str, str, int | None, list[str]]]]:
    """`trt.X.Y` names, and methods called or attributes set on our TensorRT objects, from the source itself."""
    names: set[str] = set()
    methods: set[tuple[str, str, int | None, tuple[str, ...]]] = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                package, _, name = dotted.partition(".")
                if package in ("trt", "tensorrt") and all(part.isidentifier() for part in name.split(".")):
                    names.add(name)
                owner = _owner(node.value) if path in ENGINES else None
                if owner:
                    methods.add((owner, node.attr, None, ()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = _owner(node.func.value) if path in ENGINES else None
                if owner:
                    keywords = tuple(str(keyword.arg) for keyword in node.keywords)
                    methods.add((owner, node.func.attr, len(node.args), keywords))
    kept = [(a, b, c, list(d)) for a, b, c, d in sorted(methods, key=str) if b not in RTX_ONLY]
    return sorted(names - RTX_ONLY), kept


def _owner(node: ast.expr) -> str | None:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if isinstance(node, ast.Attribute) and ast.unparse(node) != f"self.{name}":
        return None
    return HOLDS.get(name)


def test_tensorrt_names_used_by_the_source_are_found() -> None:
    names, methods = used()
    assert {"Builder", "OnnxParser", "NetworkDefinitionCreationFlag.STRONGLY_TYPED"} <= set(names)
    assert {"execute_async_v3", "build_serialized_network", "set_memory_pool_limit"} <= {
        m[1] for m in methods
    }


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_we_use_exists_in_the_bindings(package: str, tmp_path: Path) -> None:
    folder = _installed(package, tmp_path)
    _stub(folder / "tensorrt_bindings", package.partition("==")[2].partition(".")[0])
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(used()),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["version"] == package.partition("==")[2]
    assert report["wrong"] == []


def _installed(package: str, folder: Path) -> Path:
    place = folder / "bindings"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(place),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{package} can't be installed: {done.stderr.strip().splitlines()[-1:]}")
    return place


def _stub(folder: Path, major: str) -> None:
    """Empty libraries beside the bindings, where their run path looks first."""
    for library in LIBRARIES:
        name = f"lib{library}.so.{major}"
        command = ["g++", "-shared", "-fPIC", "-o", str(folder / name), str(STUB), f"-Wl,-soname,{name}"]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no g++ to build the stub libraries with")
