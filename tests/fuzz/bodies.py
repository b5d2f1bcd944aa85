"""Mutations of good bodies against everything that parses one; `python -m tests.fuzz.bodies [SECONDS [SEED]]`.

Nothing but `InferError`s may come out, each answer in bounded time, and what is accepted must be what was meant:
JSON agrees with the standard library, tensors have the shape they claim.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from infer.errors import InferError
from infer.serve.api.anthropic.messages_types import MessagesRequest
from infer.serve.api.kserve import kserve_request
from infer.serve.api.kserve.kserve_response import HEADER_LENGTH
from infer.serve.api.kserve.kserve_tensors import texts_from_binary
from infer.serve.api.kserve.kserve_types import InferRequest
from infer.serve.api.openai.chat_types import ChatRequest
from infer.serve.api.openai.openai_types import CompletionRequest
from infer.serve.api.responses.responses_types import ResponsesRequest
from infer.serve.batching.collate import Collator
from infer.serve.grpc.rpc_server import PROTO
from infer.serve.grpc.schema import message_classes
from infer.serve.grpc.tensors import read_request
from infer.serve.http import json_parse
from infer.serve.http.body import BodyMemory, BodyReservation, read_body
from infer.serve.http.message_framing import ChunkedBody, FramingError, HeadScanner
from infer.serve.http.request_context import RequestContext
from infer.serve.limits import ServeLimits
from tests.support.fake_predictors import double
from tests.support.raw_http import BODY

LIMITS = ServeLimits()
SLOW = 2.0  # seconds that no input may take
HEAD = BODY.replace(b'"data":[1,2,3,4]', b'"parameters":{"binary_data_size":16}')
CHAT = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "é😀:\\"}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "logit_bias": {"1": 2.5},
        "stop": ["a", "b"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": [1, 2, {}]}}},
    }
).encode()
COMPLETION = b'{"model":"m","prompt":[[1,2],[3]],"n":2,"stop":null,"seed":1,"stream":true,"logprobs":3}'
SEEDS = [BODY, HEAD, CHAT, COMPLETION, b"[]", b'{"a":{"a":1},"b":[":",{"c":":"}]}', b'{"inputs":[[[1]]]}']
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\\",
    b"\\u",
    b"\\ud800",
    b"\\udc00",
    b"\\u0000",
    b"null",
    b"true",
]
TOKENS += [
    b"-",
    b"1e999",
    b"-0",
    b"0.1",
    b"9" * 25,
    b"NaN",
    b"Infinity",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\x00",
    b"\r\n",
]
TOKENS += [
    b'"inputs"',
    b'"name":"x"',
    b'"shape":[1,4]',
    b'"data":',
    b"[" * 70,
    b'{"a":' * 40,
    b"4611686018427387904",
]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Flip, cut, double or replace a few bytes, preferring tokens that matter to a parser."""
    made = bytearray(data)
    for _ in range(1 + chance.randrange(6)):
        at = chance.randrange(len(made) + 1)
        end = min(len(made), at + chance.randrange(12))
        kind = chance.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at:end]
        elif kind == 2:
            made[at:at] = made[at:end]
        elif kind == 3:
            made[at:end] = chance.choice(TOKENS)
        elif kind == 4:
            made[at:at] = chance.choice(TOKENS)
        else:
            other = chance.choice(SEEDS)
            made[at:end] = other[chance.randrange(len(other)) :][:20]
    return bytes(made)


def kserve_json(data: bytes, chance: random.Random) -> None:
    json_parse.decode(data, InferRequest)


def plain_json(data: bytes, chance: random.Random) -> None:
    value = json_parse.parse(data)
    if b"e" in data.lower() and b"." not in data and b'"' not in data:
        return
    theirs = json.loads(data, object_pairs_hook=_once)
    assert value == theirs, "msgspec and the standard library read it differently"
    json.dumps(value, ensure_ascii=False).encode()


def openai_json(data: bytes, chance: random.Random) -> None:
    value = json_parse.parse(data)
    for kind in (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest):
        try:
            msgspec.json.encode(json_parse.convert(value, kind))
        except InferError:
            continue


MODEL = double()
RPC: Any = message_classes(PROTO)["ModelInferRequest"]
ENGINE: Any = SimpleNamespace(info=MODEL.info, collator=Collator(MODEL.info), takes_text=False)


def kserve_binary(data: bytes, chance: random.Random) -> None:
    """Draw a KServe body and its declared JSON length."""
    body = data + chance.randbytes(chance.choice([0, 15, 16, 17]))
    split = chance.choice([len(data), len(data) - 1, len(body), 0, chance.randrange(len(body) + 2)])
    headers = {HEADER_LENGTH: str(split).encode()}
    service = SimpleNamespace(limits=LIMITS)
    call = RequestContext(service, None, {}, headers, "id", body)  # type: ignore[arg-type]
    read = kserve_request.read_tensors(call, ENGINE)
    if read is None:  # a call of a sequence
        return
    arrays = {spec.name: array for spec, array in read[1]}
    sizes = ENGINE.collator.check(arrays)
    assert arrays["x"].shape == (sizes["batch"], 4)


def kserve_message(data: bytes, chance: random.Random) -> None:
    """Read a damaged message of gRPC."""
    whole = RPC(model_name="double", inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 4]}])
    whole.parameters["priority"].int64_param = len(data)
    whole.raw_input_contents.append(data)
    try:
        message = RPC.FromString(mutated(whole.SerializeToString(), chance))
    except DecodeError:
        return
    request, sections = read_request(message)
    assert len(request.inputs) == len(sections)


def texts(data: bytes, chance: random.Random) -> None:
    shape = [chance.randrange(4), chance.randrange(3)][: 1 + chance.randrange(2)]
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in data.split(b",")[: math.prod(shape)])
    assert len(texts_from_binary(shape, memoryview(mutated(framed, chance)), "")) == math.prod(shape)


def framing(data: bytes, chance: random.Random) -> None:
    """Check that the chunk scanner ends at the same byte however the input is cut."""
    whole = mutated(
        b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in data.split(b",") if p) + b"0\r\n\r\n", chance
    )
    ends = []
    for size in (len(whole) or 1, 1 + chance.randrange(7)):
        body, seam, seen = ChunkedBody(LIMITS), HeadScanner(), 0
        try:
            for at in range(0, len(whole), size):
                piece = whole[at : at + size]
                seen += body.end(piece, 0)
                if body.done:
                    break
            ends.append((seen, body.done))
        except FramingError:
            ends.append((-1, False))
        assert seam.end(whole, 0) <= len(whole)
    assert ends[0] == ends[1], "where the body ends hangs on how it is cut"


def inflating(data: bytes, chance: random.Random) -> None:
    """Draw a body declared as compressed."""
    import zlib

    sent = mutated(zlib.compress(data), chance)
    headers = {b"content-length": str(len(sent)).encode(), b"content-encoding": b"deflate"}

    async def receive() -> Any:
        return {"type": "http.request", "body": sent, "more_body": False}

    bodies = BodyMemory(LIMITS.max_bodies_bytes)
    share = BodyReservation(bodies)
    try:
        asyncio.run(read_body(receive, headers, LIMITS, share))
    finally:
        share.close()
        assert bodies.held == 0


def server_events(data: bytes, chance: random.Random) -> None:
    """Check that one event is one line of valid JSON for any model output."""
    from infer.serve.api.openai.openai_response import ChunkedReply, ResponseHead
    from infer.serve.generation.event_stream import encode

    text = data.decode("utf-8", "replace") + chr(chance.choice([0x2028, 0x85, 10, 13, 0]))
    head, usage = ResponseHead(text[:9], "text_completion", 0, "m", "f"), SimpleNamespace()
    reply = ChunkedReply(head, CompletionRequest(model="m", prompt="x"), usage, 1)
    event = reply.chunk(0, b'"text":%b' % encode(text), None, None)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    assert json.loads(event[6:])["choices"][0]["text"] == text


TARGETS: dict[str, Callable[[bytes, random.Random], None]] = {
    target.__name__: target
    for target in (
        plain_json,
        kserve_json,
        openai_json,
        kserve_binary,
        kserve_message,
        texts,
        framing,
        inflating,
        server_events,
    )
}


def run(seconds: float, seed: int = 0) -> Counter[str]:
    """Run all targets; return their counts and raise any unexpected exception."""
    chance, ran = random.Random(seed), Counter[str]()
    deadline = time.monotonic() + seconds
    corpus = list(SEEDS)
    while time.monotonic() < deadline:
        for name, target in TARGETS.items():
            data = mutated(chance.choice(corpus), chance)
            state, began = chance.getstate(), time.monotonic()
            try:
                target(data, chance)
                if len(corpus) < 500 and len(data) < 2000 and data not in corpus:
                    corpus.append(data)
            except InferError as error:
                said = str(error)
                if not said:
                    raise AssertionError(f"{name} says nothing of {data!r}") from error
            except BaseException:
                print(f"{name} broke on {data!r}, random state {hash(state)}", file=sys.stderr)
                raise
            assert time.monotonic() - began < SLOW, (name, data)
            ran[name] += 1
    return ran


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a duplicate key was accepted"
    return dict(pairs)


if __name__ == "__main__":
    for name, count in run(
        float(sys.argv[1]) if len(sys.argv) > 1 else 60,
        int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns(),
    ).items():
        print(f"{count:9d}  {name}")
