"""`triptych gateway|engine|worker|rest`: the same as `python -m services.<role>`, in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

_MODULES = {"rest": "services.gateway.rest"}


def main(command: str, argv: Sequence[str]) -> int:
    """Becomes the role; its own main reads the options and ends the process."""
    module = _MODULES.get(command, f"services.{command}")
    sys.argv[:] = [f"triptych {command}", *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
