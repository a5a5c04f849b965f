"""What this machine can do, and why not more. `python -m lora_bench.engine.doctor` prints it as JSON."""
from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

from .default_model import DEFAULT, cache_dir, cached_default_model
from .memory import container_limit, free_memory

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def examine() -> dict[str, Any]:
    """Plain data, every part answered even if another fails. Imports torch."""
    return {
        "lora_bench": _version("lora-bench"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in ("torch", "triton", "numba", "numpy", "tokenizers", "textual", "pip")},
        "cpu": _cpu(),
        "cpu_kernels": _cpu_kernels(),
        "memory": _memory(),
        "gpu": _gpu(),
        "default_model": _default_model(),
        "sample_run": _sample_run(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": _cpu_model(), "physical_cores": psutil.cpu_count(logical=False), "logical_cores": psutil.cpu_count(),
            "usable_here": usable}


def _cpu_kernels() -> dict[str, Any]:
    """Where those that are compiled on this machine are kept, and whether they are there."""
    try:
        from ..kernels.cpu.compiled import BESIDE, PLACE, is_kept
    except (ImportError, OSError) as error:
        return {"why_none": f"numba cannot be imported: {error}"}
    place = str(PLACE) if PLACE is not None else f"none: neither {BESIDE} nor the user's cache can be written, each start compiles them"
    return {"place": place, "compiled": is_kept("decode_step")}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory() -> dict[str, Any]:
    total, limit = psutil.virtual_memory().total, container_limit()
    facts = {"total_gib": _gib(total), "available_gib": _gib(free_memory())}
    return facts | ({"container_limit_gib": _gib(limit)} if limit and limit < total else {})


def _gib(count: int) -> float:
    return round(count / 2**30, 2)


def _gpu() -> dict[str, Any]:
    driver = _driver()
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"driver": driver, "devices": [], "why_none": f"PyTorch cannot be imported: {error}"}
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return {"driver": driver, "cuda_of_torch": torch.version.cuda,
                "devices": [f"{d.name}, {_gib(d.total_memory)} GiB, compute {d.major}.{d.minor}" for d in devices]}
    return {"driver": driver, "cuda_of_torch": torch.version.cuda, "devices": [], "why_none": _why_no_gpu(torch)}


def _driver() -> str | None:
    try:
        return DRIVER_FILE.read_text(errors="replace").splitlines()[0].removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        return None


def _why_no_gpu(torch: Any) -> str:
    """Every cause that a person would have to remove, and what works all the same."""
    causes = []
    if not DRIVER_FILE.exists():
        causes.append("no NVIDIA driver is loaded on this machine")
    if torch.version.cuda is None:
        causes.append(f"this PyTorch ({torch.__version__}) is built without CUDA")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip("-1, "):
        causes.append(f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU")
    if not causes:
        causes.append(_cuda_error(torch))
    return f"{'; '.join(causes)}. Everything runs on the CPU with the same results, slower."


def _cuda_error(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises RuntimeError, AssertionError or its own kinds here
        return f"CUDA does not start: {str(error).splitlines()[0].rstrip('.')}"
    return "the driver shows no device to this process"


def _default_model() -> dict[str, Any]:
    cached = cached_default_model()
    return {"name": DEFAULT.file_name, "cached": cached is not None, "cache": str(cache_dir()),
            "download_mb": 0 if cached else DEFAULT.wheel_bytes // 10**6}


def _sample_run() -> str:
    """A small product on every device, against the exact answer."""
    try:
        import torch

        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
        for device in devices:
            rows = torch.arange(64, dtype=torch.float32, device=device).repeat(64, 1)
            product = rows @ torch.eye(64, device=device)
            if not torch.equal(product, rows):
                return f"WRONG: a product with the unit matrix on {device} is not the matrix itself"
        return f"ok on {', '.join(devices)}"
    except Exception as error:  # whatever is broken is the answer
        return f"FAILED: {type(error).__name__}: {error}"


def main() -> None:
    print(json.dumps(examine()))


if __name__ == "__main__":
    main()
