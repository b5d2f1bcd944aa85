"""Installation of a wheel in an environment of its own, and its use where PATH has no compiler.

    python -m tests.support.installed_wheel dist/infer_engine-*.whl [--keep FOLDER]

Installs NAME[hf,serve,ort] at the versions of constraints.txt, so it takes minutes; `make wheel` runs it. Proved: the
native kernels are there, are used, and nothing was compiled for them; `auto` says why AOTInductor was not tried; a
package that AOTInductor made on a machine with a compiler opens; a Hugging Face folder becomes an artifact; and `infer
serve` answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIGITS = [
    str(ROOT / "models" / "digits.pt"),
    "--model",
    f"{ROOT / 'models' / 'digits.py'}:build",
    "--quant",
    "int8",
]
LANGUAGE_MODEL = [str(ROOT / "models" / "pydoc_lm"), "--quant", "nf4", "--backend", "eager"]
EXTRAS = "hf,serve,ort"
COMPILERS = ("g++", "clang++", "c++", "gcc", "cc")
START_SECONDS = 300


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("wheel", type=Path)
    arguments.add_argument("--keep", type=Path, help="folder for the environment, which then stays")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="installed-") as work:
        check(asked.wheel.resolve(), asked.keep or Path(work) / "venv", Path(work))


def check(wheel: Path, venv: Path, work: Path) -> None:
    """Install and use a wheel; raises `SystemExit` with what is wrong."""
    began = time.monotonic()
    config = {
        "INFER_CONFIG": str(work / "config")
    }  # the key: what the first machine signs the second one trusts
    here, compiled = {**os.environ, **config}, work / "compiled.infer"
    run([sys.executable, "-m", "infer", "optimize", *DIGITS, *options("inductor", compiled)], here, work)
    print_step(began, "made a package with AOTInductor")
    if not venv.exists():
        run([sys.executable, "-m", "venv", str(venv)], here, work)
    install = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    run([*install, f"{wheel}[{EXTRAS}]"], here, work)
    run(
        [*install, "--force-reinstall", "--no-deps", str(wheel)], here, work
    )  # of an earlier run another of its name
    print_step(began, "installed")
    path = str(venv / "bin")
    if found := [name for name in COMPILERS if shutil.which(name, path=path)]:
        raise SystemExit(f"the environment has a compiler: {found}")
    bare = config | {"PATH": path, "HOME": str(work), "INFER_CACHE": str(work / "cache")}
    use(compiled, str(venv / "bin" / "infer"), bare, work, began)


def use(compiled: Path, infer: str, bare: dict[str, str], work: Path, began: float) -> None:
    """Use an installed `infer` in the environment `bare`, which has no compiler."""
    rows = {row["what"]: row for row in json.loads(run([infer, "doctor", "--json"], bare, work))}
    expect(rows["native kernels"]["value"] != "no", "native kernels", rows["native kernels"])
    native, automatic = work / "native.infer", work / "auto.infer"
    made = run([infer, "optimize", *DIGITS, *options("eager", native), "--json"], bare, work)
    expect("own kernels for" in made, "native kernels in use", made)
    print_step(began, f"--backend eager: {json.loads(made)['headline']}")
    made = run([infer, "optimize", *DIGITS, *options("auto", automatic), "--json"], bare, work)
    expect(
        "no C++ compiler, which AOTInductor needs" in made, "the reason why AOTInductor was not tried", made
    )
    print_step(began, f"--backend auto: {json.loads(made)['headline']}, with {json.loads(made)['backend']}")
    for artifact in (native, automatic, compiled):
        opened = time.monotonic()
        run([infer, "verify", str(artifact)], bare, work)
        print_step(
            began, f"{artifact.name} opened and gave its golden outputs in {time.monotonic() - opened:.1f} s"
        )
    language_model = work / "pydoc_lm.infer"
    run([infer, "optimize", *LANGUAGE_MODEL, "--output", str(language_model)], bare, work)
    print_step(began, "made an artifact of a Hugging Face folder")
    with serving([infer, "serve", str(automatic), str(language_model), "--port", "0"], bare, work) as url:
        tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.0] * 64}
        logits = post(f"{url}/v2/models/auto/infer", {"inputs": [tensor]})["outputs"][0]
        expect(logits["shape"] == [1, 10], "logits over HTTP", logits)
        asked = {"model": "pydoc_lm", "prompt": "Return the", "max_tokens": 8}
        said = post(f"{url}/v1/completions", asked)["choices"][0]["text"]
        expect(said.strip(), "a completion over HTTP", said)
    print_step(began, f"infer serve answered: Return the{said}")
    libraries = list((work / "cache").rglob("*.so"))
    expect(not libraries, "nothing compiled", libraries)


@contextlib.contextmanager
def serving(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[str]:
    """Start a server and return its address, which it prints when it is ready; ends it by SIGTERM."""
    with subprocess.Popen(command, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE) as server:
        ended = threading.Timer(START_SECONDS, server.kill)
        ended.start()
        try:
            printed = iter(server.stdout or ())
            found = next(
                (match for line in printed if (match := re.search(r"http://[\w.]+:\d+", line))), None
            )
            ended.cancel()
            if found is None:
                raise SystemExit(f"{shlex.join(command)}: no address within {START_SECONDS} s")
            yield found[0]
        finally:
            server.terminate()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a server answers to a body of JSON."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.loads(response.read()))


def options(backend: str, output: Path) -> list[str]:
    return ["--backend", backend, "--allow-slower", "--batch", "1", "--output", str(output)]


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Return what a command printed; raises `SystemExit` with its output where it fails."""
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def expect(right: bool, what: str, got: object) -> None:
    """Raise `SystemExit` unless `right`."""
    if not right:
        raise SystemExit(f"expected {what}, got {str(got)[:1000]}")


def print_step(began: float, what: str) -> None:
    """Print a step with the seconds since the start."""
    print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    main()
