"""Installs a torch that fits this machine into the environment that runs this: CUDA wheels only where a GPU is.

PyTorch's wheels on PyPI bring gigabytes of CUDA libraries on x86-64 Linux. Without an NVIDIA GPU they are dead
weight, so what pip would install is looked at first, and PyTorch's own CPU index is used when CUDA comes along.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

SUPPORTED = "torch>=2.11,<3"
CPU_TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def fitting_torch_installed() -> bool:
    """Whether this environment already has a supported torch."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (2, 11) <= (int(major), int(minor)) < (3, 0)


def nvidia_gpu() -> bool:
    """Whether the NVIDIA driver is loaded, or nvidia-smi answers (as in a container)."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True).returncode == 0


def packages_of(requirement: str) -> list[str]:
    """Packages that pip would install for `requirement`, without installing anything. [] when it cannot say."""
    command = [*PIP, "install", "-qq", "--dry-run", "--report", "-", requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return []
    return [item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]]


def pip_arguments() -> list[str]:
    """The arguments of `pip install` that give this machine its torch."""
    if nvidia_gpu():
        return [SUPPORTED]
    packages = packages_of(CPU_TORCH)
    if packages and not any(name.startswith(CUDA_PREFIXES) for name in packages):
        return [CPU_TORCH]
    return [CPU_TORCH, "--index-url", CPU_INDEX]


def main() -> int:
    if fitting_torch_installed():
        return 0
    arguments = pip_arguments()
    print(f"Installing {' '.join(arguments)} ...", flush=True)
    return subprocess.run([*PIP, "install", "-qq", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())
