"""Fused layers under AVX-512 and under emulated tiles of AMX: prints whether their results are equal to the last bit.

A program of its own, because a process loads one native library and this one is built with another definition.
"""

from __future__ import annotations

import torch

from infer.kernels import cpu
from infer.kernels.cpu import compile_library
from infer.kernels.passes import prepack
from tests.kernels import test_fused_decoder_layers as decoders
from tests.kernels import test_fused_encoder_layers as encoders


def agree(results: list[torch.Tensor]) -> str:
    first, *others = results
    return "equal" if all(torch.equal(first, other) for other in others) else "not equal"


def main() -> None:
    machines, flags = compile_library.SUFFIXES["_amx"]
    compile_library.SUFFIXES["_amx"] = machines, (*flags, "-DINFER_AMX_EMULATED")
    cpu.load()
    torch.manual_seed(0)
    encoder = encoders.exported(encoders.Encoder("square"))
    x, real = encoders.inputs(2, 40)
    step, shape = decoders.step_of("llama")
    ids, last = torch.randint(3, decoders.VOCABULARY, (20,)), torch.arange(20)
    encoded, decoded = [], []
    for name in ("avx512_vnni", "amx_emulated"):
        cpu.use_isa(name)
        encoded.append(encoders.run(prepack.packed(encoder), x, real))
        decoded.append(decoders.Running(prepack.packed(step), shape, 1)(ids, (20,), last))
    print("encoder", agree(encoded), "decoder", agree(decoded))


if __name__ == "__main__":
    main()
