# SPDX-License-Identifier: Apache-2.0
"""Switches of the replicas' environment: those of Ray Serve decide the framework's share of the time to first token.

Serve reads them from the environment when its processes start: replicas get them through their runtime environment;
proxies and the controller inherit them from whoever starts Ray, which is what `tune` is for (on a cluster: set them
where `ray start` runs).

Two more switches are left to the operator. `RAY_SERVE_ENABLE_HA_PROXY=1` puts HAProxy (bundled with `ray[serve]` on
Linux) in the place of Serve's Python proxy, the largest share of what is left; it listens on all interfaces and on
fixed ports, which a default must not. `RAY_SERVE_USE_GRPC_BY_DEFAULT` stays off: hand-offs across nodes travel as
object references, which Serve's gRPC transport cannot carry, and its ports take pickles from whoever reaches them.
"""

from __future__ import annotations

import os

REPLICA_ENVIRONMENT: dict[str, str] = {
    # One event loop per replica instead of three, to save switches of thread. What each switch here gains has not been
    # measured on a quiet machine yet: `python -m benchmarks.framework` does.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Start-up objects are most of the heap: the collector need not walk them while a user waits.
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
    # vLLM, when imported, configures logging anew, which cuts Serve's handler off from its file for good.
    "VLLM_CONFIGURE_LOGGING": "0",
}


def tune() -> None:
    """Set the switches that are not set, for the Ray that this process is about to start."""
    for name, value in REPLICA_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
