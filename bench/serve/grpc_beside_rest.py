"""gRPC beside REST: latency at one client, rate at many, and the server's CPU time per request, on one server.

    python -m bench.serve.grpc_beside_rest [ARTIFACT.infer …] [--clients 32] [--seconds 2] [--rounds 7]

One server has both ports; the same rows are sent as raw tensors over both, in turns within a round, after the answers
were compared. REST is timed on its fast path, and on the ordinary one, which requests with an id of their own take. The
clients are Python's: sockets for REST, `grpc.aio` for gRPC, which takes more CPU time than the server does, so that at
many clients the server's CPU time per request says more than the rate. Figures are medians over rounds, ratios are
taken round by round. Without artifacts: a no-op model alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import grpc
import numpy as np

from bench.serve.request_forms import encode, from_binary
from bench.serve.server_processes import NOOP, REQUESTS, samples
from bench.serve.serving import free_port, serving
from bench.shared.command_line import parser_of
from bench.shared.processor_time import cpu_seconds
from bench.shared.repository import module_command
from bench.shared.results import exit_code, progress
from infer.serve.api.kserve.kserve_tensors import DATATYPES
from infer.serve.grpc.rpc_server import PROTO, SERVICE
from infer.serve.grpc.schema import message_classes

WIRES = ("REST", "REST, own id", "gRPC")
MESSAGES = message_classes(PROTO)
Ask = Callable[[int], Awaitable[np.ndarray]]  # the first output of request number so-and-so


def serve_noop(rpc_port: int) -> int:
    """Serve the no-op model over both in this process, the model in a worker."""
    from infer.serve import server
    from infer.serve.grpc import RpcListener
    from infer.serve.http.listener import listen
    from infer.serve.service import Service
    from infer.serve.workers.messages import ModelSource
    from infer.serve.workers.model_loading import StartingModel

    source = ModelSource(path=NOOP, opener="bench.serve.server_processes:noop")
    ports = listen("127.0.0.1", 0), listen("127.0.0.1", rpc_port)
    with ports[0] as listener, ports[1] as bound, closing(StartingModel(source)) as starting:
        return server.serve(Service([starting.wait_ready()]), listener, rpc=RpcListener(bound))


class RestClient:
    """One connection that sends raw tensors. Use `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> RestClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def asking(self, requests: list[bytes]) -> Ask:
        return lambda number: self.ask(requests[number])

    async def ask(self, request: bytes) -> np.ndarray:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = [line.split(": ") for line in head.decode().lower().split("\r\n")[1:-2]]
        headers = dict(lines)
        return from_binary(headers, await self._reader.readexactly(int(headers["content-length"])))


def rpc_request(name: str, arrays: dict[str, np.ndarray]) -> Any:
    return MESSAGES["ModelInferRequest"](
        model_name=name,
        inputs=[
            {"name": n, "datatype": DATATYPES[str(a.dtype)][0], "shape": a.shape} for n, a in arrays.items()
        ],
        raw_input_contents=[a.tobytes() for a in arrays.values()],
    )


async def closed_loop(asks: list[Ask], seconds: float) -> list[float]:
    """Return the seconds of each request of clients that send one after another."""
    until, taken = time.perf_counter() + seconds, list[float]()

    async def client(ask: Ask) -> None:
        number = 0
        while (began := time.perf_counter()) < until:
            await ask(number % REQUESTS)
            taken.append(time.perf_counter() - began)
            number += 1

    await asyncio.gather(*map(client, asks))
    return taken


async def measure(
    name: str,
    rows: list[dict[str, np.ndarray]],
    ports: tuple[int, int],
    pid: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    fast = [encode(name, one)["binary"] for one in rows]
    ordinary = [request.replace(b"\r\n", b"\r\nX-Request-Id: mine\r\n", 1) for request in fast]
    rpc = [rpc_request(name, one) for one in rows]
    table: dict[str, Any] = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MESSAGES["ModelInferResponse"].FromString,
        )

        async def ask_rpc(number: int) -> np.ndarray:
            return np.frombuffer((await infer(rpc[number])).raw_output_contents[0], "<f4")

        for count in (1, arguments.clients):
            clients = [await RestClient.connect(ports[0]) for _ in range(count)]
            asks: dict[str, list[Ask]] = {
                "REST": [one.asking(fast) for one in clients],
                "REST, own id": [one.asking(ordinary) for one in clients],
                "gRPC": [ask_rpc] * count,
            }
            for number in range(REQUESTS):
                first, *others = [await asks[wire][0](number) for wire in WIRES]
                if not all(np.array_equal(first, other) for other in others):
                    raise SystemExit(f"{name}: gRPC answers otherwise than REST")
            taken: list[dict[str, tuple[float, float, float]]] = []
            for turn in range(arguments.rounds + 1):
                progress(f"{name}  {count} clients  round {turn}")
                taken.append({})
                for wire in WIRES[:: 1 if turn % 2 else -1]:
                    before = cpu_seconds(pid)
                    times = await closed_loop(asks[wire], arguments.seconds)
                    cpu = 1e3 * (cpu_seconds(pid) - before) / len(times)
                    taken[-1][wire] = 1e3 * statistics.median(times), len(times) / arguments.seconds, cpu
            table[str(count)] = summary(taken[1:])  # the first round warms up
    return table


def summary(taken: list[dict[str, tuple[float, float, float]]]) -> dict[str, dict[str, float]]:
    return {
        what: {
            **{wire: statistics.median(one[wire][at] for one in taken) for wire in WIRES},
            **{
                f"gRPC ÷ {wire}": statistics.median(one["gRPC"][at] / one[wire][at] for one in taken)
                for wire in WIRES[:2]
            },
        }
        for at, what in enumerate(("p50 ms", "req/s", "CPU ms of the server"))
    }


def markdown(tables: dict[str, Any]) -> str:
    columns = [*WIRES, *(f"gRPC ÷ {wire}" for wire in WIRES[:2])]
    lines = [f"| model | clients | figure | {' | '.join(columns)} |", "|" + "---|" * (3 + len(columns))]
    for name, table in tables.items():
        for count, figures in table.items():
            for what, row in figures.items():
                cells = [f"{row[column]:.3g}" for column in columns]
                lines.append(f"| {name} | {count} | {what} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("artifacts", nargs="*", default=[NOOP])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve-noop", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_noop:
        return serve_noop(arguments.serve_noop)
    tables = {}
    for artifact in arguments.artifacts:
        rpc_port = free_port()
        command = module_command("bench.serve.grpc_beside_rest", "--serve-noop", str(rpc_port))
        if artifact != NOOP:
            command = [sys.executable, "serve.py", artifact, "--port", "0", "--grpc-port", str(rpc_port)]
            command += ["--no-log-requests"]
        with serving(command) as (port, running):
            name = (
                NOOP if artifact == NOOP else artifact.rstrip("/").rpartition("/")[2].removesuffix(".infer")
            )
            rows = samples(artifact, REQUESTS)
            tables[name] = asyncio.run(measure(name, rows, (port, rpc_port), running.pid, arguments))
    print(markdown(tables))
    # write_results("grpc-beside-rest", tables, markdown(tables))
    return exit_code([])


if __name__ == "__main__":
    sys.exit(main())
