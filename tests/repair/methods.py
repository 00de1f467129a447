# SPDX-License-Identifier: Apache-2.0
"""The shared test matrix: one row per repair method."""

METHODS = ["full", "stale"]
