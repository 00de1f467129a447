# SPDX-License-Identifier: Apache-2.0
"""The cluster files are read by what will read them, as far as that is possible without a cluster."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.constants import SERVE_DEFAULT_APP_NAME
from ray.serve.schema import DeploymentStatus, ServeDeploySchema

from kvcache.settings import Settings, load_settings
from kvcache.store import MissReason
from serve_app.app import AppArgs, build_app
from serve_app.autoscaling import scale_together
from serve_app.tuning import REPLICA_ENVIRONMENT
from tests.cluster.manifests import KINDS, NetworkPolicy, RayCluster, RayService

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER = ROOT / "cluster"
KUBERAY = CLUSTER / "kuberay"
ALL = sorted(path for pattern in ("**/*.yaml", "**/*.json", "Containerfile") for path in CLUSTER.glob(pattern))
OUR_LABEL = {"app.kubernetes.io/name": "cachemend"}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def manifest(name: str) -> Any:
    content = load(KUBERAY / name)
    return KINDS[content["kind"]].model_validate(content)


@pytest.fixture(scope="module")
def service() -> RayService:
    return manifest("rayservice.yaml")


@pytest.fixture(scope="module")
def policy() -> NetworkPolicy:
    return manifest("networkpolicy.yaml")


def is_setting(variable: str) -> bool:
    """Whether `CACHEMEND_SECTION__NAME` is one of the settings (or names their file)."""
    if variable == "CACHEMEND_CONFIG":
        return True
    model: type[BaseModel] = Settings
    *sections, name = variable.removeprefix("CACHEMEND_").lower().split("__")
    for section in sections:
        field = model.model_fields.get(section)
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return False
        model = field.annotation
    return name in model.model_fields


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(CLUSTER)))
def test_every_variable_is_a_setting(path: Path) -> None:
    named = re.findall(r"CACHEMEND_[A-Z0-9_]+", path.read_text(encoding="utf-8"))
    assert [variable for variable in named if not is_setting(variable)] == []


def test_a_variable_that_is_no_setting_is_found() -> None:
    assert is_setting("CACHEMEND_STORE__URI") and is_setting("CACHEMEND_ROOT")
    assert not is_setting("CACHEMEND_STORE__URL") and not is_setting("CACHEMEND_STORE_URI")


def deployments(app: Any) -> set[str]:
    """Names of an application's deployments, ingress first bound, the others its arguments."""
    ingress = app._bound_deployment
    return {ingress.name} | {
        part._bound_deployment.name for part in ingress.init_args if hasattr(part, "_bound_deployment")
    }


@pytest.mark.parametrize("name", ["serve.yaml", "serve-gpu.yaml"])
def test_a_serve_config_is_one_that_ray_and_the_application_take(name: str) -> None:
    config = ServeDeploySchema.model_validate(load(CLUSTER / name))
    (app,) = config.applications
    assert (app.name, app.import_path, app.route_prefix) == ("cachemend", "serve_app:build_app", "/")
    there = deployments(call_user_app_builder_with_args_if_necessary(build_app, app.args))
    assert there == {"Ingress", "Retriever", "Repairer", "Engine"}
    assert {each.name for each in app.deployments} <= there


@pytest.mark.parametrize("name", ["serve.yaml", "serve-gpu.yaml"])
def test_what_is_commented_out_is_right_too(name: str) -> None:
    text = (CLUSTER / name).read_text(encoding="utf-8")
    (app,) = ServeDeploySchema.model_validate(yaml.safe_load(re.sub(r"# (autoscaling\w*:)", r"\1", text))).applications
    assert app.autoscaling_policy is not None
    assert app.autoscaling_policy["policy_function"] == f"{scale_together.__module__}:{scale_together.__name__}"
    assert AppArgs(**app.args).serve.autoscaling.enabled


def test_a_misspelt_argument_of_a_serve_config_is_refused() -> None:
    args = load(CLUSTER / "serve-gpu.yaml")["applications"][0]["args"]
    args["serve"]["engine_replica"] = args["serve"].pop("engine_replicas")
    with pytest.raises(ValueError, match="engine_replicas"):
        AppArgs(**args)


def test_a_repairer_has_a_gpu_and_engines_beside_it(service: RayService) -> None:
    app = load(CLUSTER / "serve-gpu.yaml")["applications"][0]
    parts = {each["name"]: each for each in app["deployments"]}
    per_node = {name: each["max_replicas_per_node"] for name, each in parts.items()}
    assert per_node == {"Repairer": 1, "Engine": 2}
    for each in parts.values():
        assert each["ray_actor_options"]["num_gpus"] == 1
        assert each["ray_actor_options"]["runtime_env"]["env_vars"] == REPLICA_ENVIRONMENT
    (gpu,) = service.spec.ray_cluster_config.worker_group_specs
    (container,) = gpu.template.spec.containers
    assert int(container.resources.limits["nvidia.com/gpu"]) == int(gpu.ray_start_params["num-gpus"]) == 3


def test_memory_of_a_worker_holds_what_the_settings_ask_for(service: RayService) -> None:
    args = load(CLUSTER / "serve-gpu.yaml")["applications"][0]["args"]
    (gpu,) = service.spec.ray_cluster_config.worker_group_specs
    pod = gpu.template.spec
    gib = {volume.name: volume.empty_dir.size_limit for volume in pod.volumes}
    assert args["handoff"]["arena_bytes"] < int(str(gib["shm"]).removesuffix("Gi")) * 2**30
    memory = int(pod.containers[0].resources.limits["memory"].removesuffix("Gi")) * 2**30
    assert args["host_tier"]["bytes"] + args["handoff"]["arena_bytes"] < memory / 2


def test_the_ray_service_serves_the_serve_config(service: RayService) -> None:
    inside = yaml.safe_load(service.spec.serve_config_v2)
    assert inside == load(CLUSTER / "serve-gpu.yaml")
    shutdown_s = inside["applications"][0]["args"]["serve"]["shutdown_timeout_s"]
    assert service.spec.ray_cluster_deletion_delay_seconds > shutdown_s


def job_environments() -> dict[str, dict[str, str]]:
    """What the processes of a cluster for jobs find in their environment, by where they run."""
    cluster = manifest("raycluster.yaml").spec
    templates = {"head": cluster.head_group_spec.template, "worker": cluster.worker_group_specs[0].template}
    found = {
        f"raycluster {kind}": {each.name: each.value for each in template.spec.containers[0].env}
        for kind, template in templates.items()
    }
    up = load(CLUSTER / "ray-up.yaml")
    for kind in ("head", "worker"):
        starts = " ".join(up[f"{kind}_start_ray_commands"])
        found[f"ray-up {kind}"] = dict(re.findall(r"(CACHEMEND_\w+)=([^\s;]+)", starts))
    return found


@pytest.mark.parametrize("place", ["raycluster head", "raycluster worker", "ray-up head", "ray-up worker"])
def test_jobs_work_for_the_target_of_the_service(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = load_settings(**load(CLUSTER / "serve-gpu.yaml")["applications"][0]["args"])
    for name, value in job_environments()[place].items():
        monkeypatch.setenv(name, value)
    jobs = load_settings()
    assert jobs.target == served.target.model_copy(update={"device": "cuda"})
    assert jobs.embedding == served.embedding
    assert all("/" in part.model for part in (jobs.target, jobs.embedding))  # bare names are not on new nodes


@pytest.mark.parametrize("name", ["rayservice.yaml", "raycluster.yaml"])
def test_a_ray_cluster_is_closed(name: str, policy: NetworkPolicy) -> None:
    found = manifest(name)
    cluster = found.spec if isinstance(found, RayCluster) else found.spec.ray_cluster_config
    assert cluster.ray_version == ray.__version__
    assert cluster.auth_options.mode == "token"
    head = cluster.head_group_spec
    assert (head.service_type, head.enable_ingress) == ("ClusterIP", False)
    assert (head.ray_start_params["num-cpus"], head.ray_start_params["num-gpus"]) == ("0", "0")
    for template in (head.template, *(group.template for group in cluster.worker_group_specs)):
        assert template.metadata.labels.items() >= policy.spec.pod_selector.match_labels.items()
        assert template.spec.security_context.run_as_non_root
        for container in template.spec.containers:
            assert not container.security_context.allow_privilege_escalation
            assert not any(variable.name.startswith("AWS_") for variable in container.env)  # they come from the secret
            assert [each.secret_ref.name for each in container.env_from] == ["cachemend-s3"]


def test_only_the_operator_reaches_the_dashboard(policy: NetworkPolicy) -> None:
    assert set(policy.spec.policy_types) == {"Ingress", "Egress"}
    callers = {
        port: [rule.from_[0] for rule in policy.spec.ingress if not rule.ports or port in {p.port for p in rule.ports}]
        for port in (8265, 6379, 8000)
    }
    ours, *others = callers[8265]
    assert ours.pod_selector and ours.pod_selector.match_labels == OUR_LABEL and ours.namespace_selector is None
    assert [each.pod_selector.match_labels for each in others if each.pod_selector] == [
        {"app.kubernetes.io/name": "kuberay-operator"}
    ]
    assert callers[6379] == [ours]
    assert len(callers[8000]) == 3


def test_pods_reach_the_api_server_and_what_gives_them_a_role(policy: NetworkPolicy) -> None:
    anywhere = {port.port for rule in policy.spec.egress if not rule.to for port in rule.ports}
    assert anywhere == {443, 6443}
    metadata = {
        (str(peer.ip_block.cidr), port.port)
        for rule in policy.spec.egress
        for peer in rule.to
        if peer.ip_block
        for port in rule.ports
    }
    assert metadata == {("169.254.170.23/32", 80), ("169.254.169.254/32", 80), ("169.254.169.252/32", 988)}


def test_a_misspelt_field_of_a_manifest_is_refused() -> None:
    content = load(KUBERAY / "raycluster.yaml")
    content["spec"]["authOption"] = content["spec"].pop("authOptions")
    with pytest.raises(ValidationError, match="authOption"):
        RayCluster.model_validate(content)


def test_ray_up_takes_its_file() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    content = load(CLUSTER / "ray-up.yaml")
    jsonschema.validate(content, schema)
    assert content["head_node_type"] in content["available_node_types"]
    starts = [" ".join(content[f"{kind}_start_ray_commands"]) for kind in ("head", "worker")]
    assert all("RAY_AUTH_MODE=token" in start for start in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert any(path.endswith("/.ray/auth_token") for path in content["file_mounts"])


def test_commands_for_ray_s_machines_are_found_there() -> None:
    text = (CLUSTER / "ray-up.yaml").read_text(encoding="utf-8")
    (binaries,) = set(re.findall(r"(\S+/bin)/pip install", text))
    assert set(re.findall(r"(\S*)/?\bserve deploy", text)) == {f"{binaries}/"}


def test_the_image_has_our_packages_and_versions_and_no_root() -> None:
    lines = (CLUSTER / "Containerfile").read_text(encoding="utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    base = next(line for line in lines if line.startswith("ARG BASE="))
    assert f":{ray.__version__}-py311" in base
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER ray"
    copied = {line.split()[1] for line in lines if line.startswith("COPY ")}
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    assert packages <= copied
    assert "examples" in copied  # the questions that `cachemend loadtest` asks when it is given none
    image = f"REGISTRY/cachemend:{project['project']['version']}"
    assert all(image in (KUBERAY / name).read_text(encoding="utf-8") for name in ("rayservice.yaml", "raycluster.yaml"))


def our_metrics() -> set[str]:
    """Names under which Prometheus finds what the service counts."""
    source = (ROOT / "serve_app" / "metrics.py").read_text(encoding="utf-8")
    found = re.finditer(r'metrics\.(Counter|Histogram|Gauge)\(\s*"(rag_\w+)"(.*?)\n', source + "\n", re.DOTALL)
    names = {match.group(2): match.group(1) for match in found}
    suffixes = {"Counter": ("_total",), "Gauge": ("",), "Histogram": ("_bucket", "_count", "_sum")}
    return {f"ray_{name}{suffix}" for name, kind in names.items() for suffix in suffixes[kind]}


def test_every_metric_is_on_the_board() -> None:
    board = (CLUSTER / "grafana" / "cachemend.json").read_text(encoding="utf-8")
    assert {name for name in our_metrics() if not re.search(r"_(sum|count)$", name) and name not in board} == set()


@pytest.mark.parametrize("name", ["grafana/cachemend.json", "alerts.yaml"])
def test_boards_and_alerts_ask_for_metrics_that_there_are(name: str) -> None:
    asked = set(re.findall(r"ray_rag_\w+", (CLUSTER / name).read_text(encoding="utf-8")))
    assert len(asked) >= 4
    assert asked - our_metrics() == set()


def test_every_object_that_is_not_what_it_should_be_raises_an_alert() -> None:
    (group,) = load(CLUSTER / "alerts.yaml")["groups"]
    (damaged,) = (rule["expr"] for rule in group["rules"] if rule["alert"] == "CacheMendDamagedChunks")
    (quiet,) = set(re.findall(r'reason!~"([^"]+)"', damaged))
    more, new = re.fullmatch(r"(.+\[15m\]\)\) > 0) or (.+ unless .+ offset 15m\) > 0)", damaged).groups()
    assert "increase(" in more and "increase(" not in new  # which is blind to a series' first value
    found = {reason for reason in MissReason if not re.fullmatch(quiet, reason)}
    assert found == set(MissReason) - {MissReason.absent, MissReason.unreadable, MissReason.timeout}


@pytest.mark.parametrize("name", ["grafana/cachemend.json", "alerts.yaml"])
def test_boards_and_alerts_ask_for_the_applications_that_there_are(name: str) -> None:
    """The Serve configs name theirs; what `serve run serve_app:app` starts has Ray's own name."""
    wanted = re.findall(r'application=~?\\?"([^"\\]+)', (CLUSTER / name).read_text(encoding="utf-8"))
    configs = [load(CLUSTER / config)["applications"][0]["name"] for config in ("serve.yaml", "serve-gpu.yaml")]
    assert len(wanted) >= 2
    for application in (*configs, SERVE_DEFAULT_APP_NAME):
        assert all(re.fullmatch(pattern, application) for pattern in wanted), application


def test_no_series_at_all_raises_an_alert() -> None:
    (group,) = load(CLUSTER / "alerts.yaml")["groups"]
    (down,) = (rule["expr"] for rule in group["rules"] if rule["alert"] == "CacheMendDown")
    asked, missing = down.split(f" <= {DeploymentStatus.UNHEALTHY.to_numeric()} or ")
    (series,) = re.findall(r"\((ray_serve_deployment_status{[^}]+})\)", asked)
    assert missing == f"absent({series})"
    bad = {status for status in DeploymentStatus if 0 < status.to_numeric() <= DeploymentStatus.UNHEALTHY.to_numeric()}
    assert bad == {DeploymentStatus.UNHEALTHY, DeploymentStatus.DEPLOY_FAILED}


def test_the_board_s_panels_do_not_overlap() -> None:
    panels = json.loads((CLUSTER / "grafana" / "cachemend.json").read_text(encoding="utf-8"))["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] and panel["targets"] for panel in panels)


def test_alerts_say_what_to_do() -> None:
    (group,) = load(CLUSTER / "alerts.yaml")["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert {"summary", "description"} == set(rule["annotations"])
        assert rule["labels"]["severity"] in {"page", "ticket"}
