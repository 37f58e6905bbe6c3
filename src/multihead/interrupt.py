"""Ctrl-C that ends a process at once, also while it computes inside C code that never looks at Python."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

EXIT_CODE = 130  # 128 + SIGINT, what shells expect
_GRACE_SECONDS = 0.3
_SHOW_CURSOR = "\x1b[?25h"


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process with code 130 shortly after Ctrl-C, whatever the main thread does inside the block.

    Python raises KeyboardInterrupt only between two bytecodes. That comes first, so that `finally` blocks run; a
    thread that the signal wakes ends the process if that has not. Outside the main thread nothing is set up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wakes, signalled = os.pipe()
    os.set_blocking(signalled, False)
    before = signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    threading.Thread(target=_end_when_signalled, args=(wakes,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(signalled)


def _end_when_signalled(wakes: int) -> None:
    while received := os.read(wakes, 1):
        if received[0] == signal.SIGINT:
            time.sleep(_GRACE_SECONDS)
            if sys.stderr.isatty():
                os.write(2, f"{_SHOW_CURSOR}\n".encode())
            os._exit(EXIT_CODE)
    os.close(wakes)
