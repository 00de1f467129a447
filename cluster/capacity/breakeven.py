# SPDX-License-Identifier: Apache-2.0
"""After how many requests a repair network has earned what its training cost, as in CacheRepair's Table 22."""

from __future__ import annotations


class NothingSavedError(ValueError):
    """Repair is not faster than full prefill here: it never pays."""


def break_even_requests(one_time_device_hours: float, saving_s: float) -> float:
    """Requests until what they save equals a one-time cost.

    Args:
        one_time_device_hours: training and the statistics pass before it.
        saving_s: device seconds that a repaired request saves against full prefill.

    Raises:
        NothingSavedError: the saving is not positive.
    """
    if saving_s <= 0:
        raise NothingSavedError(f"repair saves {saving_s * 1e3:.1f} ms a request: it never pays")
    return one_time_device_hours * 3600 / saving_s
