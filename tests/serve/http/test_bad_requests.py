"""Table of bad requests with their responses, over raw sockets; after every row the server works.

It is gone through twice: in this process, and against a server that runs under `python -O`, which drops asserts.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support import raw_http
from tests.support.raw_http import (
    BODY,
    GOOD,
    PATH,
    ask,
    chunked,
    closed,
    connect,
    get,
    live,
    post,
    read,
    send,
)

LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
ROWS: list[Any] = []


class Row(NamedTuple):
    request: bytes
    status: int
    says: str = ""  # a part of the body
    closes: bool = False
    header: tuple[bytes, bytes] | None = None


def row(name: str, request: bytes, status: int, says: str = "", **more: Any) -> None:
    ROWS.append(pytest.param(Row(request, status, says, **more), id=name))


def framing(name: str, request: bytes, status: int = 400) -> None:
    row(f"framing-{name}", request, status, "error", closes=True)


def tensors(label: str, says: str = "", /, status: int = 400, model: str = "double", **changes: Any) -> None:
    """One field of the input is another."""
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], **changes}
    given = {key: value for key, value in given.items() if value is not None}
    body = json.dumps({"inputs": [given]}).encode()
    row(f"tensor-{label}", send(body, path=b"/v2/models/%b/infer" % model.encode()), status, says)


def text(name: str, path: str, body: Any, status: int, says: str = "", **headers: str) -> None:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = [f"{key.replace('_', '-')}: {value}".encode() for key, value in headers.items()]
    row(f"text-{name}", send(sent, *named, path=path.encode()), status, says)


def speak(label: str, status: int, says: str = "", /, **fields: Any) -> None:
    text(
        label,
        "/v1/completions",
        {"model": "fake_llm", "prompt": "hi", "max_tokens": 2, **fields},
        status,
        says,
    )


def chat(label: str, status: int, says: str = "", /, **fields: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "fake_llm", "messages": messages, "max_tokens": 2, **fields}
    text(f"chat-{label}", "/v1/chat/completions", body, status, says)


# --- request line and head
framing("nonsense", b"\x00\x01\x02\x03\r\n\r\n")
framing("tls-hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
framing("no-target", b"GET\r\n\r\n")
framing("http-0.9", b"GET /health\r\n\r\n", 505)
framing("http-2.0", b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", 505)
framing("http-9.9", b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n")
framing("http2-preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
framing("unknown-method", b"NONSENSE /health HTTP/1.1\r\nHost: a\r\n\r\n")
framing("lowercase-method", b"get /health HTTP/1.1\r\nHost: a\r\n\r\n")
framing("bytes-in-target", b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n")
framing("space-in-target", b"GET /health x HTTP/1.1\r\nHost: a\r\n\r\n")
framing("space-after-version", b"GET /health HTTP/1.1 \r\nHost: a\r\n\r\n")
framing("two-spaces-before-target", b"GET  /health HTTP/1.1\r\nHost: a\r\n\r\n")
framing("two-spaces-after-target", b"GET /health  HTTP/1.1\r\nHost: a\r\n\r\n")
framing("two-spaces-after-empty-lines", b"\r\n\r\nGET /health  HTTP/1.1\r\nHost: a\r\n\r\n")
row("two-spaces-in-a-header", get(b"/health", b"X: a  b"), 200)
framing("bare-lf-line", b"GET /health HTTP/1.1\nHost: a\n\n")
framing("bare-lf-header", b"GET /health HTTP/1.1\r\nHost: a\nX: b\r\n\r\n")
framing("bare-lf-end", b"GET /health HTTP/1.1\r\nHost: a\r\n\n")
framing("bare-cr", get(b"/health", b"X: a\rb"))
framing("nul-in-header", get(b"/health", b"X: a\x00b"))
framing("obs-fold", get(b"/health", b"X: a\r\n folded: b"))
framing("fold-first", b"GET /health HTTP/1.1\r\n Host: a\r\n\r\n")
framing("space-before-colon", get(b"/health", b"X : b"))
framing("no-colon", get(b"/health", b"X"))
framing("empty-name", get(b"/health", b": b"))
framing("space-in-name", get(b"/health", b"Bad Header: 1"))
framing("no-host", b"GET /health HTTP/1.1\r\n\r\n")
framing("two-hosts", get(b"/health", b"Host: b"))
framing("two-keys", get(b"/health", b"Authorization: Bearer a", b"Authorization: Bearer b"))
framing("long-target", get(b"/" + b"a" * 9000), 414)
framing("many-headers", get(b"/health", *[b"X: 1"] * 101), 431)
framing("long-header", get(b"/health", b"X: " + b"a" * 40_000), 431)
framing("endless-header", b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000, 431)
framing("many-small-headers", get(b"/health", *[b"A: " + b"a" * 400] * 90), 431)

# --- body framing
framing("length-abc", post(b"Content-Length: abc"))
framing("length-negative", post(b"Content-Length: -5"))
framing("length-plus", post(b"Content-Length: +5", body=b"12345"))
framing("length-hex", post(b"Content-Length: 0x5", body=b"12345"))
framing("length-empty", post(b"Content-Length: ", body=b"12345"))
framing("length-list", post(b"Content-Length: 5, 5", body=b"12345"))
framing("length-huge", post(b"Content-Length: 99999999999999999999999"))
framing("two-lengths", post(b"Content-Length: 1", b"Content-Length: 2", body=b"12"))
framing("two-equal-lengths", post(b"Content-Length: 2", b"Content-Length: 2", body=b"12"))
framing("cl-te", post(b"Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"))
framing("te-cl", post(CHUNKED, b"Content-Length: 5", body=b"0\r\n\r\n"))
framing("te-space-before-colon", post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"))
framing("te-twice", post(CHUNKED, CHUNKED, body=b"0\r\n\r\n"))
framing("te-gzip-chunked", post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"))
framing("te-identity", post(b"Transfer-Encoding: identity", body=b"abc"))
framing("te-unknown", post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"))
framing("te-vertical-tab", post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"))
framing("te-http-1.0", post(CHUNKED, version=b"1.0", body=b"0\r\n\r\n"))
framing("chunk-size-text", post(CHUNKED, body=b"zz\r\n\r\n"))
framing("chunk-size-0x", post(CHUNKED, body=b"0x3\r\nabc\r\n0\r\n\r\n"))
framing("chunk-size-negative", post(CHUNKED, body=b"-3\r\nabc\r\n0\r\n\r\n"))
framing("chunk-size-space", post(CHUNKED, body=b"3 \r\nabc\r\n0\r\n\r\n"))
framing("chunk-size-huge", post(CHUNKED, body=b"ffffffffffffffffff\r\n"))
framing("chunk-size-2^63", post(CHUNKED, body=b"ffffffffffffffff\r\nabc"))
framing("chunk-bare-lf", post(CHUNKED, body=b"3\nabc\r\n0\r\n\r\n"))
framing("chunk-tail", post(CHUNKED, body=b"3\r\nabcXX0\r\n\r\n"))
framing("chunk-tail-lf", post(CHUNKED, body=b"3\r\nabc\n0\r\n\r\n"))
framing("chunk-extension", post(CHUNKED, body=b"3;" + b"a" * 300 + b"\r\nabc\r\n0\r\n\r\n"))
framing("chunk-extension-endless", post(CHUNKED, body=b"3;" + b"a" * 5000))
framing("chunk-extension-newline", post(CHUNKED, body=b'3;a="\n"\r\nabc\r\n0\r\n\r\n'))
framing("chunks-many", chunked(*[b" "] * 501))
framing("trailers-long", chunked(BODY, tail=b"0\r\nX: " + b"a" * 40_000 + b"\r\n\r\n"))
row("trailers-mean-nothing", chunked(BODY, tail=b"0\r\nX-Api-Key: a\r\n\r\n"), 200)
framing("trailer-length", chunked(BODY, tail=b"0\r\nContent-Length: 7\r\n\r\n"))
row("chunk-extension-short", post(CHUNKED, body=b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), 200)
row("upgrade-is-ignored", send(BODY, b"Connection: Upgrade", b"Upgrade: h2c"), 200)
row("websocket-is-ignored", get(b"/health", b"Connection: Upgrade", b"Upgrade: websocket"), 200)
row("body-of-a-get-is-skipped", get(b"/health", b"Content-Length: 3") + b"abc", 200)
row("leading-empty-lines", b"\r\n\r\n" + GOOD, 200)
row("absolute-target", get(b"http://elsewhere/health"), 200)

# --- addresses and methods
row("get-infer", get(PATH), 405, "method", header=(b"allow", b"POST"))
row("post-health", send(b"", path=b"/health"), 405, header=(b"allow", b"GET, HEAD"))
row("put-model", get(b"/v2/models/double", method=b"PUT"), 405, header=(b"allow", b"GET, HEAD"))
row("trace", get(b"/health", method=b"TRACE"), 405)
row("options", get(b"/v1/completions", method=b"OPTIONS"), 405, header=(b"allow", b"POST"))
row("options-star", get(b"*", method=b"OPTIONS"), 404)
row("connect", b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400, closes=True)
row("head", get(b"/health", method=b"HEAD"), 200)
row("head-of-infer", get(PATH, method=b"HEAD"), 405)
row("unknown-address", get(b"/nope"), 404)
row("unknown-model", send(BODY, path=b"/v2/models/nope/infer"), 404, "no such model")
row("unknown-version", send(BODY, path=b"/v2/models/double/versions/9/infer"), 404, "version")
row("dotdot", get(b"/v2/models/../../etc/passwd"), 404)
row("encoded-dotdot", get(b"/v2/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd"), 404)
row("encoded-nul", get(b"/v2/models/double%00"), 404)
row("encoded-newline", get(b"/v2/models/double%0d%0aX-Evil:%201"), 404)
row("encoded-garbage", get(b"/v2/models/%ff%fe"), 404)
row("percent-zz", get(b"/v2/models/%zz"), 404)
row("a-url-as-model", get(b"/v2/models/http%3A%2F%2Felsewhere%2Fm"), 404)

# --- JSON
for name, body in {
    "empty": b"",
    "cut": BODY[:-1],
    "nan": BODY.replace(b"1,2", b"NaN,2"),
    "infinity": BODY.replace(b"1,2", b"Infinity,2"),
    "minus-infinity": BODY.replace(b"1,2", b"-Infinity,2"),
    "1e999": BODY.replace(b"1,2", b"1e999,2"),
    "huge-int": BODY.replace(b"1,2", b"9" * 4301 + b",2"),
    "twice": BODY.replace(b'"name":"x"', b'"name":"x","name":"x"'),
    "twice-escaped": BODY.replace(b'"name":"x"', b'"name":"x","\\u006eame":"x"'),
    "twice-deep": b'{"inputs":[],"parameters":{"a":[{"b":1,"b":2}]}}',
    "depth-65": b'{"inputs":' + b"[" * 64 + b"]" * 64 + b"}",
    "depth-mixed": b'{"inputs":' + b"[0," * 100 + b"0" + b"]" * 100 + b"}",
    "depth-objects": b'{"a":' * 65 + b"1" + b"}" * 65,
    "depth-40000": b"[" * 40_000,
    "trailing-comma": BODY.replace(b"4]", b"4,]"),
    "comment": b"/* */" + BODY,
    "two-documents": BODY + BODY,
    "single-quotes": BODY.replace(b'"', b"'"),
    "leading-zero": BODY.replace(b"1,2", b"01,2"),
    "newline-in-text": BODY.replace(b'"x"', b'"x\n"'),
    "not-an-object": b"[1,2,3]",
    "null": b"null",
    "bom": b"\xef\xbb\xbf" + BODY,
    "utf-16": BODY.decode().encode("utf-16"),
    "utf-32": BODY.decode().encode("utf-32-le"),
}.items():
    row(f"json-{name}", send(body), 400, "error")
COMPLETION = b'{"model":"fake_llm","max_tokens":1,"prompt":"%b"}'
for name, inside, status, says in [
    ("not-utf8", b"\xff", 400, "invalid_unicode"),
    ("overlong", b"\xc0\x80", 400, "invalid_unicode"),
    ("surrogate-bytes", b"\xed\xa0\x80", 400, "invalid_unicode"),
    ("lone-high", b"\\ud800", 400, "invalid_unicode"),
    ("lone-low", b"\\udc00", 400, "invalid_unicode"),
    ("lone-then-letter", b"\\ud800a", 400, "invalid_unicode"),
    ("nul-is-text", b"a\\u0000b", 200, ""),
    ("pair-is-text", b"\\ud83d\\ude00", 200, ""),
]:
    text(f"unicode-{name}", "/v1/completions", COMPLETION % inside, status, says)

# --- sizes, encodings, types
row("too-big-announced", post(b"Content-Length: 100001"), 413, "larger", closes=True)
row("too-big-chunked", chunked(*[b" " * 30_000] * 4), 413, "larger", closes=True)
row("json-too-long", send(b" " * 50_001), 413, "binary", closes=True)
BOMB = gzip.compress(b" " * 1_000_000)
row("gzip-bomb", send(BOMB, b"Content-Encoding: gzip"), 413, "larger", closes=True)
row("gzip-cut", send(gzip.compress(BODY)[:-5], b"Content-Encoding: gzip"), 400, "gzip")
row("gzip-garbage", send(BODY, b"Content-Encoding: gzip"), 400, "gzip")
row("gzip-with-more", send(gzip.compress(BODY) + b"x", b"Content-Encoding: gzip"), 400, "gzip")
row("gzip-is-taken", send(gzip.compress(BODY), b"Content-Encoding: gzip"), 200)
row("brotli", send(BODY, b"Content-Encoding: br"), 415, "encoding")
row("gzip-twice", send(BODY, b"Content-Encoding: gzip, gzip"), 415, "encoding")
row("any-type-for-tensors", send(BODY, b"Content-Type: text/plain"), 200)
for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "x"):
    text(f"type-{kind[:9]}", "/v1/completions", COMPLETION % b"a", 415, "JSON", content_type=kind)
text(
    "type-charset", "/v1/completions", COMPLETION % b"a", 200, content_type="Application/JSON; charset=utf-8"
)

# --- tensors
tensors("unknown-name", "expected", name="nope")
tensors("no-name", "name", name=None)
tensors("dtype", "expected FP32", datatype="INT64")
tensors("unknown-dtype", "expected FP32", datatype="FP33" * 100)
tensors("rank", "expected input", shape=[4])
tensors("size", "got", shape=[1, 5], data=[1, 2, 3, 4, 5])
tensors("count", "elements", data=[1, 2, 3])
tensors("count-more", "elements", data=[1, 2, 3, 4, 5])
tensors("ragged", "shape", data=[[1, 2], [3, 4, 5]])
tensors("negative-size", shape=[-1, 4])
tensors("bool-size", shape=[True, 4])
tensors("float-size", shape=[1.0, 4])
tensors("text-size", shape=["1", 4])
tensors("overflow-size", shape=[2**62, 4])
tensors("overflow-product", shape=[2**60 + 2, 16])
tensors("rank-17", shape=[1] * 17)
tensors("empty-batch", shape=[0, 4], data=[])
tensors("no-data", "no data", data=None)
tensors("text-values", data=["1", "2", "3", "4"])
tensors("bool-values", data=[True, False, True, False])
tensors("null-values", data=[None, 1, 2, 3])
tensors("fp32-overflow", "fit", data=[1e39, 0, 0, 0])
tensors("int8-overflow", "fit", model="int8", datatype="INT8", shape=[1, 2], data=[128, 0])
tensors("int8-2^63", model="int8", datatype="INT8", shape=[1, 2], data=[2**63, 0])
tensors("int8-float", model="int8", datatype="INT8", shape=[1, 2], data=[1.5, 0])
tensors("bool-number", model="bool", datatype="BOOL", shape=[1, 2], data=[2, 0])
tensors("fp16-json", "binary", model="float16", datatype="FP16", shape=[1, 2], data=[1, 0])
tensors("shared-memory", "not supported", parameters={"shared_memory_region": "/dev/shm/x"}, data=None)
tensors("twice", "twice", parameters={"binary_data_size": 16})
INPUTS = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
for name, change, says in [
    ("two-inputs", {"inputs": INPUTS["inputs"] * 2}, "more than one"),
    ("no-inputs", {"inputs": []}, "missing"),
    ("inputs-object", {"inputs": {}}, ""),
    ("output-unknown", {"outputs": [{"name": "z"}]}, "expected each of"),
    ("output-twice", {"outputs": [{"name": "y"}] * 2}, "at most once"),
    ("classification", {"outputs": [{"name": "y", "parameters": {"classification": 1}}]}, "not supported"),
    ("sequence", {"parameters": {"sequence_id": 1}}, "not supported"),
    ("timeout-negative", {"parameters": {"timeout": -1}}, "timeout"),
    ("timeout-text", {"parameters": {"timeout": "1"}}, "timeout"),
    ("priority-bool", {"parameters": {"priority": True}}, "priority"),
    ("binary-flag", {"parameters": {"binary_data_output": "yes"}}, "true or false"),
    ("id-number", {"id": 7}, "id"),
]:
    row(f"request-{name}", send(json.dumps({**INPUTS, **change}).encode()), 400, says)
SPLIT = b"Inference-Header-Content-Length"
HEAD = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}]}
).encode()
for name, body, header, status in [
    ("good", HEAD + bytes(16), b"%d" % len(HEAD), 200),
    ("short", HEAD + bytes(15), b"%d" % len(HEAD), 400),
    ("long", HEAD + bytes(17), b"%d" % len(HEAD), 400),
    ("beyond", HEAD + bytes(16), b"999999", 400),
    ("negative", HEAD + bytes(16), b"-1", 400),
    ("text", HEAD + bytes(16), b"x", 400),
    ("huge", HEAD + bytes(16), b"9" * 50, 400),
    ("into-json", HEAD + bytes(16), b"%d" % (len(HEAD) - 1), 400),
    ("raw-wrong-size", bytes(17), b"0", 400),
    ("raw-good", bytes(16), b"0", 200),
]:
    row(f"binary-{name}", send(body, SPLIT + b": " + header), status)
row("binary-two-splits", send(HEAD + bytes(16), SPLIT + b": 1", SPLIT + b": 2"), 400, closes=True)
for name, value in {
    "text": b"soon",
    "zero": b"0",
    "negative": b"-5",
    "huge": b"9" * 10,
    "float": b"1.5",
}.items():
    row(f"timeout-header-{name}", send(BODY, b"X-Request-Timeout-Ms: " + value), 400, "X-Request-Timeout-Ms")
row(
    "nonfinite-are-texts",
    send(
        json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0]}]}).encode(),
        path=b"/v2/models/wild/infer",
    ),
    200,
    '["NaN","Infinity","-Infinity"]',
)

# --- OpenAI
text("no-model", "/v1/completions", {"prompt": "a"}, 400, "model")
text("unknown-model", "/v1/completions", {"model": "../../etc", "prompt": "a"}, 404, "model_not_found")
text("tensor-model", "/v1/completions", {"model": "double", "prompt": "a"}, 400, '"param":"model"')
for field, value in {
    "n": 17,
    "best_of": 3,
    "max_tokens": -1,
    "temperature": -0.1,
    "top_p": 1.1,
    "top_k": -2,
    "min_p": 2,
    "presence_penalty": 3,
    "frequency_penalty": -3,
    "repetition_penalty": 0,
    "logprobs": 21,
    "stop": ["a"] * 17,
    "stop_token_ids": [1] * 17,
    "logit_bias": {str(i): 1 for i in range(1025)},
    "timeout": 0,
    "priority": 2**31,
    "seed": 2**64,
}.items():
    speak(f"range-{field}", 400, f'"param":"{field}"', **{field: value})
speak("n-0", 400, '"param":"n"', n=0)
speak("logprobs-negative", 400, '"param":"logprobs"', logprobs=-1)
speak("stop-empty", 400, '"param":"stop"', stop=[""])
speak("stop-long", 400, '"param":"stop', stop=["a" * 2000])
speak("bias-vocabulary", 400, "token ids", logit_bias={"258": 1})
speak("bias-name", 400, '"param":"logit_bias"', logit_bias={"-1": 1})
speak("bias-value", 400, '"param":"logit_bias', logit_bias={"1": 101})
speak("stop-ids-vocabulary", 400, "token ids", stop_token_ids=[258])
speak("ids-vocabulary", 400, "token ids", prompt=[258])
speak("ids-negative", 400, "prompt", prompt=[-1])
speak("ids-bool", 400, "prompt", prompt=[True])
speak("ids-2^31", 400, "prompt", prompt=[[2**31]])
speak("prompt-mixed", 400, "prompt", prompt=["a", [1]])
speak("prompt-empty-list", 400, "prompt", prompt=[])
speak("prompt-empty-ids", 400, "prompt", prompt=[[]])
speak("prompt-empty", 400, "empty", prompt="", add_special_tokens=False)
speak("prompts-many", 400, "1024", prompt=["a"] * 1025)
speak("context", 400, "context_length_exceeded", max_tokens=1000)
speak("context-prompt", 400, "context_length_exceeded", prompt="a" * 100, max_tokens=None)
speak("context-long-text", 400, "context_length_exceeded", prompt="a" * 20_000)
speak("suffix", 400, '"param":"suffix"', suffix="b")
speak("grammar-bad", 422, "regex", structured_outputs={"regex": "("})
speak("unknown-fields-are-counted", 200, nonsense={"a": [1]})
chat("template", 400, '"param":"chat_template"', chat_template="{{ 7 * 7 }}")
chat("template-kwargs", 400, "chat_template", chat_template_kwargs={"chat_template": "x"})
for reserved in ("messages", "tools", "self", "add_generation_prompt"):
    chat(
        f"kwargs-{reserved}",
        400 if reserved != "add_generation_prompt" else 200,
        chat_template_kwargs={reserved: []},
    )
chat("no-messages", 400, "messages", messages=[])
chat("role", 400, "role", messages=[{"role": "root", "content": "a"}])
chat("image-url", 400, "", messages=[
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
])  # fmt: skip
chat("top-logprobs", 400, '"param":"top_logprobs"', top_logprobs=2)
chat("top-logprobs-21", 400, '"param":"top_logprobs"', logprobs=True, top_logprobs=21)
chat("tool-name", 400, "tools", tools=[{"type": "function", "function": {"name": "a b"}}])
text("embeddings-empty", "/v1/embeddings", {"model": "embedder", "input": []}, 400, '"param":"input"')
text("embeddings-blank", "/v1/embeddings", {"model": "embedder", "input": ""}, 400, '"param":"input')
text("embeddings-ids", "/v1/embeddings", {"model": "embedder", "input": [1000]}, 400, "token id")
text(
    "embeddings-wide",
    "/v1/embeddings",
    {"model": "embedder", "input": "a", "dimensions": 4},
    400,
    "dimensions",
)
text("embeddings-long", "/v1/embeddings", {"model": "embedder", "input": "a" * 600}, 400, "seq")
text("embeddings-format", "/v1/embeddings", {"model": "embedder", "input": "a", "encoding_format": "x"}, 400)
text("tokenize-both", "/tokenize", {"prompt": "a", "messages": []}, 400)
text("detokenize-id", "/detokenize", {"tokens": [258]}, 400, "token ids")
text("detokenize-negative", "/detokenize", {"tokens": [-1]}, 400)


@pytest.fixture(scope="module", params=["here", "python -O"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("rude")
    if request.param == "here":
        with live(*raw_http.models(folder), limits=raw_http.LIMITS) as server:
            yield server
    else:
        with raw_http.process(folder, "-O") as server:
            yield server


@pytest.fixture(autouse=True)
def still_well(server: Any) -> Iterator[None]:
    yield
    raw_http.well(server)


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_request_has_its_response_and_the_server_goes_on(server: Any, row: Row) -> None:
    with connect(server) as connection:
        connection.sendall(row.request)
        answer = read(connection, bytearray(), head=row.request.startswith(b"HEAD"))
        assert answer.status == row.status, answer.body
        assert re.fullmatch(rb"[0-9a-f]{32}", answer.headers[b"x-request-id"])
        assert row.says in answer.body.decode()
        if answer.status >= 400 and not row.request.startswith(b"HEAD"):
            assert answer.headers[b"content-type"] == b"application/json"
            assert len(answer.body) < 2000
            error = json.loads(answer.body)["error"]
            if re.search(rb"^[A-Z]+ /(v1|tokenize|detokenize)", row.request) and not row.closes:
                assert set(error) == {"message", "type", "param", "code"}
            else:
                assert isinstance(error, str)
        if row.header is not None:
            assert answer.headers[row.header[0]] == row.header[1]
        if row.closes:
            assert answer.headers[b"connection"] == b"close"
            assert closed(connection, 3)
        else:
            connection.sendall(GOOD)
            assert read(connection, bytearray()).status == 200


def trickle(connection: Any, data: bytes, step: float = 0.04, seconds: float = 1.5) -> bool:
    """One byte at a time; whether the other side was the first to end it."""
    deadline = time.monotonic() + seconds
    for index in range(len(data)):
        if time.monotonic() > deadline:
            return False
        try:
            connection.sendall(data[index : index + 1])
        except OSError:
            return True
        time.sleep(step)
    return False


@pytest.mark.parametrize(
    ("begin", "slow"),
    [
        (b"", b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100),
        (post(LENGTH), BODY),
        (post(CHUNKED), b"1\r\n \r\n" * 50),
    ],
    ids=["head", "body", "chunks"],
)
def test_a_trickling_request_is_408_at_an_absolute_deadline(server: Any, begin: bytes, slow: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(begin)
        began = time.monotonic()
        trickle(connection, slow, seconds=1.0)
        answer = read(connection, bytearray())
        assert answer.status == 408
        assert answer.headers[b"connection"] == b"close"
        assert 0.4 < time.monotonic() - began < 5
        assert closed(connection, 3)


def test_an_unread_body_that_arrives_too_slowly_ends_the_connection(server: Any) -> None:
    with connect(server) as connection:
        connection.sendall(get(b"/health", b"Content-Length: 1000"))
        assert read(connection, bytearray()).status == 200
        assert trickle(connection, b"a" * 200, step=0.03, seconds=4)


def test_a_silent_connection_is_closed_without_a_response(server: Any) -> None:
    with connect(server) as connection:
        connection.settimeout(5)
        assert connection.recv(100) == b""


def test_responses_keep_their_order_before_a_bad_request(server: Any) -> None:
    with connect(server) as connection:
        buffer = bytearray()
        connection.sendall(GOOD + get() + GOOD + post(b"Content-Length: x"))
        assert [read(connection, buffer).status for _ in range(4)] == [200, 200, 200, 400]
        assert closed(connection, 3)


def test_a_hundred_pipelined_requests_are_answered_in_order(server: Any) -> None:
    with connect(server) as connection:
        buffer = bytearray()
        connection.sendall((GOOD + get()) * 50)
        for _ in range(50):
            assert b"outputs" in read(connection, buffer).body
            assert read(connection, buffer).body == b'{"status":"ok"}'


def test_a_request_smuggled_behind_a_chunk_is_refused_not_answered(server: Any) -> None:
    inner = get(b"/v2/models/double/stats")
    with connect(server) as connection:
        connection.sendall(post(CHUNKED, b"Content-Length: 4", body=b"5c\r\n" + inner + b"0\r\n\r\n"))
        buffer = bytearray()
        assert read(connection, buffer).status == 400
        assert closed(connection, 3)
        assert b"model_stats" not in buffer


@pytest.mark.parametrize("sent", [1, 30, len(GOOD) - 5, len(GOOD)])
def test_a_disconnect_leaves_nothing_behind(server: Any, sent: int) -> None:
    for cut in (False, True):
        with connect(server) as connection:
            connection.sendall(GOOD[:sent])
            if cut:
                raw_http.reset(connection)
    assert raw_http.idle(server)


def test_http_1_0_is_answered_and_closed(server: Any) -> None:
    with connect(server) as connection:
        connection.sendall(post(LENGTH, body=BODY, version=b"1.0"))
        assert read(connection, bytearray()).status == 200
        assert closed(connection, 3)


def test_refused_requests_are_counted(server: Any) -> None:
    ask(server, b"nonsense\r\n\r\n")
    ask(server, get(b"/" + b"a" * 9000))
    text = ask(server, get(b"/metrics")).body.decode()
    for code in (400, 414):
        assert f'infer_requests_total{{api="wire",code="{code}"' in text
