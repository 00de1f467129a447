# SPDX-License-Identifier: Apache-2.0
"""Where a job's actors run: what each takes, how many fit, and settings that mean the same on every node."""

from __future__ import annotations

from pathlib import Path

import ray

from kvcache.settings import Settings


def for_workers(settings: Settings) -> Settings:
    """The same settings, to mean the same in every worker: absolute paths, and the device of the cluster's nodes.

    The device decides the compute dtype, and that is part of the target's fingerprint: a driver without a GPU must not
    name other objects than its workers write.
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    target = {"model": settings.target.model, "device": settings.target.device}
    if (Path(target["model"]) / "config.json").is_file():
        target["model"] = _absolute(target["model"])
    if target["device"] == "auto":
        target["device"] = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
    return settings.model_copy(
        update={
            "root": _absolute(settings.root),
            "models_dir": _absolute(settings.models_dir),
            "store": settings.store.model_copy(update={"uri": _absolute(settings.store_uri)}),
            "target": settings.target.model_copy(update=target),
        }
    )


def target_actors(settings: Settings) -> tuple[dict[str, float], int]:
    """Resources of one actor that holds the target, and how many of them the cluster has room for.

    Args:
        settings: as `for_workers` gives them.

    Returns:
        `{"num_cpus": ..., "num_gpus": ...}` for Ray, and at most `pipeline.actors`: Ray would wait for ever for more.
    """
    cluster, wanted = ray.cluster_resources(), settings.pipeline.actors
    if settings.target.device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}, max(1, min(wanted, int(cluster.get("GPU", 0))))
    total = int(cluster.get("CPU", 1))
    smallest = min(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    threads = max(1, min(settings.target.threads or total // wanted, smallest))
    return {"num_cpus": threads}, max(1, min(wanted, total // threads))


def _absolute(location: str) -> str:
    return location if "://" in location else str(Path(location).expanduser().absolute())
