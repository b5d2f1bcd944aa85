"""A GPU that is described, not present: torch and Triton compile for it, nothing can run on it.

AOTInductor asks the card for its properties, loads each kernel once and times it. Inside `described()` the answers come
from `PROPERTIES`, weights are fake tensors, kernels are compiled but neither loaded nor launched, and the first
configuration of a kernel is taken. It can't tell which configuration is fastest, nor that a kernel gives right numbers.
Needs torch's CUDA build, its header wheels and a C++ compiler; no driver.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from infer.graph.program import TorchGraph
from infer.kernels.passes import fragment_fusion

CAPABILITY = (9, 0)
# An H200, as torch describes it.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    total_memory=141 << 30,
    L2_cache_size=50 << 20,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    memory_clock_rate=3_201_000,
    memory_bus_width=6144,
    gcnArchName="",
)


# No second process and no launch of kernels; the wrapper's C++ is compiled for its errors, not for speed.
_SETTINGS = {
    "compile_threads": 1,
    "use_static_triton_launcher": False,
    "shape_padding": False,  # decided by timing
    "joint_graph_constant_folding": False,  # makes tensors on the device
    "always_keep_tensor_constants": True,  # else numbers of small weights, which fakes lack, are written into the code
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


class _Driver:
    """Triton's driver of a card that is not there."""

    binary_ext = "cubin"

    def __init__(self) -> None:
        asked = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
        self.utils = SimpleNamespace(get_device_properties=lambda *_: asked)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def set_current_device(self, device: int) -> None: ...

    def get_device_interface(self) -> Any:
        return torch.cuda


def missing() -> str | None:
    """Return why nothing can be compiled for a described GPU here, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (make cuda-compile has one that is)"
    if torch.cuda.is_available():
        return "a GPU is present: compile for it as usual"
    if not (toolkit() / "include/cuda.h").is_file():
        return f"no CUDA headers in {toolkit()}"
    return None


def toolkit() -> Path:
    """Return the folder of CUDA headers and libraries that the wheels of torch's CUDA build share."""
    return Path(sysconfig.get_paths()["purelib"]) / "nvidia" / f"cu{(torch.version.cuda or '').split('.')[0]}"


def with_fake_weights(graph: TorchGraph) -> TorchGraph:
    """Return a copy of a graph whose weights, constants and examples are fake tensors, which need no device."""
    program = graph.exported
    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    assert mode is not None

    def fake(value: Any) -> Any:
        made = mode.from_tensor(value.detach(), static_shapes=True)
        return (
            torch.nn.Parameter(made, requires_grad=False) if isinstance(value, torch.nn.Parameter) else made
        )

    copied = copy.copy(program)
    copied._state_dict = {name: fake(value) for name, value in program.state_dict.items()}
    copied._constants = pytree.tree_map_only(torch.Tensor, fake, dict(program.constants))
    copied._example_inputs = pytree.tree_map_only(torch.Tensor, fake, program.example_inputs)
    return dataclasses.replace(graph, program=copied)


@contextlib.contextmanager
def described() -> Iterator[None]:
    """Let torch and Triton compile for `PROPERTIES`; weights must be fake (`with_fake_weights`)."""
    import triton

    with contextlib.ExitStack() as stack:
        for owner, changes in _answers().items():
            for name, value in changes.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(torch._inductor.config.patch(_SETTINGS))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Nothing is called from it here: the linker only asks that a library of this name exists.
        subprocess.run(
            ["cc", "-shared", "-x", "c", os.devnull, "-o", str(folder / "libcuda.so")],
            check=True,
            capture_output=True,
        )
        changed = {"CUDA_HOME": str(toolkit()), "LIBRARY_PATH": f"{folder}:{toolkit() / 'lib'}"}
        stack.enter_context(mock.patch.dict(os.environ, changed))
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(_Driver())
        stack.callback(lambda: setattr(triton.runtime.driver, "_active", before))
        yield


def _answers() -> dict[Any, dict[str, Any]]:
    """Return what takes the place of questions to a card: object → name → answer."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import graph as lowering
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import fuse_attention
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor
    from triton.compiler.compiler import CompiledKernel

    attention, same, block = (
        fuse_attention._sfdp_init,
        lowering.is_same_tensor,
        PythonWrapperCodegen.generate_and_run_autotune_block,
    )
    said: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "get_device_properties": lambda *_: PROPERTIES,
    }
    private = {
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "_lazy_init": lambda: None,
    }
    private |= {
        "_get_device_properties": lambda *_: PROPERTIES,
        "get_device_capability": lambda *_: CAPABILITY,
    }
    private |= {
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    private |= {"get_device_name": lambda *_: PROPERTIES.name, "device": _NoGuard, "_DeviceGuard": _NoGuard}
    interface = {**said, "get_raw_stream": lambda *_: 0, "get_compute_capability": lambda *_: 90}
    interface |= {"exchange_device": lambda *_: 0, "maybe_exchange_device": lambda *_: 0}
    return {
        torch.cuda: {**said, **private},
        CudaInterface: {name: staticmethod(answer) for name, answer in interface.items()},
        torch._C: {"_cuda_getCurrentRawStream": lambda *_: 0},
        fragment_fusion: {
            "uniform_zero": lambda table: None,
            "is_integers": lambda table: False,
        },  # fake tables have no entries to look at
        fake_tensor: {"init_gpu_context": lambda *_: None},
        # Patterns of attention are made from real tensors; they are the same for each device.
        fuse_attention: {"_sfdp_init": lambda *_: attention(torch.device("cpu"))},
        lowering: {"is_same_tensor": lambda a, b: a is b if _fake(a) or _fake(b) else same(a, b)},
        triton_helpers: {"set_driver_to_gpu": lambda: None},
        CompiledKernel: {"_init_handles": _not_loaded},
        CachingAutotuner: {
            "autotune_to_one_config": lambda self, *_, **__: setattr(self, "launchers", self.launchers[:1])
        },
        PythonWrapperCodegen: {"generate_and_run_autotune_block": lambda self: _on_fakes(block, self)},
    }


class _NoGuard:
    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def _first_configuration(tuner: Any, *_: Any, **__: Any) -> None:
    tuner.launchers = tuner.launchers[:1]


def _not_loaded(kernel: Any) -> None:
    kernel.module = kernel.function = 1
    kernel.n_regs = kernel.n_spills = 0
    kernel.n_max_threads, kernel._run = 1024, lambda *_, **__: None


def _on_fakes(block: Callable[[Any], None], wrapper: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        block(wrapper)
