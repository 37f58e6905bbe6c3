"""Where figures come from: the machine's line, and what it can do at best."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core import native
from .shapes import Limit

_PACKAGES = ("multihead", "torch", "onnxruntime", "jax")


@dataclass(frozen=True)
class Machine:
    """The processor, what runs on it, in which versions, and the load of the last minute (None: unknown)."""

    processor: str
    cores: int
    threads: int
    level: str
    versions: dict[str, str]
    load: float | None

    @property
    def busy(self) -> str | None:
        """What to know where others were using the cores when the run began."""
        if self.load is None or self.load < 0.25 * self.cores:
            return None
        return f"the machine is busy (load {self.load:.1f} on {self.cores} cores): the figures say little"

    @classmethod
    def here(cls) -> Machine:
        versions = {"python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        level = native.core.level() if native.core else "not built"
        return cls(_processor(), cores(), torch.get_num_threads(), level, versions, load)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.processor}, {self.cores} cores, {self.threads} threads, level {self.level}; {versions}"


@dataclass(frozen=True)
class Peaks:
    """The most float32 multiply-adds and the most reads from memory that this machine reaches now; None: unknown."""

    gflops: float | None = None
    gbs: float | None = None

    @classmethod
    def measure(cls, seconds: float) -> Peaks:
        """Run the two loops of csrc/peak.cpp for about `seconds` each; both unknown without the compiled core."""
        if native.core is None:
            return cls()
        threads = torch.get_num_threads()
        return cls(native.core.fma_gflops(threads, seconds), native.core.read_gbs(threads, seconds))

    def of(self, limit: Limit) -> float | None:
        """The peak that bounds a section."""
        return self.gflops if limit is Limit.COMPUTE else self.gbs

    def __str__(self) -> str:
        if self.gflops is None or self.gbs is None:
            return "peaks unknown: the compiled core is not built"
        return f"peaks now: {self.gflops:.0f} GFLOP/s of float32 multiply-adds, {self.gbs:.1f} GB/s of reads"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
