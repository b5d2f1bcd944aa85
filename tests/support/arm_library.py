"""Loading of the ARM library of kernels under an emulator, with an empty stand-in for torch.

    python -m tests.support.arm_library dist/aarch64/infer-*.whl

`make wheel-aarch64` runs it. Every symbol has to be found, or the dynamic linker refuses the library, which then says
which instruction sets it has for the emulated CPU. Its kernels compute under the same emulator in `test_native_arm.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import zipfile
from pathlib import Path

from infer.kernels.cpu import compile_library

COMPILER, NAMES, EMULATOR = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-nm", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
LARGEST = 6_000_000  # bytes of a wheel
PROGRAM = """
#include <dlfcn.h>
#include <cstdio>
int main(int count, char** given) {
  void* const library = dlopen(given[1], RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return std::fprintf(stderr, "%s\\n", dlerror()), 1;
  const auto isas = reinterpret_cast<const char* (*)()>(dlsym(library, "infer_isas"));
  if (isas == nullptr) return std::fprintf(stderr, "no infer_isas\\n"), 1;
  std::puts(isas());
}
"""


def undefined(library: Path) -> set[str]:
    """Return the names of the symbols that a library takes from others, without versions."""
    listed = run([NAMES, "--dynamic", "--undefined-only", str(library)])
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}


def load(library: Path, work: Path) -> list[str]:
    """Load a library under the emulator and return its instruction sets, best first.

    Raises `RuntimeError` with what the dynamic linker says.
    """
    names = sorted(name for name in undefined(library) if name.startswith(("aoti_", "torch_")))
    stand_in, source, program = work / compile_library.TORCH_LIBRARY, work / "torch.cpp", work / "program"
    source.write_text("".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in names))
    run([COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{stand_in.name}", str(source), "-o", str(stand_in)])
    (work / "program.cpp").write_text(PROGRAM)
    # The program needs the stand-in, because a library that was not linked against torch does not name it.
    needed = ["-Wl,--no-as-needed", str(work / "program.cpp"), str(stand_in), "-ldl"]
    run([COMPILER, "-fopenmp", *needed, "-o", str(program)])
    emulated = [EMULATOR, "-cpu", "max", "-L", SYSROOT, "-E", f"LD_LIBRARY_PATH={work}:{SYSROOT}/lib"]
    return run([*emulated, str(program), str(library)]).strip().split(",")


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} exited {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    if (size := wheel.stat().st_size) > LARGEST:
        raise SystemExit(f"{wheel.name} has {size:,} bytes, {LARGEST:,} are allowed")
    with tempfile.TemporaryDirectory(prefix="arm-") as place:
        inside = f"infer/kernels/cpu/{compile_library.LIBRARY}"
        library = Path(zipfile.ZipFile(wheel).extract(inside, place))
        try:
            isas = load(library, Path(place))
        except RuntimeError as error:
            raise SystemExit(f"{wheel.name} can't be loaded: {error}") from error
    if isas[0] != "neon_dotprod":
        raise SystemExit(f"{wheel.name} has no dot-product kernels: {isas}")
    print(f"{wheel.name}: {size:,} bytes, loaded under {EMULATOR}, instruction sets {', '.join(isas)}")


if __name__ == "__main__":
    main()
