"""Fetching with patience: servers that answer, lag, break off or never answer. No network is used."""

import io
import threading
import urllib.error

import pytest

from gpukit.errors import DataError
from gpukit.training.fetch import CHUNK_BYTES, fetch

URL = "https://data.example/file.tar.gz"
CONTENT = bytes(range(256)) * 4096  # four chunks


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Answer(io.BytesIO):
    """A server's answer whose every chunk takes `seconds` on the clock."""

    def __init__(self, content, clock=None, seconds=0.0, length=None):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content) if length is None else length)}
        self.clock, self.seconds = clock, seconds

    def read(self, size=-1):
        if self.clock is not None:
            self.clock.now += self.seconds
        return super().read(size)


def serve(answer):
    return lambda url, timeout: answer


def test_the_content_comes_whole():
    assert fetch(URL, patience_seconds=5, open_url=serve(Answer(CONTENT))) == CONTENT


def test_a_server_that_does_not_tell_the_length_is_fine():
    answer = Answer(CONTENT)
    answer.headers = {}
    assert fetch(URL, patience_seconds=5, open_url=serve(answer)) == CONTENT


def test_a_download_that_breaks_off_is_an_error():
    with pytest.raises(DataError, match=r"not whole.*1,048,576 of 2,000,000"):
        fetch(URL, patience_seconds=5, open_url=serve(Answer(CONTENT, length=2_000_000)))


def test_no_network_is_an_error_at_once_that_names_the_reason():
    def unreachable(url, timeout):
        raise urllib.error.URLError(OSError(101, "Network is unreachable"))

    with pytest.raises(DataError, match=r"data\.example cannot be reached.*Network is unreachable") as caught:
        fetch(URL, patience_seconds=60, open_url=unreachable)
    assert isinstance(caught.value.__cause__, urllib.error.URLError)


def test_a_server_that_never_answers_costs_no_more_than_the_patience():
    never = threading.Event()

    def silent(url, timeout):
        never.wait(30)
        return Answer(b"")

    try:
        with pytest.raises(DataError, match=r"No answer within 0\.01 s"):
            fetch(URL, patience_seconds=0.01, open_url=silent)
    finally:
        never.set()


def test_a_slow_download_is_abandoned_before_the_patience_is_over():
    clock = Clock()
    with pytest.raises(DataError, match=r"too slow.*262,144 of 1,048,576 bytes came in 5\.0 s"):
        fetch(URL, patience_seconds=8, open_url=serve(Answer(CONTENT, clock, seconds=5.0)), clock=clock)


def test_an_abandoned_download_is_read_no_further():
    clock, go_on, closed = Clock(), threading.Event(), threading.Event()

    class Endless(Answer):
        reads = 0

        def read(self, size=-1):
            self.reads += 1
            if self.reads > 1:
                go_on.wait(30)
            return super().read(size) if self.reads < 50 else b""

        def close(self):
            closed.set()

    answer = Endless(CONTENT * 20, clock, seconds=5.0)
    with pytest.raises(DataError, match="too slow"):
        fetch(URL, patience_seconds=8, open_url=serve(answer), clock=clock)
    go_on.set()
    assert closed.wait(30)
    assert answer.reads == 2, "the one that was under way"


def test_a_download_in_time_at_a_steady_pace_is_kept():
    clock = Clock()
    chunks = len(CONTENT) // CHUNK_BYTES + 1
    content = fetch(URL, patience_seconds=8, open_url=serve(Answer(CONTENT, clock, 6 / chunks)), clock=clock)
    assert content == CONTENT
