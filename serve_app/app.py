# SPDX-License-Identifier: Apache-2.0
"""The Serve application: four deployments, bound.

`serve run serve_app:app` takes the settings file and the environment; `serve run serve_app:build_app
engine.max_num_seqs=32` (or `args:` in a Serve config) overrides single settings. Where HTTP listens belongs to the
cluster, not to one application: `http_options` of the Serve config, or `serve_app.app.run`, which takes it from the
settings.
"""

# No `from __future__ import annotations` here: Ray makes an `AppArgs` of a config's `args` by looking at the class that
# annotates the parameter of `build_app`, and does not resolve a text.
from dataclasses import dataclass
from typing import Any

import ray
import torch
from pydantic import BaseModel, ConfigDict, create_model, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from kvcache.settings import Settings, load_settings
from repair.registry import offered
from serve_app.autoscaling import LOOK_BACK_S, METRICS_S, UPSCALE_DELAY_S
from serve_app.engine import EngineDeployment
from serve_app.errors import RETRY_AFTER_S
from serve_app.ingress import Ingress
from serve_app.metrics import HEALTH_CHECK_S
from serve_app.repairer import RepairerDeployment
from serve_app.retriever import RetrieverDeployment
from serve_app.tuning import REPLICA_ENVIRONMENT, tune

APP_NAME = "cachemend"
UNBOUNDED = 1_000_000
SPARE_INGRESS_SLOTS = 64
"""Requests that an ingress replica accepts beyond its limit, to refuse them itself, and for health checks."""


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Dotted keys (`engine.max_num_seqs`) become nested ones; settings that do not exist are named."""
        nested: dict[str, Any] = {}
        for key, value in dict(data).items():
            *sections, name = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        load_settings(**nested)
        return nested


_fields: dict[str, Any] = {name: (field.annotation | None, None) for name, field in Settings.model_fields.items()}
AppArgs = create_model("AppArgs", __base__=_Args, **_fields)
"""Any part of the settings; what is left out comes from the environment and the settings file."""


def build_app(args: AppArgs) -> serve.Application:  # type: ignore[valid-type]
    """The application for settings with some of them overridden.

    Raises:
        SettingsError: a setting that does not exist (names the nearest) or is out of range.
    """
    return bind(load_settings(**args.model_dump(exclude_unset=True)))


@dataclass(frozen=True)
class Parts:
    """The classes behind the handles. Tests and benchmarks put the mocks of `serve_app.mocks` here."""

    retriever: type = RetrieverDeployment
    repairer: type = RepairerDeployment
    engine: type = EngineDeployment


def bind(settings: Settings, parts: Parts | None = None) -> serve.Application:
    """Bind the four deployments; their names stay the same whatever stands behind them."""
    parts = parts or Parts()
    # Decided once, here: what the ingress lets in is what the repairers have.
    repair = settings.repair.model_copy(update={"methods": offered(settings)})
    settings = settings.model_copy(update={"repair": repair})
    serving = settings.serve
    repair_gpus, engine_gpus = _gpu_shares(settings)
    if 0 < engine_gpus < 1:  # vLLM's share is of a whole GPU: the rest is for what runs beside it
        share = settings.engine.gpu_memory_utilization * engine_gpus
        engine = settings.engine.model_copy(update={"gpu_memory_utilization": share})
        settings = settings.model_copy(update={"engine": engine})

    # The ingress bounds what is in flight and refuses the rest itself, in OpenAI's shape. Serve's own bounds lie above
    # that: its routers count what has only just arrived as queued, and would refuse a burst that there is room for.
    bounded = serving.max_queued_requests >= 0
    in_flight = serving.max_ongoing_requests + serving.max_queued_requests + SPARE_INGRESS_SLOTS

    def part(cls: type, name: str, gpus: float = 0, **options: Any) -> serve.Application:
        limits = (serving.max_ongoing_requests, in_flight if bounded else -1)
        return _deployment(cls, name, settings, limits, gpus, **options).bind(settings)

    by_content = RequestRouterConfig(request_router_class="serve_app.router.ContentRouter")
    scaling = serving.autoscaling
    retriever = part(parts.retriever, "Retriever", num_replicas=serving.retriever_replicas)
    repairers = _replicas(settings, serving.repairer_replicas, scaling.max_repairer_replicas)
    repairer = part(parts.repairer, "Repairer", repair_gpus, request_router_config=by_content, **repairers)
    engines = _replicas(settings, serving.engine_replicas, scaling.max_engine_replicas)
    near = RequestRouterConfig(request_router_class="serve_app.router.NearRouter")
    engine = part(parts.engine, "Engine", engine_gpus, request_router_config=near, **engines)
    limits = (in_flight, in_flight) if bounded else (UNBOUNDED, -1)
    ingress = _deployment(Ingress, "Ingress", settings, limits, 0, num_replicas=serving.ingress_replicas)
    return ingress.bind(settings, retriever, repairer, engine)


def run(settings: Settings, *, blocking: bool = False, parts: Parts | None = None) -> DeploymentHandle:
    """Start Serve where the settings say, and the application on it. Joins a running Ray cluster, or starts one."""
    tune()
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": settings.serve.host, "port": settings.serve.port},
        logging_config=LoggingConfig(encoding=settings.serve.log_encoding, enable_access_log=False),
    )
    return serve.run(bind(settings, parts), blocking=blocking, name=APP_NAME, route_prefix="/")


def _deployment(
    cls: type, name: str, settings: Settings, limits: tuple[int, int], gpus: float, **options: Any
) -> serve.Deployment:
    ongoing, queued = limits
    return serve.deployment(
        cls,
        name=name,
        **options,
        max_ongoing_requests=ongoing,
        max_queued_requests=queued,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        # Of a new version, replicas start before those they replace stop, where that takes no second set of GPUs.
        max_surge_percent=0 if gpus else 100,
        graceful_shutdown_timeout_s=settings.serve.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_CHECK_S,
        # A refusal at start (a foreign store, a target that cannot be reused) does not get better by trying again.
        max_constructor_retry_count=2,
        logging_config=LoggingConfig(encoding=settings.serve.log_encoding, enable_access_log=False),
        ray_actor_options={
            # Replicas share the cores: what they may use of them is set by threads in the settings, not by slots.
            "num_cpus": 0.1,
            "num_gpus": gpus,
            "runtime_env": {"env_vars": REPLICA_ENVIRONMENT},
        },
    )


def _replicas(settings: Settings, least: int, most: int) -> dict[str, Any]:
    """Options that say how many replicas a deployment has: `least`, or as many up to `most` as the load takes."""
    scaling = settings.serve.autoscaling
    if not scaling.enabled:
        return {"num_replicas": least}
    config = AutoscalingConfig(
        min_replicas=0 if scaling.scale_to_zero else least,
        initial_replicas=least,
        max_replicas=most,
        # Deprecated, but the environment variables that are to replace it are not read by Ray 2.60.
        metrics_interval_s=METRICS_S,
        look_back_period_s=LOOK_BACK_S,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=scaling.downscale_delay_s,
        downscale_to_zero_delay_s=scaling.idle_s,
        policy=AutoscalingPolicy(policy_function="serve_app.autoscaling:scale_alone"),
    )
    return {"autoscaling_config": config}


def _gpu_shares(settings: Settings) -> tuple[float, float]:
    """GPUs of one repairer and of one engine: whole ones, or halves where there are not enough."""
    there = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else torch.cuda.device_count()
    serving, wide = settings.serve, settings.engine.tensor_parallel_size
    if not there:
        return 0, 0
    if there >= serving.repairer_replicas + serving.engine_replicas * wide or wide > 1:
        return 1, wide
    return 0.5, 0.5
