"""Clients of KServe v2 over both wires, with one way to ask and one form of answer; plain httpx and grpcio."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import numpy as np

from infer.serve.grpc.rpc_server import PROTO, SERVICE
from infer.serve.grpc.schema import message_classes
from infer.serve.grpc.tensors import CONTENTS
from tests.support.fake_predictors import Live

MESSAGES = message_classes(PROTO)
SPLIT = "inference-header-content-length"
NUMPY = {
    "BOOL": "?",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "u1",
    "FP16": "<f2",
    "BF16": "<u2",
    "FP32": "<f4",
    "FP64": "<f8",
}
STATUS = {  # of HTTP, for the codes of gRPC
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass
class Tensor:
    """An input; `values`: an array, or a list of bytes as BYTES. `typed`: as JSON or typed contents, else raw."""

    name: str
    datatype: str
    values: Any
    shape: Sequence[int] | None = None
    typed: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return list(np.shape(self.values) if self.shape is None else self.shape)

    @property
    def raw(self) -> bytes:
        if self.datatype == "BYTES":
            return b"".join(len(text).to_bytes(4, "little") + text for text in self.values)
        return np.asarray(self.values).astype(NUMPY[self.datatype]).tobytes()


@dataclass
class Answer:
    """Status (as of HTTP), what was said of an error, outputs by name, id, parameters and trailing metadata."""

    status: int
    error: str = ""
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class Rest:
    """KServe v2 over HTTP."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def infer(
        self,
        model: str,
        *tensors: Tensor,
        outputs: Sequence[str | dict[str, Any]] = (),
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        raw_out: bool = True,
        squeeze: str = "",
    ) -> Answer:
        import gzip
        import zlib

        inputs, raw = [], b""
        for one in tensors:
            given = {"name": one.name, "datatype": one.datatype, "shape": one.sizes}
            if one.typed:
                values = one.values if one.datatype == "BYTES" else np.asarray(one.values).ravel().tolist()
                given["data"] = [v.decode() if isinstance(v, bytes) else v for v in values]
                given["parameters"] = one.parameters
            else:
                given["parameters"] = {**one.parameters, "binary_data_size": len(one.raw)}
                raw += one.raw
            inputs.append(given)
        asked = {"inputs": inputs, "parameters": {**(parameters or {}), "binary_data_output": raw_out}}
        if id:
            asked["id"] = id
        if outputs:
            asked["outputs"] = [one if isinstance(one, dict) else {"name": one} for one in outputs]
        head = json.dumps(asked).encode()
        body, sent = head + raw, {SPLIT: str(len(head)), **(headers or {})}
        if squeeze:
            body = gzip.compress(body) if squeeze == "gzip" else zlib.compress(body)
            sent["content-encoding"] = squeeze
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
        reply = self.http.post(f"{path}/infer", content=body, headers=sent)
        if reply.status_code != 200:
            return Answer(reply.status_code, reply.json()["error"], headers=dict(reply.headers))
        size = int(reply.headers.get(SPLIT, len(reply.content)))
        found, at = json.loads(reply.content[:size]), size
        arrays = {}
        for one in found["outputs"]:
            length = one.get("parameters", {}).get("binary_data_size")
            if length is None:
                flat = np.array([float(value) for value in one["data"]]).astype(NUMPY[one["datatype"]])
            else:
                flat = np.frombuffer(reply.content[at : at + length], NUMPY[one["datatype"]])
                at += length
            arrays[one["name"]] = flat.reshape(one["shape"])
        return Answer(200, "", arrays, found.get("id", ""), found["parameters"], dict(reply.headers))

    def get(self, what: str, model: str = "", version: str = "") -> Answer:
        """Ask for `ready`, `metadata`, `config` or `stats` of a model, or of the server without one."""
        path = f"/v2/models/{model}" if model else "/v2"
        path += f"/versions/{version}" if version else ""
        server = {"live": "/health/live", "ready": "/health/ready", "stats": "/models/stats", "metadata": ""}
        path += ("" if what == "metadata" else f"/{what}") if model else server[what]
        reply = self.http.get(path)
        error = "" if reply.status_code == 200 else reply.json()["error"]
        return Answer(reply.status_code, error, parameters=reply.json())

    def change(self, what: str, model: str = "", **parameters: Any) -> Answer:
        """Ask for `index`, `load` or `unload` of the repository."""
        path = "/v2/repository/index" if what == "index" else f"/v2/repository/models/{model}/{what}"
        reply = self.http.post(path, json={"parameters": parameters} if parameters else {}, timeout=60)
        plain = reply.json() if reply.content else []
        error = plain["error"] if reply.status_code != 200 else ""
        return Answer(reply.status_code, error, parameters={"models": plain} if what == "index" else {})


class Rpc:
    """KServe v2 over gRPC."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.channel, self.metadata = channel, list(metadata)

    def request(
        self,
        model: str,
        *tensors: Tensor,
        outputs: Sequence[str | dict[str, Any]] = (),
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> Any:
        asked = MESSAGES["ModelInferRequest"](model_name=model, model_version=version, id=id)
        _fill(asked.parameters, parameters or {})
        for one in tensors:
            given = asked.inputs.add(name=one.name, datatype=one.datatype, shape=one.sizes)
            _fill(given.parameters, one.parameters)
            if one.typed:
                values = one.values if one.datatype == "BYTES" else np.asarray(one.values).ravel().tolist()
                contents = CONTENTS[one.datatype][0] if one.datatype in CONTENTS else "bytes_contents"
                getattr(given.contents, contents).extend(values)
            else:
                asked.raw_input_contents.append(one.raw)
        for output in outputs:
            named = output if isinstance(output, dict) else {"name": output}
            _fill(asked.outputs.add(name=named["name"]).parameters, named.get("parameters", {}))
        return asked

    def infer(
        self,
        model: str,
        *tensors: Tensor,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = 30,
        squeeze: str = "",
        **asked: Any,
    ) -> Answer:
        message = self.request(model, *tensors, **asked)
        compression = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}.get(squeeze)
        reply, answer = self.call("ModelInfer", message, headers, timeout, compression=compression)
        return answer if reply is None else self.answer(reply, answer)

    @staticmethod
    def answer(reply: Any, answer: Answer) -> Answer:
        for one, raw in zip(reply.outputs, reply.raw_output_contents, strict=True):
            answer.outputs[one.name] = np.frombuffer(raw, NUMPY[one.datatype]).reshape(one.shape)
        answer.id = reply.id
        answer.parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in reply.parameters.items()
        }
        return answer

    def call(
        self,
        method: str,
        message: Any,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = 30,
        **more: Any,
    ) -> tuple[Any, Answer]:
        """Call a method of one message; return its response, None where it failed, and an answer without outputs."""
        known = f"{method}Response" in MESSAGES
        ask = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=(lambda m: m.SerializeToString()) if known else None,
            response_deserializer=MESSAGES[f"{method}Response"].FromString if known else None,
        )
        metadata = [*self.metadata, *(headers or {}).items()]
        try:
            reply, call = ask.with_call(message, timeout=timeout, metadata=metadata, **more)
        except grpc.RpcError as error:
            trailing = {pair.key: str(pair.value) for pair in error.trailing_metadata() or ()}
            return None, Answer(STATUS[error.code()], error.details() or "", headers=trailing)
        trailing = {pair.key: str(pair.value) for pair in call.trailing_metadata()}
        return reply, Answer(200, headers=trailing)

    def get(self, what: str, model: str = "", version: str = "") -> Answer:
        from google.protobuf.json_format import MessageToDict

        method = {"metadata": "Metadata", "ready": "Ready", "live": "Live", "config": "Config"}.get(what)
        name = "ModelStatistics" if method is None else f"{'Model' if model else 'Server'}{method}"
        fields = {"name": model, "version": version} if model else {}
        reply, answer = self.call(name, MESSAGES[f"{name}Request"](**fields))
        if reply is not None:
            answer.parameters = MessageToDict(reply, preserving_proto_field_name=True)
        return answer

    def change(self, what: str, model: str = "", **parameters: Any) -> Answer:
        from google.protobuf.json_format import MessageToDict

        name = "RepositoryIndex" if what == "index" else f"RepositoryModel{what.title()}"
        message = MESSAGES[f"{name}Request"]()
        if what != "index":
            message.model_name = model
            _fill(message.parameters, parameters)
        reply, answer = self.call(name, message, timeout=60)
        if reply is not None:
            answer.parameters = MessageToDict(reply, preserving_proto_field_name=True)
        return answer

    def stream(self, messages: Iterator[Any], **more: Any) -> Any:
        """Return the responses of a `ModelStreamInfer`."""
        ask = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=MESSAGES["ModelStreamInferResponse"].FromString,
        )
        return ask(messages, metadata=self.metadata, **more)


def _fill(named: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        choice = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(named[name], choice[type(value)], value)


@contextmanager
def clients(server: Live, key: str = "") -> Iterator[dict[str, Rest | Rpc]]:
    """Yield a client of each wire of a live server, by its name."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=30) as http,
        grpc.insecure_channel(server.rpc, options=[("grpc.max_receive_message_length", -1)]) as channel,
    ):
        yield {"REST": Rest(http), "gRPC": Rpc(channel, list(headers.items()))}
