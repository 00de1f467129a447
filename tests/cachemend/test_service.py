# SPDX-License-Identifier: Apache-2.0
"""Ending the service ends its whole family, the stubborn and the orphaned included."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cachemend import service
from tests.processes import alive, family_of

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}])
print("up", flush=True)
time.sleep(600)
"""
SLEEPER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]; time.sleep(600)"
)


def start(child: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(child=child)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    time.sleep(0.3)  # the child installs its signal handlers
    return process, family_of(process.pid)[1:]


@pytest.mark.parametrize("child", [SLEEPER, STUBBORN], ids=["orphan", "stubborn"])
def test_descendants_do_not_outlive_the_service(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FORCE_TIMEOUT_S", 1.0)
    process, children = start(child)
    assert len(children) == 1
    forced = service.stop_tree(process, timeout_s=1.0)
    assert process.poll() is not None
    assert not alive(children[0])
    assert len(forced) == 1  # it did not go by itself, and that is told


def test_stopping_what_is_gone_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert service.stop_tree(process, timeout_s=1.0) == []


def test_a_service_that_dies_is_reported_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "serve"
    fake.write_text(f"#!{sys.executable}\nprint('the store belongs to another target')\n")
    fake.chmod(0o755)
    monkeypatch.setattr(service, "SERVE", str(fake))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(service.ServiceStartError, match="the store belongs to another target"),
        service.running_service("serve_app:app", lambda _: None),
    ):
        pass
    assert list(tmp_path.glob("cachemend-service-*/service.log"))  # kept: it says why


def test_ctrl_c_stops_the_service_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "serve"
    fake.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    fake.chmod(0o755)
    monkeypatch.setattr(service, "SERVE", str(fake))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told: list[str] = []

    def interrupt(waited: float) -> None:
        raise KeyboardInterrupt

    before = len(family_of())
    with (
        pytest.raises(KeyboardInterrupt),
        service.running_service("serve_app:app", interrupt, lambda: told.append("stopping")),
    ):
        pass
    assert told == ["stopping"]
    assert len(family_of()) == before
    assert list(tmp_path.glob("cachemend-service-*")) == []


def test_sigterm_stops_the_service_whatever_handler_was_there_before(tmp_path: Path) -> None:
    fake = tmp_path / "serve"
    fake.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    fake.chmod(0o755)
    script = """
import signal, sys
from cachemend import service
service.SERVE = sys.argv[1]
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray leaves it: the process ends on the spot
with service.running_service("serve_app:app", lambda waited: print("waiting", flush=True)):
    pass
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(fake)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"waiting\n"
    [child] = family_of(process.pid)[1:]
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert not alive(child)
