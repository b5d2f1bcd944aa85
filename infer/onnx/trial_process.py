"""A runtime in a process of its own, for inputs of which nobody knows whether the file takes them.

On inputs that it does not take ONNX Runtime 1.31 may end its whole process: the reshape of a tensor without values
divides by zero (SIGFPE). The process opens an ONNX file as it is written, without optimizations of the graph, an IR in
OpenVINO, and imports no torch, so that it answers after a third of a second. It is started with the first inputs, again
after its death.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ..errors import NotUsableError
from ..process import child
from ..process.channel import Channel, ClosedError
from ..process.spawn import ChildProcess, describe_exit
from .openvino_ports import input_places, output_places

Runtime = Literal["onnxruntime", "openvino"]  # the package that runs a file
TITLES: dict[Runtime, str] = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


class Array(msgspec.Struct, frozen=True):
    """A dense array: numpy's name of its dtype, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    values: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        """Pack an array; raise `TypeError` for one of texts, and for a sequence or map of tensors."""
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise TypeError("expected a tensor of numbers")
        return cls(array.dtype.name, array.shape, array.tobytes())

    def unpacked(self) -> np.ndarray:
        return np.frombuffer(bytearray(self.values), self.dtype).reshape(self.shape)


class Open(msgspec.Struct, frozen=True, tag=True):
    """Request: open this file, to be run for these outputs with so many threads."""

    path: str
    runtime: Runtime
    outputs: tuple[str, ...]
    threads: int


class Call(msgspec.Struct, frozen=True, tag=True):
    """Request: run the file on these inputs, by name."""

    inputs: dict[str, Array]


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Answer: the outputs in the order asked for; `failure`: what the runtime said instead."""

    arrays: tuple[Array, ...] = ()
    failure: str | None = None


class TrialProcess:
    """Runs a file on inputs that it may not take. `died_of`: the shapes of inputs that ended the process."""

    def __init__(
        self, path: Path, runtime: Runtime, outputs: Sequence[str], threads: int, seconds: float
    ) -> None:
        """Take the file, the names of its outputs, the number of threads, and the seconds after which a call is ended;
        nothing is started.
        """
        self._open = Open(str(path.absolute()), runtime, tuple(outputs), threads)
        self._seconds = seconds
        self._end: Callable[[], object] = lambda: None
        self._channel: Channel[Any] | None = None
        self.died_of: list[dict[str, tuple[int, ...]]] = []

    def run(self, inputs: Mapping[str, np.ndarray]) -> Outputs:
        """Return the outputs, or the failure of a call that ended with an error or with the death of the process.

        Raises `TimeoutError` for a call that takes longer than the limit, and `NotUsableError` where no process starts.
        """
        channel = self._channel or self._start()
        try:
            channel.send(Call({name: Array.of(value) for name, value in inputs.items()}))
            outputs: Outputs | None = channel.receive(self._seconds)
        except ClosedError:
            self.close()
            self.died_of.append({name: value.shape for name, value in inputs.items()})
            return Outputs(failure="the process ended")
        if outputs is None:
            self.close()
            raise TimeoutError
        return outputs

    def close(self) -> None:
        """End the process; the next call starts another."""
        self._end()
        self._channel = None

    def _start(self) -> Channel[Any]:
        from .ort_session import clean_error_message  # with torch, which this side has imported

        title = TITLES[self._open.runtime]
        process = ChildProcess(__name__, Outputs, output=subprocess.DEVNULL)
        self._end = weakref.finalize(self, process.kill)
        try:
            process.channel.send(self._open)
            opened: Outputs | None = process.channel.receive()
        except ClosedError as error:
            how = describe_exit(process.wait() or 0)
            raise NotUsableError(f"{title}'s process ended on opening the model: {how}") from error
        if opened is not None and opened.failure is not None:
            raise NotUsableError(f"{title} refuses the model: {clean_error_message(opened.failure)}")
        self._channel = process.channel
        return process.channel


def _opened(opened: Open) -> Callable[[dict[str, np.ndarray]], Sequence[Any]]:
    """Open the file; return what runs it on arrays by name."""
    if opened.runtime == "onnxruntime":
        session = _session(opened)
        return lambda arrays: session.run(list(opened.outputs), arrays)
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    settings = {"INFERENCE_NUM_THREADS": opened.threads, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(opened.path, "CPU", settings)
    request, places = model.create_infer_request(), output_places(model, opened.outputs)

    def run(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
        read = input_places(model, arrays)
        results = request.infer({place: arrays[name] for name, place in read.items()})
        return [results[place].copy() for place in places.values()]

    return run


def _session(opened: Open) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = opened.threads, 1
    return onnxruntime.InferenceSession(opened.path, options, providers=["CPUExecutionProvider"])


def _serve(channel: Channel[Any]) -> None:
    """Open the file of the first message, and answer calls until the other side closes the channel."""
    opened = channel.receive()
    if not isinstance(opened, Open):
        return
    try:
        run = _opened(opened)
    except Exception as error:  # noqa: BLE001 - its classes share no base
        channel.send(Outputs(failure=str(error)))
        return
    channel.send(Outputs())
    while isinstance(call := channel.receive(), Call):
        try:
            arrays = run({name: array.unpacked() for name, array in call.inputs.items()})
            answer = Outputs(tuple(map(Array.of, arrays)))
        except Exception as error:  # noqa: BLE001 - as above; the other side sorts them
            answer = Outputs(failure=str(error))
        channel.send(answer)


def main(arguments: Sequence[str]) -> int:
    parent, descriptor = map(int, arguments)
    child.end_with_parent(parent)
    child.confine()  # no core file
    try:
        _serve(Channel(socket.socket(fileno=descriptor), Open | Call))
    except ClosedError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
