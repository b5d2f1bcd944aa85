"""ONNX Runtime sessions: options, the optimized graph, and passing of named tensors."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from .. import device as hardware
from ..distribution import install
from ..errors import NotUsableError, ResourceError, SourceError
from ..spec import DTYPES, TensorSpec

if TYPE_CHECKING:
    import onnxruntime

_LARGE_CALL = 4.0  # times the usual size: such a call gives its memory back
LONGEST_CALL = 120.0  # seconds of one call while a model is optimized: a Loop may count to 10^12
LOOK = 0.1  # seconds between two looks at the call that runs
# Microseconds that a thread waits in a loop for more work, where ONNX Runtime's own are some 50,000: a call of another
# session, or of torch, that begins meanwhile took 2 to 3 times as long. Calls in a row are as fast (.99 to 1.01).
SPIN_MICROSECONDS = 1000
PROFILED_CALLS = 3
LEVELS = ("all", "extended", "basic", "off")  # graph optimizations, each level with those after it


class SessionSettings(msgspec.Struct, frozen=True):
    """Settings of a session that an artifact keeps."""

    spinning: bool = True  # threads wait for work in a loop
    optimization: str = LEVELS[0]
    saturating: bool = (
        False  # int8 products end at 32,767 on a CPU without VNNI, as they do unless asked not to
    )


USUAL = SessionSettings()
AS_USERS = SessionSettings(saturating=True)  # as a program opens a file that says nothing else
EXACT = SessionSettings(optimization=LEVELS[-1])  # each operator of the file is run as it stands there


def providers(device: str) -> list[Any]:
    """Return the execution providers; raise `NotUsableError` for CUDA on a build without it."""
    import onnxruntime

    if not device.startswith("cuda"):
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise NotUsableError("this onnxruntime has no CUDA", hint=install("gpu"))
    options = {
        "device_id": str(torch.device(device).index or 0),
        "arena_extend_strategy": "kSameAsRequested",
        "do_copy_in_default_stream": "1",
        "use_tf32": str(int(torch.get_float32_matmul_precision() != "highest")),
    }
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


def open_session(
    path: Path,
    device: str,
    *,
    threads: int | None = None,
    optimized: Path | None = None,
    profile: Path | None = None,
    settings: SessionSettings = USUAL,
) -> onnxruntime.InferenceSession:
    """Open a session; `optimized` receives the graph that runs, a file whose name begins with `profile` its times."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions, and need not be on the terminal too
    level = onnxruntime.GraphOptimizationLevel
    levels = (level.ORT_ENABLE_ALL, level.ORT_ENABLE_EXTENDED, level.ORT_ENABLE_BASIC, level.ORT_DISABLE_ALL)
    options.graph_optimization_level = dict(zip(LEVELS, levels, strict=True))[settings.optimization]
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    if settings.spinning:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    else:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not settings.saturating and not hardware.has_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "weights.bin"
        )
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    try:
        return onnxruntime.InferenceSession(
            str(path),
            options,
            providers=providers(device),
            enable_fallback=0,  # on an error it would print a banner and try again
        )
    except runtime_errors() as error:
        raise NotUsableError(f"ONNX Runtime refuses the model: {clean_error_message(error)}") from error


class _Clock:
    """Ends a call of ONNX Runtime that takes longer than `limit` seconds; one thread looks at all of them."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._running: tuple[float, Any] | None = None
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="infer-call-limit").start()

    def run(
        self, session: Any, names: Sequence[str] | None, arrays: Mapping[str, np.ndarray], options: Any
    ) -> Any:
        """Run a session; raise `SourceError` for a call that was ended."""
        import onnxruntime

        options = options or onnxruntime.RunOptions()
        self._running = (time.monotonic(), options)
        try:
            return session.run(names, arrays, options)
        except runtime_errors() as error:
            if not options.terminate:
                raise
            raise too_long(arrays, self.limit) from error
        finally:
            self._running = None

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            if (running := self._running) is not None and time.monotonic() - running[0] > self.limit:
                running[1].terminate = True

    def stop(self) -> None:
        self._over.set()


_CLOCK: ContextVar[_Clock | None] = ContextVar("clock of calls", default=None)


def too_long(inputs: Mapping[str, np.ndarray], seconds: float) -> SourceError:
    """Return the error for a call that took longer than so many seconds."""
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
    return SourceError(
        f"one call of the model took longer than {seconds:.0f} s and was ended: {shapes}",
        hint="Is there a loop in it that hardly ends? Of a model that is so slow give less at once: "
        "shorter rows with --data, --max-batch 1",
    )


@contextmanager
def limited_calls() -> Iterator[None]:
    """End calls of ONNX Runtime inside the block that take longer than `LONGEST_CALL`."""
    clock = _Clock(LONGEST_CALL)
    token = _CLOCK.set(clock)
    try:
        yield
    finally:
        _CLOCK.reset(token)
        clock.stop()


def run_session(
    session: Any, names: Sequence[str] | None, arrays: Mapping[str, np.ndarray], options: Any = None
) -> Any:
    """Run a session on arrays, within the limit of `limited_calls`; `names` of outputs, None: all of them."""
    clock = _CLOCK.get()
    if clock is None:
        return session.run(names, arrays, options)
    return clock.run(session, names, arrays, options)


def runtime_errors() -> tuple[type[BaseException], ...]:
    """Return the exception classes of ONNX Runtime, which share no base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds = [getattr(state, name) for name in dir(state) if isinstance(getattr(state, name), type)]
    return (*(kind for kind in kinds if issubclass(kind, BaseException)), RuntimeError)


def is_damaged(error: NotUsableError) -> bool:
    """Return true if a session failed because of the file, not of an operator that the runtime lacks."""
    cause = error.__cause__
    return cause is not None and type(cause).__name__ not in ("NotImplemented", "EPFail")


def count_executed_ops(path: Path, device: str, *, settings: SessionSettings = USUAL) -> Counter[str]:
    """Count the operators of the graph that ONNX Runtime runs after its fusions."""
    import onnx

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        optimized = Path(folder) / "model.onnx"
        open_session(path, device, optimized=optimized, settings=settings)
        model = onnx.load(str(optimized), load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)


def operator_seconds(path: Path, inputs: Mapping[str, np.ndarray]) -> Counter[str]:
    """Return the seconds that the operators of the graph that runs take in one call on the CPU, by type."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(path, "cpu", profile=Path(folder) / "calls")
        try:
            for _ in range(PROFILED_CALLS):
                run_session(session, None, inputs)
            events = msgspec.json.decode(Path(session.end_profiling()).read_bytes())
        except runtime_errors() as error:
            raise NotUsableError(f"ONNX Runtime refuses the model: {clean_error_message(error)}") from error
    seconds: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            seconds[event["args"]["op_name"]] += event["dur"] / 1e6 / PROFILED_CALLS
    return seconds


class OrtRunner:
    """Session as a `Runner`; CPU tensors pass as numpy views, CUDA tensors by address.

    Inputs are complete here, so that a call skips the checks of the library's Python class: 14 of 160 µs of a model
    with three inputs. `as_users`: it does not, as a program that calls the library.
    """

    def __init__(
        self,
        path: Path,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        device: str,
        *,
        settings: SessionSettings = USUAL,
        as_users: bool = False,
    ) -> None:
        self.inputs, self.outputs, self.device = inputs, outputs, device
        session = open_session(path, device, settings=settings)
        self._session: Any = session if as_users or device != "cpu" else getattr(session, "_sess", session)
        self._names = [spec.name for spec in outputs]
        # By position: an output that has the name of an input has another in the file.
        self._fetched = [value.name for value in session.get_outputs()]
        self._last = self._usual = 0.0  # values of the inputs of a call

    @property
    def run_arrays(self) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]] | None:
        """`run` with dense arrays in place of tensors; None on a GPU."""
        return self._on_cpu if self.device == "cpu" else None

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one batch; raise `ResourceError` when memory runs out."""
        given = {spec.name: inputs[spec.name] for spec in self.inputs}
        if self.device != "cpu":
            return self._on_cuda(given)
        arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in given.items()}
        return {name: torch.from_numpy(array) for name, array in self._on_cpu(arrays).items()}

    def close(self) -> None:
        self._session = None

    def _on_cpu(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        size = 0
        for array in arrays.values():
            size += array.size
        options = None if size == self._last else self._options(size)
        try:
            if _CLOCK.get() is None:
                outputs = self._session.run(self._fetched, arrays, options)
            else:
                outputs = run_session(self._session, self._fetched, arrays, options)
        except runtime_errors() as error:
            raise_memory_error(error)
            raise
        return dict(zip(self._names, outputs))  # noqa: B905 - as many as were asked for

    def _on_cuda(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        binding = self._session.io_binding()
        index = torch.device(self.device).index or 0
        dense = {name: value.detach().to(self.device).contiguous() for name, value in inputs.items()}
        for spec in self.inputs:
            value = dense[spec.name]
            binding.bind_input(
                spec.name, "cuda", index, _ELEMENT[spec.torch_dtype], list(value.shape), value.data_ptr()
            )
        for name in self._fetched:
            binding.bind_output(name, "cuda", index)
        torch.cuda.current_stream(self.device).synchronize()
        try:
            self._session.run_with_iobinding(
                binding, self._options(sum(value.numel() for value in inputs.values()))
            )
        except runtime_errors() as error:
            raise_memory_error(error)
            raise
        outputs = (torch.from_dlpack(value) for value in binding.get_outputs())
        return dict(zip(self._names, outputs, strict=True))

    def _options(self, size: float) -> Any:
        """Return run options that shrink the arena after a call of `size` values far above the usual, else None.

        Calls of the size of the last usual one need not ask.
        """
        is_large = size > _LARGE_CALL * self._usual > 0
        self._usual = 0.9 * self._usual + 0.1 * size if self._usual else size
        self._last = 0.0 if is_large else size
        if not is_large:
            return None
        import onnxruntime

        options = onnxruntime.RunOptions()
        where = "cpu:0" if self.device == "cpu" else f"gpu:{torch.device(self.device).index or 0};cpu:0"
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", where)
        return options


def raise_memory_error(failure: BaseException | str) -> None:
    """Raise `ResourceError` where a failure of ONNX Runtime, or its message, is a lack of memory."""
    if "allocate memory" in str(failure) or "bad_alloc" in str(failure):
        raise ResourceError(
            f"out of memory: {clean_error_message(failure)}", hint="Send smaller batches"
        ) from (failure if isinstance(failure, BaseException) else None)


# Numbers of onnx.TensorProto, which bindings take where numpy has no such type.
_NUMBERS = {"float32": 1, "uint8": 2, "int8": 3, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10}
_NUMBERS |= {"float64": 11, "bfloat16": 16}
_ELEMENT = {dtype: _NUMBERS[name] for name, dtype in DTYPES.items()}


def clean_error_message(error: BaseException | str) -> str:
    """Strip error codes, source paths and C++ signatures from a runtime error."""
    text = _SOURCE.sub("", " ".join(str(error).split()).rpartition(" : ")[2])
    depth = 0
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ")" and depth == 0 and "onnxruntime::" in text[:at]:
            text = text[at + 1 :].removeprefix(" const").strip()
            break
    return text[:400] or type(error).__name__


_SOURCE = re.compile(
    r"(?:Load model from \S+ failed: ?)?/\S*onnxruntime\S*?\.(?:cc|h):\d+ "
    r"|Load model from \S+ failed: ?(?:Fatal error: )?"
)
