# SPDX-License-Identifier: Apache-2.0
"""Load test over HTTP: closed loop, open loop and ramps; per-request rows, a summary, charts and comparisons.

Vocabulary: *closed loop* keeps C requests outstanding and sends the next when one completes; *open loop* sends at
random times that do not wait for the service, so that queueing collapse is seen; *goodput* counts only what met the
objective. All times are the client's, from one monotonic clock: what a request waits for anywhere counts.
"""
