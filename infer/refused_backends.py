"""Names of torch.compile's backends that are no backends here: the reason, and which one to use instead."""

from __future__ import annotations

from .errors import UsageError

_ONNXRUNTIME = "torch no longer has an ONNX Runtime backend; ONNX Runtime itself is here", "ort"
_TENSORRT = "TensorRT is here without the package torch-tensorrt", "trt"
_EAGER = "a tool to debug torch.compile, which runs operators one by one", "eager"
_NVFUSER = "torch.compile dropped nvFuser in 2023 for inductor's Triton kernels", "inductor"
_CUDAGRAPHS = (
    "replays kernels without fusing them; infer records CUDA graphs of decode steps itself",
    "inductor",
)
_TVM = "Apache TVM is not called by infer", "inductor"
_XLA = "XLA compiles for TPUs, on which infer does not run", "inductor"
_TORCHSCRIPT = "TorchScript is deprecated in torch", "inductor"

# Name → (reason, backend to use).
REPLACEMENTS: dict[str, tuple[str, str]] = {
    "onnxrt": _ONNXRUNTIME,
    "onnxruntime": ("ONNX Runtime goes by a shorter name", "ort"),
    "tensorrt": _TENSORRT,
    "torch_tensorrt": _TENSORRT,
    "torch2trt": ("torch2trt is not called by infer; TensorRT itself is here", "trt"),
    "fx2trt": ("the FX frontend of torch-tensorrt is legacy; TensorRT itself is here", "trt"),
    "ipex": ("Intel Extension for PyTorch has ended; its kernels are in torch and OpenVINO", "openvino"),
    "cudagraphs": _CUDAGRAPHS,
    "aot_cudagraphs": _CUDAGRAPHS,
    "tvm": _TVM,
    "tvm_meta_schedule": _TVM,
    "ansor": _TVM,
    "hidet": ("hidet was archived in 2026", "inductor"),
    "nvfuser": _NVFUSER,
    "nvprims_nvfuser": _NVFUSER,
    "aot_nvfuser": _NVFUSER,
    "aot_ts_nvfuser": _NVFUSER,
    "ofi": ("optimize_for_inference was a pass over TorchScript, which is deprecated in torch", "inductor"),
    "openxla": _XLA,
    "openxla_eval": _XLA,
    "torchxla": _XLA,
    "torchxla_trace_once": _XLA,
    "ts": _TORCHSCRIPT,
    "aot_ts": _TORCHSCRIPT,
    "torchscript": _TORCHSCRIPT,
    "static_runtime": _TORCHSCRIPT,
    "aot_eager": _EAGER,
    "aot_eager_decomp_partition": _EAGER,
    "aot_eager_decomp_partition_crossref": _EAGER,
    "aot_eager_decomp_partition_with_mode": _EAGER,
    "aot_eager_default_partitioner": _EAGER,
    "eager_debug": _EAGER,
    "eager_noexcept": _EAGER,
    "invoke_subgraph": _EAGER,
    "pre_dispatch_eager": _EAGER,
}


def refusal(name: str) -> UsageError | None:
    """Return the `UsageError` for a torch.compile backend that infer lacks, or None for any other name."""
    found = REPLACEMENTS.get(name)
    if found is None:
        return None
    reason, other = found
    return UsageError(f"no backend named {name!r}: {reason}", hint=f"Use --backend {other}")
