"""Whether pip could fetch anything is known within a second, and asked of what pip itself would ask."""

import socket
import threading
import time

import pytest

from gpukit.machine import network
from gpukit.machine.network import any_answers, pip_can_fetch, pip_sources

SERVERS = network._NAME_SERVERS


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, {}, SERVERS),
        ({"PIP_INDEX_URL": "https://mirror.example/simple"}, {}, (("mirror.example", 443),)),
        ({"PIP_INDEX_URL": "http://mirror.example:8080/simple"}, {}, (("mirror.example", 8080),)),
        ({"PIP_INDEX_URL": "file:///srv/simple"}, {}, ()),
        ({"PIP_NO_INDEX": "1"}, {}, ()),
        ({"PIP_NO_INDEX": "0"}, {}, SERVERS),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, {}, (("proxy.example", 3128),)),
        ({"https_proxy": "proxy.example:3128"}, {}, (("proxy.example", 3128),)),
        (
            {"HTTPS_PROXY": "http://proxy.example:3128", "PIP_INDEX_URL": "https://mirror.example/simple"},
            {},
            (("proxy.example", 3128),),
        ),
        ({}, {"/etc/pip.conf": "[global]\nindex-url = https://mirror.example/simple"}, (("mirror.example", 443),)),
        ({}, {"/home/jovyan/.config/pip/pip.conf": "[install]\nno-index = true"}, ()),
        (
            {"PIP_INDEX_URL": "https://other.example/simple"},
            {"/etc/pip.conf": "[global]\nindex-url = https://mirror.example/simple"},
            (("other.example", 443),),
        ),
        ({}, {"/etc/pip.conf": "[global\nnonsense"}, SERVERS),
        ({"PIP_CONFIG_FILE": "/dev/null"}, {"/etc/pip.conf": "[global]\nno-index = true"}, SERVERS),
    ],
)
def test_pip_is_asked_for_where_it_would_connect(environ, files, expected, make_world):
    assert pip_sources(make_world(environ=environ, files=files)) == expected


def test_where_pip_needs_no_network_nobody_is_asked(make_world, monkeypatch):
    monkeypatch.setattr(network, "any_answers", lambda *_: pytest.fail("asked"))
    assert pip_can_fetch(make_world(environ={"PIP_NO_INDEX": "1"})) is True


def test_one_that_answers_is_enough():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as other:
            closed = other.getsockname()[1]
        assert any_answers([("127.0.0.1", closed), ("127.0.0.1", port)], 5.0)


def test_where_all_refuse_at_once_nobody_waits(monkeypatch):
    def refuse(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    started = time.perf_counter()
    assert not any_answers([("a", 1), ("b", 2)], 20.0)
    assert time.perf_counter() - started < 10.0
    assert not any_answers([], 20.0)


def test_a_name_that_is_looked_up_for_ever_is_waited_for_less_than_a_second(make_world, monkeypatch):
    held = threading.Event()

    def connect(*_, **__):
        held.wait(30)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    started = time.perf_counter()
    try:
        assert pip_can_fetch(make_world()) is False
        assert time.perf_counter() - started < 1.0
    finally:
        held.set()
