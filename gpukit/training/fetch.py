"""Fetch a file into memory within a given patience, or say why not. Nothing half-written can stay behind."""

import queue
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from gpukit.errors import DataError

# A server that answers does so within this; a notebook without internet need not wait longer.
ANSWER_SECONDS = 2.0
CHUNK_BYTES = 1 << 18


def fetch(
    url: str,
    *,
    patience_seconds: float,
    open_url: Callable[..., Any] = urllib.request.urlopen,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """The content of `url`. Raises DataError when it cannot come within `patience_seconds`.

    It gives up early: after `ANSWER_SECONDS` without an answer, and, a quarter into the patience, when at the speed so
    far not even half would come in time.
    """
    host = urllib.parse.urlsplit(url).hostname
    began = clock()
    deadline = began + patience_seconds
    parts: queue.SimpleQueue = queue.SimpleQueue()
    abandoned = threading.Event()

    # In a thread, because looking up a host name without a network can take far longer than any timeout says.
    def receive():
        def put(part):
            parts.put((part, clock() - began))

        try:
            with open_url(url, timeout=patience_seconds) as answer:
                put(int(answer.headers.get("Content-Length") or 0))
                while not abandoned.is_set() and (part := answer.read(CHUNK_BYTES)):
                    put(part)
            put(b"")
        except Exception as error:  # handed over: raised again below
            put(error)

    def next_part(until: float) -> tuple[Any, float]:
        try:
            part, seconds = parts.get(timeout=max(0.0, until - clock()))
        except queue.Empty:
            return None, until - began
        if isinstance(part, Exception):
            reason = getattr(part, "reason", None) or part
            raise DataError(f"{host} cannot be reached.", f"{type(part).__name__}: {reason}.") from part
        return part, seconds

    threading.Thread(target=receive, name="gpukit-fetch", daemon=True).start()
    try:
        total, seconds = next_part(min(deadline, began + ANSWER_SECONDS))
        if total is None:
            raise DataError(f"{host} cannot be reached.", f"No answer within {seconds:g} s.")
        content = bytearray()
        while True:
            part, seconds = next_part(deadline)
            if part == b"":
                break
            content += part or b""
            in_time = len(content) * patience_seconds / seconds if seconds > patience_seconds / 4 else total
            if part is None or in_time < total / 2 or seconds > patience_seconds:
                came = f"{len(content):,} of {total:,} bytes came in {seconds:.1f} s."
                raise DataError(f"The download from {host} is too slow.", came)
    finally:
        abandoned.set()
    if len(content) < total:
        came = f"It broke off after {len(content):,} of {total:,} bytes."
        raise DataError(f"The download from {host} is not whole.", came)
    return bytes(content)
