"""What is measured on, and what else it does at the time."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.proc import TICKS_PER_S

_TELLING = ("avx2", "fma", "f16c", "avx_vnni", "avx512", "amx", "asimd", "sve", "i8mm", "bf16", "fphp")
"""Beginnings of the flags that decide how fast products are."""


def describe(cpuinfo: str | None = None) -> dict[str, Any]:
    """The processor as /proc/cpuinfo has it, cores that this process may use, and memory."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    fields = dict(_pairs(text))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    family = f"family {fields['cpu family']}, model {fields['model']}" if "cpu family" in fields else ""
    return {
        "cpu": fields.get("model name", platform.machine()),
        "family": family,
        "cores": len(os.sched_getaffinity(0)),
        "cache": fields.get("cache size", ""),
        "flags": [flag for flag in flags if flag.startswith(_TELLING)],
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _pairs(text: str) -> list[tuple[str, str]]:
    """Of the first processor."""
    lines = (line.partition(":") for line in text.split("\n\n", maxsplit=1)[0].splitlines())
    return [(name.strip(), value.strip()) for name, _, value in lines]


@dataclass(frozen=True, slots=True)
class Clock:
    """CPU seconds of the whole machine since it started."""

    busy_s: float
    stolen_s: float
    """What the host gave to other machines meanwhile."""

    @classmethod
    def now(cls) -> Clock:
        """Reads /proc/stat."""
        names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
        values = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
        of = dict(zip(names, values, strict=False))
        busy = sum(of[name] for name in ("user", "nice", "system", "irq", "softirq"))
        return cls(busy / TICKS_PER_S, of.get("steal", 0) / TICKS_PER_S)


def load() -> float:
    """Processes that want to run, mean of the last minute."""
    return round(os.getloadavg()[0], 2)
