"""Commands of infer as an assistant's tools, through the client of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

mcp = pytest.importorskip("mcp")

from infer.cli import main  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., Awaitable[tuple[bool, str]]]
NET = """
import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    torch.save(net.state_dict(), folder / "net.pt")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    return folder


def spoken(folder: Path, talk: Callable[[Call, Any], Awaitable[None]], *options: str) -> None:
    """Start `infer mcp` as a client does and talk to it."""

    async def session() -> None:
        started = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "infer", "mcp", "--root", str(folder), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        async with mcp.Client(started) as client:

            async def call(tool: str, **arguments: Any) -> tuple[bool, str]:
                answer = await client.call_tool(tool, arguments)
                return bool(answer.is_error), answer.content[0].text

            await talk(call, client)

    asyncio.run(asyncio.wait_for(session(), 300))


def test_tools_are_listed_with_their_arguments(folder: Path) -> None:
    async def talk(call: Call, client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["optimize", "inspect", "report", "verify", "predict", "bench", "doctor"]
        assert set(tools["optimize"].input_schema["required"]) == {"source", "output"}
        assert all(tool.description for tool in tools.values())

    spoken(folder, talk)


def test_a_model_is_optimized_reported_and_run(folder: Path) -> None:
    async def talk(call: Call, client: Any) -> None:
        wrong, report = await call(
            "optimize",
            source="net.pt",
            output="net.infer",
            model="net.py:build",
            backend="eager",
            inputs=["input=float32[batch,256]"],
            allow_slower=True,
        )
        assert not wrong, report
        assert json.loads(report)["passed"] is True
        assert json.loads((await call("report", artifact="net.infer"))[1])["headline"]
        rows = folder / "rows.json"
        rows.write_text(json.dumps({"input": [[0.5] * 256]}))
        wrong, answer = await call("predict", artifact="net.infer", input="rows.json")
        assert not wrong, answer
        wrong, message = await call("predict", artifact="net.infer", input="word " * 80)
        assert wrong
        assert "exit code 2" in message or "exit code 3" in message, "a text, which no file can be named as"
        wrong, again = await call("optimize", source="net.pt", output="net.infer", model="net.py:build")
        assert wrong
        assert "exit code 6" in again

    spoken(folder, talk, "--trust-code")


def test_paths_outside_the_folder_names_and_code_are_refused(folder: Path) -> None:
    async def talk(call: Call, client: Any) -> None:
        for tool, arguments, said in [
            ("inspect", {"path": "../secret.txt"}, "expected a path in"),
            ("inspect", {"path": "/etc/passwd"}, "expected a path in"),
            ("inspect", {"path": "link.txt"}, "expected a path in"),
            ("predict", {"artifact": "a.infer", "input": "link.txt"}, "expected a path in"),
            ("optimize", {"source": "net.pt", "output": "/tmp/x.infer"}, "expected a path in"),
            ("optimize", {"source": "net.pt", "output": "x.infer", "model": "net.py:build"}, "--trust-code"),
            ("optimize", {"source": "net.pt", "output": "x.infer", "data": "net.py:build"}, "--trust-code"),
            ("optimize", {"source": "org/name", "output": "x.infer"}, "--download"),
            ("optimize", {"source": "--help", "output": "x.infer"}, "no such file"),
        ]:
            wrong, message = await call(tool, **arguments)
            assert wrong, (tool, arguments)
            assert said in message
            assert "secret" not in message.replace(str(folder.parent), "").replace("secret.txt", "")

    spoken(folder, talk)


def test_a_command_that_takes_too_long_is_ended(folder: Path) -> None:
    async def talk(call: Call, client: Any) -> None:
        wrong, message = await call("doctor")
        assert wrong
        assert "took longer than 0.05 s and was ended" in message

    spoken(folder, talk, "--seconds", "0.05")


def test_a_root_that_is_no_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "--root", "no-such-folder"]) == 2
    assert "there is no folder" in capsys.readouterr().err
