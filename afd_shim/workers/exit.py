"""How a worker that cannot go on ends its server, whatever executor of vLLM's runs it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading

__all__ = ["end_server"]

_GRACE_S = 0.5
"""Time for the main thread to raise its own error to the client that is waiting."""


def end_server(error: BaseException, logger: logging.Logger) -> None:
    """Log why, and end this process if it is one of a server's.

    vLLM's multiprocess executor sees a worker process end; its single-process executor runs the
    worker inside EngineCore and listens to no failure callback, but the API server sees EngineCore
    end; other executors are refused. Ending the process therefore ends the server under both, and
    fails what is in flight. In a caller's own process (the in-process engine) nothing is ended: the
    next exchange raises.

    Called from a thread that is not the main one.
    """
    logger.critical("AFD: %s: %s", type(error).__name__, error)
    if multiprocessing.parent_process() is None:
        return
    threading.Event().wait(_GRACE_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
