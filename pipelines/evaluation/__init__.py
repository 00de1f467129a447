# SPDX-License-Identifier: Apache-2.0
"""Comparing repair methods: errors, quality, cost, and the tables and figures of them."""
