# SPDX-License-Identifier: Apache-2.0
"""Kubernetes and KubeRay objects as their API references document them, closed to fields they do not name.

Only the fields that our manifests may need are here; what the operator would silently drop (a misspelt field) fails.
"""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=_camel)


Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Strings = dict[str, str]


class Metadata(Closed):
    name: Name | None = None
    namespace: Name | None = None
    labels: Strings = {}
    annotations: Strings = {}


class SecretKey(Closed):
    name: Name
    key: str
    optional: bool = False


class ValueFrom(Closed):
    secret_key_ref: SecretKey


class EnvVar(Closed):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    value_from: ValueFrom | None = None


class SecretRef(Closed):
    name: Name
    optional: bool = False


class EnvFrom(Closed):
    secret_ref: SecretRef


class Port(Closed):
    container_port: Annotated[int, Field(gt=0, lt=65536)]
    name: Annotated[Name, Field(max_length=15)]


class Resources(Closed):
    limits: dict[str, Quantity]
    requests: dict[str, Quantity]

    @model_validator(mode="after")
    def _gpus_are_not_overcommitted(self) -> Resources:
        gpus = [each.get("nvidia.com/gpu") for each in (self.limits, self.requests)]
        if gpus[0] != gpus[1]:
            raise ValueError("requests and limits of nvidia.com/gpu must be equal")
        return self


class Mount(Closed):
    name: Name
    mount_path: Annotated[str, Field(pattern="^/")]
    read_only: bool = False


class ContainerSecurity(Closed):
    allow_privilege_escalation: bool
    capabilities: dict[Literal["drop", "add"], list[str]]


class Container(Closed):
    name: Name
    image: str
    ports: list[Port] = []
    env: list[EnvVar] = []
    env_from: list[EnvFrom] = []
    resources: Resources
    security_context: ContainerSecurity
    volume_mounts: list[Mount] = []


class EmptyDir(Closed):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class Volume(Closed):
    name: Name
    empty_dir: EmptyDir


class PodSecurity(Closed):
    run_as_non_root: bool
    run_as_user: int
    fs_group: int


class Toleration(Closed):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class PodSpec(Closed):
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []
    tolerations: list[Toleration] = []
    security_context: PodSecurity
    automount_service_account_token: bool
    service_account_name: Name | None = None

    @model_validator(mode="after")
    def _mounts_have_volumes(self) -> PodSpec:
        there = {volume.name for volume in self.volumes}
        missing = {mount.name for each in self.containers for mount in each.volume_mounts} - there
        if missing:
            raise ValueError(f"mounts without a volume: {missing}")
        return self


class PodTemplate(Closed):
    metadata: Metadata
    spec: PodSpec


class HeadGroup(Closed):
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    enable_ingress: bool
    ray_start_params: Strings
    template: PodTemplate


class WorkerGroup(Closed):
    group_name: Name
    replicas: int
    min_replicas: int
    max_replicas: int
    num_of_hosts: int = 1
    ray_start_params: Strings
    template: PodTemplate

    @model_validator(mode="after")
    def _ordered(self) -> WorkerGroup:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError("minReplicas <= replicas <= maxReplicas does not hold")
        return self


class AutoscalerOptions(Closed):
    idle_timeout_seconds: int
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"]


class AuthOptions(Closed):
    mode: Literal["disabled", "token"]


class ClusterSpec(Closed):
    ray_version: str
    enable_in_tree_autoscaling: bool
    autoscaler_options: AutoscalerOptions
    auth_options: AuthOptions
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class UpgradeStrategy(Closed):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]


class ServiceSpec(Closed):
    upgrade_strategy: UpgradeStrategy
    ray_cluster_deletion_delay_seconds: int
    exclude_head_pod_from_serve_svc: bool
    serve_config_v2: Annotated[str, Field(alias="serveConfigV2")]
    ray_cluster_config: ClusterSpec


class RayCluster(Closed):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


class RayService(Closed):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: ServiceSpec


class Selector(Closed):
    match_labels: Strings


class IpBlock(Closed):
    cidr: IPv4Network


class Peer(Closed):
    pod_selector: Selector | None = None
    namespace_selector: Selector | None = None
    ip_block: IpBlock | None = None


class PolicyPort(Closed):
    protocol: Literal["TCP", "UDP"]
    port: int


class IngressRule(Closed):
    from_: Annotated[list[Peer], Field(alias="from", min_length=1)]
    ports: list[PolicyPort] = []


class EgressRule(Closed):
    to: list[Peer] = []
    ports: list[PolicyPort] = []


class PolicySpec(Closed):
    pod_selector: Selector
    policy_types: list[Literal["Ingress", "Egress"]]
    ingress: list[IngressRule]
    egress: list[EgressRule]


class NetworkPolicy(Closed):
    api_version: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: PolicySpec


KINDS: dict[str, Any] = {each.__name__: each for each in (RayCluster, RayService, NetworkPolicy)}
