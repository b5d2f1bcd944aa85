"""AOTInductor backend: the graph compiled ahead of time into one shared library, weights mapped from the artifact.

On the CPU quantized layers call the native kernels by C functions, on NVIDIA GPUs the Triton kernels are built in
(`kernels.gpu`); without those, and elsewhere, their pure-torch decompositions are compiled. Weights stay packed.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from infer import device as hardware
from infer import kernels, paths
from infer.errors import ArtifactError, NotUsableError
from infer.graph import devices, storage
from infer.graph.program import Graph, flatten
from infer.kernels import cpu
from infer.kernels.cpu import compile_library
from infer.library_errors import first_sentence, quiet
from infer.plan import Plan
from infer.results import Lowered
from infer.spec import Finding

EXECUTES_CODE = True
PORTABLE = False
STEPS = True
COMPILES = True  # lowering takes half a minute: `infer/run/compilation_bounds.py`
LAYERS_AS = "eager"
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
PACKAGE = "compiled/model.pt2"
MODEL, RUNNERS = "model", 1  # in a package: the name of its only model, and how many calls it runs at once
PACKINGS = "compiled/packed.json"
FRAGMENTS = "compiled/fragments.json"
ATTENTION_LENGTH = "compiled/attention_length.json"


def missing() -> str | None:
    if compile_library.compiler() is None:
        return "no C++ compiler, which AOTInductor needs to lower (install g++, or set CXX)"
    return None


def unopenable() -> str | None:
    """Return None: a compiled package is opened without the compiler that made it."""
    return None


def refuses(graph: Graph, plan: Plan) -> str | None:
    return graph.no_program or None


def searched_dtypes() -> tuple[str, ...]:
    """Return the dtypes besides float32 that are fast on this CPU: a search tries them."""
    return ("bfloat16",) if hardware.has_bfloat16() else ()


def target(device: str) -> dict[str, str]:
    """Return the versions and hardware that the compiled library depends on: torch, instruction set, GPU, kernels."""
    marks = {"kernels": cpu.fingerprint()} if device == "cpu" else {}
    return {"torch": str(torch.__version__), **hardware.fingerprint(device), **marks}


def lower(graph: Graph, plan: Plan, folder: Path) -> Lowered:
    import torch._inductor  # takes 2 s: only where something is compiled

    from infer.kernels.passes import fragment_fusion, prepack
    from infer.kernels.passes.fused_program.padding import attention_length
    from infer.kernels.passes.rotary.fusion import fuse_rotary

    package = folder / PACKAGE
    package.parent.mkdir(exist_ok=True)
    settings = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_cpp_only": False,
        "cpp.cxx": (None, compile_library.compiler() or "g++"),  # the one that `missing` found
        "cpp.dynamic_threads": True,  # follow torch.set_num_threads instead of baking in this machine's
        # C functions are the CPU's: operators on a GPU go through torch's dispatcher.
        "aot_inductor.custom_ops_to_c_shims": kernels.c_functions() if plan.device == "cpu" else {},
    }
    # Line tables were more than half of the package of a language model; not every torch has the option.
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
        settings["aot_inductor.enable_line_tables"] = False
    program, findings = graph.exported, []
    if plan.device != "cpu":
        program = devices.moved(program, plan.device)
        if kernels.gpu.packs(plan.device):
            program, fragments = fragment_fusion.plan_fragments(program)
            (folder / FRAGMENTS).write_bytes(msgspec.json.encode(fragments))
            program, rotary = fuse_rotary(program)
            findings = [*fragment_fusion.findings(fragments), *rotary]
    else:
        findings = prepack.findings(program)
        if prepack.usable(program):
            program, packings = prepack.plan_packing(program)
            (folder / PACKINGS).write_bytes(msgspec.json.encode(packings))
            (folder / ATTENTION_LENGTH).write_bytes(msgspec.json.encode(attention_length(program)))
    keep_caches()
    try:
        with quiet():
            on_gpu = plan.device.startswith("cuda")
            program = program.run_decompositions(
                kernels.gpu.in_graph() if on_gpu else kernels.decompositions(sparse=False)
            )
            written = io.BytesIO()  # torch ends the process where a disk is full
            torch._inductor.aoti_compile_and_package(program, package_path=written, inductor_configs=settings)
        package.write_bytes(written.getbuffer())
    except (RuntimeError, torch._inductor.exc.InductorError) as error:
        raise _refusal(error) from error
    size = Finding("lower", "package", package.stat().st_size, "bytes", "AOTInductor, weights outside")
    return Lowered([size, *findings])


def keep_caches() -> None:
    """Put what the compiler caches where later runs find it: its headers alone take 19 s of processor time.

    Torch chooses a folder of the temporary files when it is imported, and those belong to one run.
    """
    from torch._inductor import codecache

    folder = os.environ.get(CACHE_VARIABLE, "")
    if not folder or Path(folder).name.startswith("torchinductor_"):  # torch's own choice
        os.environ[CACHE_VARIABLE] = str(paths.cache("inductor"))
    headers = paths.cache("inductor") / "precompiled_headers"
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")


def _refusal(error: Exception) -> NotUsableError:
    """Return why a graph could not be compiled: the header that is missing, else the compiler's first line."""
    text = str(error).strip() or type(error).__name__
    if header := re.search(r"fatal error: (\S+): No such file or directory", text):
        return NotUsableError(
            f"inductor can't compile this graph: the C++ compiler does not find {header[1]}",
            hint="Install the CUDA toolkit of this torch, or the wheels nvidia-cuda-crt and nvidia-cuda-cccl of its "
            "version, and set CUDA_HOME to the folder whose include/ holds cuda.h",
        )
    return NotUsableError(f"inductor can't compile this graph: {first_sentence(error)}")


def _device_index(device: str) -> int:
    """Return N of `cuda:N`, which a package is loaded on; -1 for the current device."""
    index = torch.device(device).index
    return -1 if index is None else index


class Runner:
    def __init__(self, folder: Path, device: str) -> None:
        from infer.kernels.cpu import weight_layout
        from infer.kernels.gpu import fragment_packing

        signature = storage.load_signature(folder)
        self.inputs, self.outputs, self._device = signature.inputs, signature.outputs, device
        self._weights = storage.load_weights(folder, device)
        self.attention_length: int | None = None
        if (folder / ATTENTION_LENGTH).exists():
            found = (folder / ATTENTION_LENGTH).read_bytes()
            self.attention_length = msgspec.json.decode(found, type=int | None)
        if (folder / PACKINGS).exists():
            cpu.load()  # before the package, which calls it
            packings = msgspec.json.decode(
                (folder / PACKINGS).read_bytes(), type=list[weight_layout.AnyPacking]
            )
            self._weights |= weight_layout.pack(packings, self._weights)
        if (folder / FRAGMENTS).exists():
            fragments = msgspec.json.decode(
                (folder / FRAGMENTS).read_bytes(), type=list[fragment_packing.FragmentPacking]
            )
            self._weights |= fragment_packing.pack(fragments, self._weights)
        with quiet():
            # One thread at a time calls it (the lock below); the events by which it would tell threads apart can't
            # be asked while a CUDA graph is recorded.
            # `torch._inductor.aoti_load_package` does the same, and imports the compiler first: half of the seconds and
            # a hundred megabytes of a process that opens an artifact.
            self._model = torch._C._aoti.AOTIModelPackageLoader(  # type: ignore[attr-defined]
                str(folder / PACKAGE), MODEL, device.startswith("cuda"), RUNNERS, _device_index(device)
            )
        wanted = self._model.get_constant_fqns()
        absent = [name for name in wanted if name not in self._weights]
        if absent:
            raise ArtifactError(f"weights are missing: {', '.join(absent[:5])}", where=str(folder))
        other_copy, all_of_them, ours_to_keep = False, True, True
        constants = {name: self._weights[name] for name in wanted}
        self._model.load_constants(constants, other_copy, all_of_them, ours_to_keep)
        self._order = self._input_order()
        self._lock = threading.Lock()

    def _input_order(self) -> list[str]:
        """Return the input names in the package's order; the package itself takes 0.1 ms per call to find it."""
        call_spec, _ = self._model.get_call_spec()
        named = {spec.keyword: spec.name for spec in self.inputs}
        return list(reorder_kwargs(named, pytree.treespec_loads(call_spec)).values())

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        moved = [inputs[name].to(self._device).contiguous() for name in self._order]
        with self._lock, torch.no_grad():
            outputs = flatten(self._model.boxed_run(moved))
        return dict(zip((o.name for o in self.outputs), outputs, strict=True))

    def close(self) -> None:
        del self._model, self._weights


def open(folder: Path, device: str) -> Runner:
    return Runner(folder, device)
