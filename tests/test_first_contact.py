"""bench/gpu/first_contact.py without a GPU: parts fail with a reason, go on, and are not repeated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.gpu import first_contact
from bench.gpu.first_contact import Command, Part


def python(code: str, limit: int = 60, name: str = "one") -> Command:
    return Command(name, [sys.executable, "-c", code], limit)


def part(*commands: Command) -> Part:
    return Part("parts", "What happens", lambda folder: list(commands))


def test_a_gpu_check_continues_after_failures_and_reports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "no_device", lambda: None)
    wanted = part(
        python("print('begun'); raise SystemExit('it broke | here')"),
        python("import time; time.sleep(60)", 1, "slow"),
        Command("absent", ["no-such-profiler"], 5),
        python("print('fine')", name="last"),
    )
    first_contact.run_part(wanted, tmp_path)
    found = json.loads((tmp_path / "parts.json").read_text())
    assert [(c["outcome"], c["reason"]) for c in found["commands"]] == [
        ("failed", "exit code 1: it broke | here"),
        ("failed", "stopped after 1 seconds"),
        ("failed", "no-such-profiler is not installed"),
        ("passed", ""),
    ]
    assert first_contact.is_done(wanted, tmp_path)
    page = (tmp_path / "parts.md").read_text()
    assert "| one | failed |" in page
    assert "it broke / here |" in page


def test_gpu_checks_without_a_gpu_stay_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "no_device", lambda: "no CUDA device")
    wanted = part(python("open('ran', 'w')"))
    found = first_contact.run_part(wanted, tmp_path)
    assert [(c["outcome"], c["reason"]) for c in found["commands"]] == [("failed", "no CUDA device")]
    assert not first_contact.is_done(wanted, tmp_path)


def test_finished_gpu_checks_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_contact, "no_device", lambda: None)
    monkeypatch.setattr(first_contact, "PARTS", (part(python("print('fine')")),))
    monkeypatch.setattr(sys, "argv", ["first_contact", "--out", str(tmp_path)])
    assert first_contact.main() == 0
    assert first_contact.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "parts: done before"
    (tmp_path / "parts.json").write_text("{")
    assert not first_contact.is_done(part(), tmp_path)


@pytest.mark.parametrize("wanted", first_contact.PARTS, ids=lambda wanted: wanted.name)
def test_each_gpu_check_fits_into_ten_minutes(wanted: Part, tmp_path: Path) -> None:
    commands = wanted.commands(tmp_path)
    assert sum(command.limit for command in commands) <= 600
    paths = [Path(word) for c in commands for word in c.words if word.startswith("tests/")]
    assert all((first_contact.ROOT / path).exists() for path in paths)
    modules = [c.words[2] for c in commands if c.words[1:2] == ["-m"] and c.words[2].startswith("bench")]
    root = Path(first_contact.ROOT)
    assert all((root / Path(*name.split("."))).with_suffix(".py").exists() for name in modules)
