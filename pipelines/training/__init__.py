# SPDX-License-Identifier: Apache-2.0
"""Training a repair network: token groups, pairs of stale and joint KV, statistics, updates, validation, state."""
