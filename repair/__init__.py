# SPDX-License-Identifier: Apache-2.0
"""The repair methods, one file each, behind one small interface and one registry."""

from repair.base import RepairedPrefix, Repairer, RepairRequest
from repair.registry import available, create

__all__ = ["RepairRequest", "RepairedPrefix", "Repairer", "available", "create"]
