"""Stop between steps, not inside one."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Stop:
    asked: bool = False


@contextlib.contextmanager
def stop_after_step() -> Iterator[Stop]:
    """Let Ctrl-C, or a notebook's Stop button, set `asked`, so that the step under way is finished.

    A second one interrupts as usual.
    Signals reach Python's main thread only: in another thread nothing changes.
    """
    stop = Stop()
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    # A process that ignores SIGINT (one started with nohup) goes on ignoring it.
    if before is None or before == signal.SIG_IGN:
        yield stop
        return

    def on_interrupt(signum, frame):
        if stop.asked:
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt
        stop.asked = True

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
