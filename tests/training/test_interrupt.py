"""Ctrl-C between steps."""

import signal
import threading

import pytest

from gpukit.training.interrupt import stop_after_step


def test_the_first_interrupt_asks_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with stop_after_step() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_interrupt_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_after_step():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_is_touched():
    seen = []

    def work():
        with stop_after_step() as stop:
            seen.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_after_step() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGINT, before)
