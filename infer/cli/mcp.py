"""`infer mcp`: commands of infer as tools of the Model Context Protocol, for an assistant, over stdin and stdout.

Each call runs the command of that name in a process of its own, with its JSON for the answer and its message for an
error, so that no model runs in the server. Commands that are timed run one at a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import hub
from ..distribution import install
from ..errors import NotUsableError, UsageError
from ..regular_files import is_path
from ..sanitize import shortened

MOST = 1 << 20  # bytes of an answer
MOST_SAID = 2000  # characters of an error
INSTRUCTIONS = (
    "infer shrinks a trained model, lowers it, checks the result against the original, and times it. optimize makes an "
    "artifact or says why there is none; a refusal (exit code 4) is a result: nothing was published, and its last "
    "sentence says what to ask for instead. report has every measured figure of an artifact. Never claim a speed or a "
    "fidelity that a verdict does not hold."
)


def mcp(
    root: Annotated[
        list[Path] | None,
        typer.Option(help="folder that every path has to be in; repeatable; default: this folder"),
    ] = None,
    download: Annotated[
        bool,
        typer.Option("--download", help="sources may be names on the Hub (ORG/NAME), which are downloaded"),
    ] = False,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="files that hold code may be opened, and Python files named, which then run"
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(help="longest time of one command", min=0.05)] = 3600.0,
) -> None:
    """Serve optimize, inspect, report, verify, predict, bench and doctor to an assistant by the Model Context Protocol.

    The client starts this command and speaks to it over stdin and stdout.
    """
    if find_spec("mcp") is None:
        raise NotUsableError("the Model Context Protocol needs the package mcp", hint=install("mcp"))
    roots = [folder.resolve() for folder in root or [Path()]]
    if absent := next((folder for folder in roots if not folder.is_dir()), None):
        raise UsageError(f"there is no folder {absent}", where="--root")
    Commands(roots, download=download, trust_code=trust_code, seconds=seconds).server().run("stdio")


@dataclass
class Commands:
    """Commands that an assistant may run, on paths below `roots`."""

    roots: Sequence[Path]
    download: bool
    trust_code: bool
    seconds: float
    _timed: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def server(self) -> Any:
        """Return the server of the package mcp with a tool for each command."""
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError

        server = MCPServer("infer", instructions=INSTRUCTIONS, log_level="ERROR")

        def tool(run: Callable[..., Coroutine[Any, Any, str]]) -> None:
            @wraps(run)
            async def answered(*args: Any, **kwargs: Any) -> str:
                try:
                    return await run(*args, **kwargs)
                except (UsageError, NotUsableError) as error:
                    raise ToolError(str(error)) from error

            server.tool(structured_output=False)(answered)

        for run in (
            self.optimize,
            self.inspect,
            self.report,
            self.verify,
            self.predict,
            self.bench,
            self.doctor,
        ):
            tool(run)
        return server

    async def optimize(
        self,
        source: str,
        output: str,
        quant: str = "none",
        backend: Literal["auto", "eager", "inductor", "ort", "openvino", "trt"] = "auto",
        data: str | None = None,
        model: str | None = None,
        inputs: Sequence[str] = (),
        max_drop: float | None = None,
        max_length: int | None = None,
        allow_slower: bool = False,
    ) -> str:
        """Make a verified artifact of a model; returns its report, or says why nothing was published.

        source: a file or folder (.onnx, .gguf, .safetensors, .pt, a Hugging Face folder). output: a new folder
        NAME.infer. quant: none, int8, nf4, int4, fp8, cluster, or none with data given. data: .npz, a folder of images
        or sounds, a .txt, which the claims then are about. model: FILE.py:FUNCTION that builds the model of a weights
        file. inputs: such as x=float32[batch,3,224,224]. max_drop: accuracy that may be lost, as a share.
        """
        words = [
            self._source(source),
            "--output",
            self._inside(output),
            "--quant",
            quant,
            "--backend",
            backend,
        ]
        if data is not None:
            words += [
                "--data",
                data if data in ("auto", "random", "required") else self._inside(data, code=True),
            ]
        if model is not None:
            words += ["--model", model if model.startswith("timm:") else self._inside(model, code=True)]
        words += [word for text in inputs for word in ("--input", text)]
        words += [] if max_drop is None else ["--max-drop", repr(max_drop)]
        words += [] if max_length is None else ["--max-length", str(max_length)]
        words += ["--allow-slower"] if allow_slower else []
        async with self._timed:
            return await self._run("optimize", *words, trusts=True)

    async def inspect(self, path: str) -> str:
        """Describe a model file or an artifact from its headers alone; nothing in it is executed."""
        return await self._run("inspect", self._source(path))

    async def report(self, artifact: str) -> str:
        """Return the whole report of an artifact: verdict, fidelity, speed, sizes, layers, what was refused and why."""
        return await self._run("report", self._inside(artifact))

    async def verify(self, artifact: str) -> str:
        """Check an artifact: every hash, the signature, and a run of its golden inputs."""
        return await self._run("verify", self._inside(artifact), trusts=True)

    async def predict(self, artifact: str, input: str) -> str:
        """Run an artifact on a file of tensors (.npz, .npy, .json), an image, a sound, or on a text."""
        given = self._inside(input) if is_path(self.roots[0] / input) else input
        return await self._run("predict", self._inside(artifact), "--", given, as_json=False, trusts=True)

    async def bench(self, artifact: str, versus: str | None = None, batches: str | None = None) -> str:
        """Measure latency percentiles, throughput and memory of an artifact, in turns with another one (versus)."""
        words = [self._inside(artifact)]
        words += [] if versus is None else ["--vs", self._inside(versus)]
        words += [] if batches is None else ["--batch", batches]
        async with self._timed:
            return await self._run("bench", *words, trusts=True)

    async def doctor(self) -> str:
        """Show what this machine can run, what it can't and why."""
        return await self._run("doctor")

    def _source(self, text: str) -> str:
        """Return a path, or a name on the Hub where downloads are allowed."""
        if not is_path(self.roots[0] / text) and hub.named(text) is not None:
            if not self.download:
                raise UsageError(
                    f"{text} is a name on the Hub, and downloads are not allowed",
                    where="source",
                    hint="Start the server with --download, or give a file",
                )
            return text
        return self._inside(text)

    def _inside(self, text: str, *, code: bool = False) -> str:
        """Return the absolute path that a text names, with a function behind a colon where it may be `code`."""
        file, colon, function = text.rpartition(":")
        if not (code and colon and file.endswith(".py")):
            file, colon, function = text, "", ""
        elif not self.trust_code:
            raise UsageError(
                f"{file} is code, and running it is not allowed", hint="Start the server with --trust-code"
            )
        path = (self.roots[0] / file).resolve()
        if not any(path == folder or folder in path.parents for folder in self.roots):
            raise UsageError(
                f"expected a path in {', '.join(map(str, self.roots))}, got {shortened(text, MOST_SAID)}",
                hint="Start the server with --root for other folders",
            )
        return f"{path}{colon}{function}"

    async def _run(self, command: str, *words: str, as_json: bool = True, trusts: bool = False) -> str:
        """Run a command of infer; return what it prints, raise `NotUsableError` with its message where it fails."""
        flags = [*(["--json"] if as_json else []), *(["--trust-code"] if trusts and self.trust_code else [])]
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "infer", command, *flags, *words),
            cwd=self.roots[0],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, said = await asyncio.wait_for(child.communicate(), self.seconds)
        except TimeoutError:
            raise NotUsableError(
                f"infer {command} took longer than {self.seconds:g} s and was ended",
                hint="Start the server with a longer --seconds",
            ) from None
        finally:
            if child.returncode is None:  # also where the client cancelled the call
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
        if child.returncode:
            text = said.decode(errors="replace").strip()
            message = text[text.rfind("infer: ") :] if "infer: " in text else text
            raise NotUsableError(f"exit code {child.returncode}: {shortened(message, MOST_SAID)}")
        if len(out) > MOST:
            raise NotUsableError(f"the answer of infer {command} has {len(out)} bytes, more than {MOST}")
        return out.decode(errors="replace")
