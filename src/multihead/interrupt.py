"""Ctrl-C that ends a process at once, also while it computes inside C code that never looks at Python."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130  # 128 + SIGINT, what shells expect
_GRACE_SECONDS = 0.3
_SHOW_CURSOR = "\x1b[?25h"


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process with code 130 on Ctrl-C, whatever the main thread does inside the block.

    Python's own handler runs only between two bytecodes of the main thread, so a second thread, which the
    signal wakes, ends the process where that takes too long. Outside the main thread nothing is set up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wakes, signalled = os.pipe()
    os.set_blocking(signalled, False)
    handler = signal.signal(signal.SIGINT, _end)
    wakeup = signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    threading.Thread(target=_end_when_signalled, args=(wakes,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        os.close(signalled)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Inside `ending_at_once`, let Ctrl-C run the `finally` parts of the block first, for a moment.

    It is raised as KeyboardInterrupt, which some code turns into other errors, and some libraries do not
    survive while they load: keep it to work that leaves something to clean up.
    """
    handler = signal.getsignal(signal.SIGINT)
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if handler is not _end:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if interrupted:
            _end()
        signal.signal(signal.SIGINT, handler)


def _end_when_signalled(wakes: int) -> None:
    while received := os.read(wakes, 1):
        if received[0] == signal.SIGINT:
            time.sleep(_GRACE_SECONDS)
            _end()
    os.close(wakes)


def _end(*_: object) -> NoReturn:
    if sys.stderr.isatty():
        os.write(2, f"{_SHOW_CURSOR}\n".encode())
    os._exit(EXIT_CODE)
