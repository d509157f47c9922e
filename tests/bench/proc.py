"""What /proc says of a process."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on. Raises OSError where the process has gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, user and system, all its threads."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
