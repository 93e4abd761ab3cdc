"""Is there a network? Asked within a second: pip itself tries for minutes before it gives up."""

import configparser
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from gpukit.machine.world import World

# Two well-known name servers, by their addresses: looking up a name takes many seconds offline.
_NAME_SERVERS = (("8.8.8.8", 53), ("1.1.1.1", 53))
_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
_CONNECT_SECONDS = 0.8


def has_internet(host: str = "8.8.8.8", port: int = 53, patience_seconds: float = 0.5) -> bool:
    """Whether a well-known name server answers."""
    try:
        with socket.create_connection((host, port), timeout=patience_seconds):
            return True
    except OSError:
        return False


def pip_can_fetch(world: World | None = None) -> bool:
    """Whether pip can reach what it fetches from: its index or proxy where one is set, else the internet.

    At most a second. True without asking where pip was told to use local folders only.
    """
    places = pip_sources(world or World())
    return not places or any_answers(places)


def pip_sources(world: World) -> tuple[tuple[str, int], ...]:
    """(host, port) of what pip connects to first; empty if it needs no network."""
    settings = _pip_settings(world)
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return ()
    index = settings.get("index-url", "")
    if index and "://" in index and urlsplit(index).scheme == "file":
        return ()
    proxies = [settings.get("proxy"), *(world.environ.get(n) for n in ("https_proxy", "HTTPS_PROXY", "ALL_PROXY"))]
    for address in (*proxies, index):
        if address:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            if parts.hostname:
                return ((parts.hostname, parts.port or _PORTS.get(parts.scheme, 443)),)
    return _NAME_SERVERS


def any_answers(places: Iterable[tuple[str, int]], patience_seconds: float = _CONNECT_SECONDS) -> bool:
    """Whether one of them takes a connection within that time, looking up its name included."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    asking = [(*place, patience_seconds, answers) for place in places]
    for arguments in asking:
        # A name that cannot be looked up keeps its thread for a while longer; nobody waits for it.
        threading.Thread(target=_ask, args=arguments, daemon=True).start()
    until = time.monotonic() + patience_seconds
    with contextlib.suppress(queue.Empty):
        return any(answers.get(timeout=max(0.0, until - time.monotonic())) for _ in asking)
    return False


def _ask(host: str, port: int, patience_seconds: float, answers: "queue.SimpleQueue[bool]") -> None:
    answers.put(has_internet(host, port, patience_seconds))


def _pip_settings(world: World) -> dict[str, str]:
    """pip's own settings, those that count more last: its files, then its environment variables."""
    env = world.environ
    files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", f"{world.home}/.pip/pip.conf"]
    files += [f"{env.get('XDG_CONFIG_HOME') or f'{world.home}/.config'}/pip/pip.conf", f"{sys.prefix}/pip.conf"]
    if env.get("PIP_CONFIG_FILE"):
        files = [] if env["PIP_CONFIG_FILE"] == os.devnull else [*files, env["PIP_CONFIG_FILE"]]
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(world.read(file) or "")
        except configparser.Error:  # pip will complain of it in its own words
            continue
        for section in ("global", "install"):
            found |= dict(parser[section]) if parser.has_section(section) else {}
    names = {"PIP_NO_INDEX": "no-index", "PIP_INDEX_URL": "index-url", "PIP_PROXY": "proxy"}
    return found | {key: env[name] for name, key in names.items() if env.get(name)}
