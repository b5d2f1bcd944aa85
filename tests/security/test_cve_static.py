"""Constructs that shipped code may never hold.

CVE-2025-32444, -29783, -47277, CVE-2024-11041 and their kin: pickle between processes; CVE-2026-27893, -22807: remote
code switched on somewhere; CVE-2026-41523: a check that `python -O` drops.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted([*(ROOT / "infer").rglob("*.py"), *(ROOT / "backends").rglob("*.py"), ROOT / "serve.py"])
WORDS = re.compile(
    r"\b(pickle|dill|marshal|shelve|cloudpickle|joblib)\b|weights_only\s*=\s*False|0\.0\.0\.0|trust_remote_code"
)
# file: (a part of the line, why it may stand)
ALLOWED = {
    "infer/weights/torch_file.py": [
        ("import pickle", "for the name of the exception that torch raises"),
        ("except pickle.UnpicklingError", "torch's weights-only reader refuses with it"),
    ],
    "infer/load/carried_files.py": [("trust_remote_code=False", "said, so that no default can change it")],
    "infer/load/hf_preprocessor.py": [("trust_remote_code=False", "said, so that no default can change it")],
    "infer/load/sources/folder_model.py": [
        ("trust_remote_code=False", "said, so that no default can change it")
    ],
    "infer/load/diffusers_models/open_part.py": [
        ("trust_remote_code=False", "said, so that no default can change it")
    ],
    "infer/pretrained/model.py": [
        ("trust_remote_code: bool = False", "the argument of transformers' own from_pretrained"),
        ("or trust_remote_code", "which its caller set: the same consent as trust_code"),
    ],
    "infer/load/sources/python_sources.py": [("weights_only=False", "behind --trust-code alone")],
}


def code_lines(path: Path) -> list[str]:
    """Without comments and texts that are no arguments: what runs."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return [re.sub(r"(^|\s)#.*", "", line) for line in lines]


def found_in(path: Path) -> list[str]:
    allowed = [part for part, _ in ALLOWED.get(str(path.relative_to(ROOT)), [])]
    texts = re.compile(r'f?"[^"]*"')
    bad = []
    for line in code_lines(path):
        code = texts.sub(lambda text: text[0] if "0.0.0.0" in text[0] else '""', line)  # noqa: S104
        if WORDS.search(code) and not any(part in line for part in allowed):
            bad.append(line.strip())
    return bad


def test_cve_2025_32444_nothing_unpickles_or_opens_to_all() -> None:
    assert not {str(path.relative_to(ROOT)): lines for path in FILES if (lines := found_in(path))}


def test_cve_2025_32444_the_scan_finds_planted_constructs(tmp_path: Path) -> None:
    bad = ["import pickle", "from dill import loads", "torch.load(x, weights_only=False)", 'host = "0.0.0.0"']
    for line in [*bad, "AutoModel.from_pretrained(x, trust_remote_code=True)"]:
        assert WORDS.search(line), line


def test_cve_2025_32444_exceptions_are_still_needed() -> None:
    for name, lines in ALLOWED.items():
        text = (ROOT / name).read_text()
        for part, why in lines:
            assert part in text, f"{name} no longer has {part}: take it from the list"
            assert why


def test_cve_2025_32444_only_the_server_binds_an_address() -> None:
    """Workers are spoken to over inherited descriptors; what ray_app binds is a deployment of Ray's."""
    binding = [
        p.relative_to(ROOT).as_posix()
        for p in FILES
        if re.search(
            r"(?<!signature)\.bind\(|create_server\(", p.read_text()
        )  # those of a call are no address
    ]
    assert [
        name for name in binding if name not in ("infer/serve/http/listener.py", "infer/serve/ray_app.py")
    ] == []


def test_cve_2026_41523_no_check_is_an_assert() -> None:
    """`assert` is for what can't be otherwise; each is listed, and the tables of bad input run under `python -O`."""
    found = [
        f"{path.relative_to(ROOT)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert set(found) <= {"infer/serve/workers/replica.py"}
    assert '"S101"' in (ROOT / "pyproject.toml").read_text()
    assert 'raw_http.process(folder, "-O")' in (ROOT / "tests/serve/http/test_bad_requests.py").read_text()
