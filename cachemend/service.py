# SPDX-License-Identifier: Apache-2.0
"""The service as a child process: `serve run` on a free port, in a Ray cluster of its own, gone without a trace."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from cachemend.client import Client

READY_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 45.0
FORCE_TIMEOUT_S = 5.0
POLL_S = 1.0
SERVE = str(Path(sys.executable).with_name("serve"))
DEPLOY_FAILED = ("DEPLOY_FAILED", "Failed to update the deployments")
"""What Serve logs when it has given an application up; it goes on running without it."""
LOG_LINES = 12


class ServiceStartError(RuntimeError):
    """The service did not become ready; the message has its last log lines and says where the log is."""


@contextmanager
def running_service(
    import_path: str, on_wait: Callable[[float], None], on_stop: Callable[[], None] = lambda: None
) -> Iterator[Client]:
    """Run the Serve application for the length of a `with` block.

    Args:
        import_path: `module:application`.
        on_wait: called about once a second with the seconds waited for the service so far.
        on_stop: called before the service is stopped, however the block ends; stopping takes some seconds.

    Raises:
        ServiceStartError: it ended, or was not ready in `READY_TIMEOUT_S`.
    """
    folder = Path(tempfile.mkdtemp(prefix="cachemend-service-"))
    port = _free_port()
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "cachemend", "route_prefix": "/", "import_path": import_path}],
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    log = folder / "service.log"
    command = [SERVE, "run", "--address", "local", str(folder / "serve.yaml")]
    with _sigterm_unwinds(), log.open("wb") as out:
        # A session of its own keeps the terminal's Ctrl-C away from it: it ends in order, when this block does.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        )
        keep_log = False
        try:
            client = Client(f"http://127.0.0.1:{port}")
            _wait_until_ready(client, process, log, on_wait)
            yield client
        except Exception:
            keep_log = True  # it says why
            raise
        finally:
            on_stop()
            with _undisturbed():
                stop_tree(process, STOP_TIMEOUT_S)
            if not keep_log:
                shutil.rmtree(folder)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM end this process by way of its `finally` blocks.

    Set here, next to what must be stopped: `ray.init` installs a handler of its own, in C++, that ends the process on
    the spot, and whoever comes last wins.
    """

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    with _handling({signal.SIGTERM: leave}):
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """An impatient second signal must not leave processes behind."""
    with _handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_tree(process: subprocess.Popen[bytes], timeout_s: float) -> list[str]:
    """End a process by SIGINT and make sure that none of its descendants outlives it.

    Args:
        process: the root; it must have been started by this process.
        timeout_s: how long the family may take to end in order, in seconds.

    Returns:
        Names of the family's members that had to be ended by force.
    """
    # Listed while the tree is whole: members whose parent ends first are orphans and could not be found any more.
    try:
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    alive = _wait_gone(family, timeout_s)
    forced = [name for name in map(_name, alive) if name]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for survivor in alive:
            with suppress(psutil.NoSuchProcess):
                end(survivor)
        alive = _wait_gone(alive, FORCE_TIMEOUT_S)
    process.wait(timeout=FORCE_TIMEOUT_S)
    return forced


def _wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until the processes have ended; return those that have not."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _name(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def _name(process: psutil.Process) -> str | None:
    """The name of a process that runs; None for one that has ended, whether or not its parent has noticed."""
    try:
        return process.name() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _wait_until_ready(
    client: Client, process: subprocess.Popen[bytes], log: Path, on_wait: Callable[[float], None]
) -> None:
    started = time.monotonic()
    while not client.ready():
        waited = time.monotonic() - started
        lines = log.read_text(errors="replace").splitlines()
        if process.poll() is not None:
            what = "ended by itself"
        elif any(sign in line for line in lines for sign in DEPLOY_FAILED):
            what = "could not be deployed"
        elif waited > READY_TIMEOUT_S:
            what = f"was not ready after {waited:.0f} s"
        else:
            on_wait(waited)
            time.sleep(POLL_S)
            continue
        tail = "\n".join(f"  {line}" for line in lines[-LOG_LINES:])
        raise ServiceStartError(f"the service {what}. The last lines of {log}:\n{tail}")


def _environment() -> dict[str, str]:
    environment = dict(os.environ, RAY_USAGE_STATS_ENABLED="0", RAY_COLOR_PREFIX="0", PYTHONUNBUFFERED="1")
    environment.pop("RAY_ADDRESS", None)
    # Ray runs its workers at lower priority than everything else on the machine. Here they are what the user waits for.
    environment.setdefault("RAY_worker_niceness", "0")
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
