# SPDX-License-Identifier: Apache-2.0
"""The repair methods, one file each, behind one small interface and one registry."""

from repair.base import RepairedPrefix, Repairer, RepairRequest
from repair.checkpoint import load_repairer
from repair.network import RepairNetwork
from repair.registry import available, create

__all__ = ["RepairNetwork", "RepairRequest", "RepairedPrefix", "Repairer", "available", "create", "load_repairer"]
