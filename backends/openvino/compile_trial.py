"""Process that reads and compiles the file of a model, because OpenVINO ends its process on some graphs.

Arguments: the parent's id, then the file and properties for `compile_model` as JSON. `model.require_compilable` is the
other side. It imports no torch, so that it starts in a moment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from infer.process.child import confine, end_with_parent


def main(parent: int, path: str, properties: dict[str, Any]) -> int:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    end_with_parent(parent)
    confine()  # no core file
    openvino.Core().compile_model(path, "CPU", properties)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *json.loads(sys.argv[2])))
