# SPDX-License-Identifier: Apache-2.0
"""Ray Serve's own switches that decide the framework's share of the time to first token.

Serve reads them from the environment when its processes start: replicas get them through their runtime environment;
proxies and the controller inherit them from whoever starts Ray, which is what `tune` is for (on a cluster: set them
where `ray start` runs).
"""

from __future__ import annotations

import os

REPLICA_ENVIRONMENT: dict[str, str] = {}


def tune() -> None:
    """Set the switches that are not set, for the Ray that this process is about to start."""
    for name, value in REPLICA_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
