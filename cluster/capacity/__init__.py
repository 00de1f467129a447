# SPDX-License-Identifier: Apache-2.0
"""How many GPUs, how much storage and network: a discrete-event simulation, fitted on a measurement, then asked."""
