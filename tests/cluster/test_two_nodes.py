# SPDX-License-Identifier: Apache-2.0
"""A hand-off crosses nodes of a real Ray cluster, and arrives byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.two_nodes import REQUEST

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_prefix_mended_on_one_node_is_loaded_on_another(tmp_path: Path) -> None:
    # Its own Ray, also where these tests run inside somebody's cluster; one thread: the machine has others' tests too.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cluster.two_nodes", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert len(set(found["nodes"])) == 2 and found["mended_on"] == found["nodes"][0]
    assert found["kind"] == "ray"
    assert found["rows"] == sum(map(len, REQUEST.chunks))
    assert found["got"] == found["wanted"]
