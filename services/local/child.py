"""The first lines of a child process: `python -m services.local.child FOLDER MODULE ARGUMENT…`.

The child's standard input is a pipe that the parent holds open and never writes to. When the
parent ends, in whatever way, the pipe closes and the child ends itself: first as SIGTERM asks, then
at once. The kernel's own parent-death signal would do neither on other systems nor where the
parent starts children from a thread, and it needs code between fork and exec, which gRPC forbids.

FOLDER holds the sockets. Where the parent was killed, the last child to end removes it.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time

PATIENCE_S = 20.0


def watch_parent(gone: threading.Event) -> None:
    """Ends this process when standard input closes."""
    while os.read(0, 1):
        pass
    gone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os._exit(1)


def main() -> None:
    """Runs MODULE as `python -m MODULE` does, watched."""
    folder, module, *arguments = sys.argv[1:]
    gone = threading.Event()
    threading.Thread(target=watch_parent, args=(gone,), name="watch-parent", daemon=True).start()
    sys.argv[:] = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if gone.is_set():  # else the other roles may be about to make their sockets there
            with contextlib.suppress(OSError):
                os.rmdir(folder)


if __name__ == "__main__":
    main()
