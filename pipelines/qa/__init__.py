# SPDX-License-Identifier: Apache-2.0
"""Question answering over data sets: rows, metrics, inputs, and the batch job."""
