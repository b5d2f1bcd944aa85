"""KServe v2 over gRPC beside HTTP: its port. gRPC itself (extra `grpc`) is imported where that port is asked for."""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...distribution import install
from ...errors import NotUsableError, UsageError
from ..api.kserve.kserve_repository import Repository
from ..http.listener import listen
from ..http.request_life import RequestLife
from ..options import ServeOptions

if TYPE_CHECKING:
    from .rpc_server import RpcServer


@dataclass(frozen=True)
class RpcListener:
    """Bound port of gRPC. `certfile`, `keyfile`: of TLS; None for plain connections."""

    socket: socket.socket
    certfile: str | None = None
    keyfile: str | None = None

    def server(self, life: RequestLife, changes: Repository | None = None) -> RpcServer:
        """Return the server of this port, to be started on the running event loop.

        `changes`: handlers that load and unload models, None if clients may not.
        """
        from .rpc_server import RpcServer, server_credentials

        credentials = None if self.certfile is None else server_credentials(self.certfile, self.keyfile)
        return RpcServer(life, self.socket, credentials, changes)


@contextlib.contextmanager
def rpc_listener(options: ServeOptions, keys: list[str] | None) -> Iterator[RpcListener | None]:
    """Bind the port of gRPC before anything is loaded; yield None where none is asked for.

    Raises as `listen` does, `NotUsableError` without the extra, `UsageError` for what gRPC can't do.
    """
    if options.grpc_port is None:
        yield None
        return
    if options.ssl_keyfile_password is not None:
        raise UsageError(
            "--grpc-port takes no locked private key", hint="Unlock the key, or leave --grpc-port out"
        )
    if options.grpc_port == options.port != 0:
        raise UsageError(f"--port and --grpc-port are both {options.port}")
    for module in ("grpc", "google.protobuf"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise NotUsableError(f"--grpc-port needs {error.name}", hint=install("grpc")) from error
    with listen(
        options.host, options.grpc_port, api_key=keys, anonymous=options.anonymous, option="--grpc-port"
    ) as bound:
        yield RpcListener(bound, options.ssl_certfile, options.ssl_keyfile)
