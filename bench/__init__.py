"""Benchmarks, one package per subject; run as `python -m bench.FOLDER.NAME` from the repository root."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "models"))  # the example models: `import minilm`
