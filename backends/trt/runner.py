"""Runner of a TensorRT engine: inputs are checked against its profile before it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infer.errors import InputError, NotUsableError, ResourceError
from infer.onnx.export import output_names
from infer.spec import TensorSpec

from . import libraries
from .builder import build_logger

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def refusal(spec: TensorSpec, value: torch.Tensor, bounds: Bounds) -> str | None:
    """Return the reason why an engine can't take a tensor for an input, or None.

    An engine reads memory as it is: of another dtype it would compute wrong numbers.
    """
    low, high = bounds
    shape = tuple(value.shape)
    if value.dtype != spec.torch_dtype:
        return f"expected input {spec.name} {spec.dtype}, got {str(value.dtype).removeprefix('torch.')}"
    if len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
        return None
    return f"the engine takes input {spec.name} from {list(low)} to {list(high)}, got {list(shape)}"


class TrtRunner:
    """Engine as a `Runner`: tensors stay on the device, work goes to torch's current stream."""

    def __init__(
        self,
        blob: bytes,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        device: str,
        library: str = libraries.TENSORRT,
    ) -> None:
        trt = libraries.imported(library)
        self.inputs, self.outputs, self.device = inputs, outputs, torch.device(device)
        self._names = output_names(inputs, outputs)
        with torch.cuda.device(self.device):
            self._runtime: Any = trt.Runtime(build_logger(trt))
            self._engine: Any = self._runtime.deserialize_cuda_engine(blob)
            if self._engine is None:
                raise NotUsableError(
                    "TensorRT refuses the engine", hint="Optimize the model again on this machine"
                )
            self._context: Any = self._engine.create_execution_context()
            if self._context is None:
                raise ResourceError("out of memory: the engine's scratch space does not fit on the device")
            self._stream = torch.cuda.Stream(self.device)
        names = {self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)}
        self._bounds = {spec.name: self._bound(spec.name) for spec in inputs if spec.name in names}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one batch; outputs are new tensors. Raise `InputError` for dtypes and shapes that were not built for."""
        with torch.cuda.device(self.device):
            bound = {  # the engine lacks the inputs that nothing reads
                spec.name: self._given(spec, inputs[spec.name])
                for spec in self.inputs
                if spec.name in self._bounds
            }
            for name, value in bound.items():
                self._take(
                    self._context.set_input_shape(name, tuple(value.shape)),
                    f"input {name} {list(value.shape)}",
                )
                self._take(self._context.set_tensor_address(name, value.data_ptr()), f"input {name}")
            if unknown := self._context.infer_shapes():
                raise NotUsableError(f"TensorRT could not infer the shapes of {', '.join(unknown)}")
            results = {
                spec.name: self._output(spec, name)
                for spec, name in zip(self.outputs, self._names, strict=True)
            }
            self._execute([*bound.values(), *results.values()])
        return results

    def close(self) -> None:
        self._context = self._engine = self._runtime = None

    def _bound(self, name: str) -> Bounds:
        """Return the smallest and the largest shape of an input that the engine was built for."""
        low, _, high = self._engine.get_tensor_profile_shape(name, 0)
        return tuple(low), tuple(high)

    def _given(self, spec: TensorSpec, value: torch.Tensor) -> torch.Tensor:
        if reason := refusal(spec, value, self._bounds[spec.name]):
            raise InputError(reason)
        return value.to(self.device).contiguous()

    def _output(self, spec: TensorSpec, name: str) -> torch.Tensor:
        shape = tuple(self._context.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            raise NotUsableError(
                f"the size of output {spec.name} depends on the data, which TensorRT can't return"
            )
        result = torch.empty(shape, dtype=spec.torch_dtype, device=self.device)
        self._take(self._context.set_tensor_address(name, result.data_ptr()), f"output {spec.name}")
        return result

    def _execute(self, tensors: list[torch.Tensor]) -> None:
        """Execute on the current stream; the default one forces a synchronization, so a side stream replaces it."""
        current = torch.cuda.current_stream(self.device)
        stream = current if current.cuda_stream else self._stream
        stream.wait_stream(current)
        self._take(self._context.execute_async_v3(stream.cuda_stream), "the engine")
        current.wait_stream(stream)
        for tensor in tensors if stream is self._stream else ():
            tensor.record_stream(stream)

    def _take(self, done: bool, what: str) -> None:
        if not done:
            raise NotUsableError(
                f"TensorRT refuses {what}", hint="It may lie outside the sizes the engine was built for"
            )
