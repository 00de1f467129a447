# SPDX-License-Identifier: Apache-2.0
"""Every repair method, by name. A method joins the service, batch QA and evaluation by being here."""

from __future__ import annotations

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import Repairer
from repair.cacheblend import CacheBlend
from repair.cacherepair import CacheRepair, network_at_hand
from repair.epic import Epic
from repair.full import FullPrefill
from repair.infoflow import InfoFlow
from repair.kvshare import KVShareLike
from repair.legolink0 import LegoLink0
from repair.prophetkv import ProphetKV
from repair.relaxkv import RelaxKV
from repair.stale import StaleKV

REPAIRERS: dict[str, type[Repairer]] = {
    cls.name: cls
    for cls in (
        FullPrefill,
        StaleKV,
        CacheRepair,
        CacheBlend,
        Epic,
        LegoLink0,
        InfoFlow,
        ProphetKV,
        RelaxKV,
        KVShareLike,
    )
}


class UnknownMethodError(ValueError):
    """A method that is not offered; the text names those that are."""


def available() -> list[str]:
    """Names of all methods."""
    return sorted(REPAIRERS)


def offered(settings: Settings) -> tuple[str, ...]:
    """Names of the methods that the service offers: those of the settings, or the default ones for their target."""
    if settings.repair.methods:
        return settings.repair.methods
    basic = (FullPrefill.name, StaleKV.name)
    return (*basic, CacheRepair.name) if network_at_hand(settings) else basic


def create(name: str, target: TargetLLM, settings: Settings) -> Repairer:
    """Make a repairer.

    Raises:
        UnknownMethodError: no such method.
    """
    if name not in REPAIRERS:
        raise UnknownMethodError(f"unknown method {name!r}; available: {', '.join(available())}")
    return REPAIRERS[name](target, settings)
