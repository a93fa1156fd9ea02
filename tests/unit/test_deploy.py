"""What is in deploy/ against what the code takes: flags, variables, files, extras, probes, writable places."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import click
import pytest
import yaml

from agent.command import agent
from agent.hook.config import VARIABLES
from demo.ranks import ranks
from eplb_service import __version__
from eplb_service.cli.root import root
from eplb_service.cli.serve import serve
from eplb_service.config import ServeConfig, load_config
from eplb_service.rpc.server import LIVENESS, SERVICE_NAMES
from eplb_service.settings import settings_of
from eplb_service.telemetry import DeploymentGauges, Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
COMMANDS: dict[str, click.Command] = {"planner": serve, "agent": agent, "ranks": ranks}


def containerfile(name: str) -> list[tuple[str, str]]:
    """Instructions of a container file, continuation lines joined: (`COPY`, `a b`)."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "containers" / f"{name}.Containerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def environment_of(name: str) -> dict[str, str]:
    """ENV of the last stage."""
    words = [word for instruction, text in containerfile(name) if instruction == "ENV" for word in shlex.split(text)]
    return dict(word.split("=", 1) for word in words)


def default_arguments(name: str) -> list[str]:
    found: list[str] = next(json.loads(text) for instruction, text in containerfile(name) if instruction == "CMD")
    return found


def check_arguments(command: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Have the command's own parser read them; the planner's values go on to its configuration."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("EPLB_PLANNER", "EPLB_SOCKET"):
            patch.delenv(variable, raising=False)
        for variable, text in environment.items():
            patch.setenv(variable, text)
        context = COMMANDS[command].make_context(command, list(arguments))
    if command == "planner":
        given = {found.key: context.params["setting_" + found.key.replace(".", "_")] for found in settings_of(ServeConfig)
                 if not found.secret}  # fmt: skip
        load_config(flags={key: text for key, text in given.items() if text is not None}, environment=environment)


def test_parser_of_these_tests_refuses_what_the_commands_do_not_take() -> None:
    with pytest.raises(click.UsageError, match="--listen"):
        check_arguments("planner", ["--listen", "0.0.0.0:7470"], {})
    with pytest.raises(Exception, match="EPLB_LISTEN names no setting"):
        check_arguments("planner", [], {"EPLB_LISTEN": "x"})
    with pytest.raises(click.UsageError, match="planner"):
        check_arguments("agent", ["--socket", "/s"], {})


# ── container files ──────────────────────────────────────────────────────────────────────────────────────────────────────

IMAGES = sorted(path.name.removesuffix(".Containerfile") for path in (DEPLOY / "containers").iterdir())


def test_images_are_those_that_the_manual_lists() -> None:
    assert IMAGES == ["agent", "demo", "planner"]


@pytest.mark.parametrize("name", IMAGES)
def test_what_an_image_copies_is_there(name: str) -> None:
    copies = [shlex.split(text) for instruction, text in containerfile(name) if instruction == "COPY"]
    assert copies
    for words in copies:
        if not words[0].startswith("--from"):
            assert all((ROOT / source).exists() for source in words[:-1]), words


@pytest.mark.parametrize("name", ["agent", "planner"])
def test_an_image_installs_an_extra_that_exists_from_packages_that_it_copied(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runs = " ".join(text for instruction, text in containerfile(name) if instruction == "RUN")
    assert set(re.findall(r"'\.\[(\w+)\]'", runs)) == {name}
    assert name in project["project"]["optional-dependencies"]
    copied = {word for instruction, text in containerfile(name) if instruction == "COPY" for word in shlex.split(text)}
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied
    assert {"pyproject.toml", "constraints.txt", project["project"]["readme"]} <= copied


@pytest.mark.parametrize("name", ["agent", "planner"])
def test_an_image_starts_with_arguments_that_the_command_takes(name: str) -> None:
    environment = {key: text for key, text in environment_of(name).items() if key.startswith("EPLB_")}
    if name == "agent":
        environment["EPLB_PLANNER"] = "planner:7470"  # the one thing that its user must give
    check_arguments(name, default_arguments(name), environment)


@pytest.mark.parametrize("name", ["agent", "planner"])
def test_an_image_runs_as_a_user_without_rights_and_writes_into_its_volume(name: str) -> None:
    instructions = containerfile(name)
    (user,) = [text for instruction, text in instructions if instruction == "USER"]
    assert int(user) >= 10_000
    (volume,) = [text for instruction, text in instructions if instruction == "VOLUME"]
    written = [word for word in default_arguments(name) if word.startswith("/")]
    written += [text for key, text in environment_of(name).items() if key == "NUMBA_CACHE_DIR"]
    assert written
    for path in written:
        assert PurePosixPath(volume) in PurePosixPath(path).parents
    assert name == "agent" or "NUMBA_CACHE_DIR" in environment_of(name)


def test_ports_that_the_planner_image_exposes_are_the_defaults() -> None:
    config = load_config().config
    exposed = next(text for instruction, text in containerfile("planner") if instruction == "EXPOSE")
    assert [int(port) for port in exposed.split()] == [config.listen.port, config.metrics.port]


# ── compose ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def eplb_variables(service: dict[str, Any]) -> dict[str, str]:
    return {key: str(text) for key, text in service.get("environment", {}).items() if key.startswith("EPLB_")}


@pytest.mark.parametrize("name", COMMANDS)
def test_compose_gives_flags_and_variables_that_the_command_takes(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    check_arguments(name, service["command"], eplb_variables(service))


def test_compose_planner_may_move_and_has_what_its_gate_needs(compose: dict[str, Any]) -> None:
    """Without a cost model the gate always keeps: four busy ranks would never see a generation."""
    context = serve.make_context("serve", list(compose["services"]["planner"]["command"]))
    given = {found.key: context.params.get("setting_" + found.key.replace(".", "_")) for found in settings_of(ServeConfig)}
    config = load_config(flags={key: text for key, text in given.items() if text is not None}).config
    assert config.planning.mode == "auto"
    assert config.given_costs().seconds_per_step is not None
    assert "--traffic" in compose["services"]["ranks"]["command"]


def test_compose_services_share_what_they_meet_at(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["agent"]["volumes"] == services["ranks"]["volumes"]
    assert services["agent"]["user"] == services["ranks"]["user"]
    folder = PurePosixPath(services["agent"]["volumes"][0].split(":")[1])
    for name in ("agent", "ranks"):
        socket = services[name]["command"][services[name]["command"].index("--socket") + 1]
        assert PurePosixPath(socket).parent == folder
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in compose["volumes"]
        for needed in service.get("depends_on", ()):
            assert needed in services
    planner = services["agent"]["command"][services["agent"]["command"].index("--planner") + 1]
    assert planner == f"planner:{load_config().config.listen.port}"
    assert any(word.startswith("--store=redis://store:") for word in services["planner"]["command"])
    for service in services.values():
        text = json.dumps(service)
        assert set(re.findall(r"\$\{(\w+)", text)) <= {"EPLB_STORE_PASSWORD"}


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def kustomization() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def objects(kustomization: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Kind and name -> object."""
    documents = [one for file in kustomization["resources"] for one in yaml.safe_load_all((BASE / file).read_text())]
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


WORKLOADS = {"planner": ("StatefulSet", "eplb-planner"), "agent": ("DaemonSet", "eplb-agent")}


def pod_of(objects: dict[tuple[str, str], Any], name: str) -> Any:
    return objects[WORKLOADS[name]]["spec"]["template"]["spec"]


def container_of(objects: dict[tuple[str, str], Any], name: str) -> Any:
    (container,) = pod_of(objects, name)["containers"]
    return container


def test_kustomization_names_files_that_exist_and_tags_of_this_release(kustomization: dict[str, Any]) -> None:
    files = [*kustomization["resources"], *(file for made in kustomization["configMapGenerator"] for file in made["files"])]
    assert all((BASE / file).is_file() for file in files)
    assert {path.name for path in BASE.iterdir()} == {*files, "kustomization.yaml"}
    assert {image["newTag"] for image in kustomization["images"]} == {__version__}


def test_base_builds_with_kubectl(objects: dict[tuple[str, str], Any]) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: the base is parsed by the other tests, but not built")
    done = subprocess.run([kubectl, "kustomize", str(BASE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert {one["kind"] for one in built} == {kind for kind, _ in objects} | {"ConfigMap"}
    images = {
        container["image"]
        for one in built
        if "template" in one.get("spec", {})
        for container in one["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"eplb-planner:{__version__}", f"eplb-agent:{__version__}"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_give_flags_and_variables_that_the_command_takes(objects: dict[tuple[str, str], Any], name: str) -> None:
    container = container_of(objects, name)
    variables = {one["name"]: one.get("value", "x") for one in container.get("env", ()) if one["name"].startswith("EPLB_")}
    check_arguments(name, container["args"], variables)
    named = {one["name"] for one in container.get("env", ())}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= named


def test_configuration_of_the_pod_loads_and_listens_where_probes_and_services_look(objects: dict[tuple[str, str], Any]) -> None:
    config = load_config(file=BASE / "eplb.toml").config
    container = container_of(objects, "planner")
    assert (config.listen.host, config.metrics.host) == ("0.0.0.0", "0.0.0.0")
    assert config.planning.mode == "observe"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.listen.port, "metrics": config.metrics.port}
    service = objects["Service", "eplb-planner"]["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == ports
    agent_words = container_of(objects, "agent")["args"]
    assert agent_words[agent_words.index("--planner") + 1] == f"eplb-planner.eplb.svc:{config.listen.port}"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(PurePosixPath(container["args"][1]).parent) in mounts


def test_probes_ask_for_health_that_the_server_serves(objects: dict[tuple[str, str], Any]) -> None:
    container = container_of(objects, "planner")
    probes = {name: container[name]["grpc"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    for probe in probes.values():
        assert probe.get("service", "") in {"", LIVENESS, *SERVICE_NAMES}
        assert probe["port"] == load_config().config.listen.port
    assert probes["livenessProbe"]["service"] == LIVENESS  # a store that is away must not restart the planner
    assert "service" not in probes["readinessProbe"]


def written_by(name: str, container: dict[str, Any]) -> Iterator[str]:
    """Places that a pod writes to."""
    if name == "planner":
        yield load_config(file=BASE / "eplb.toml").config.store.data_dir
        yield "/tmp/eplb-x"  # the embedded store's socket
        yield next(one["value"] for one in container["env"] if one["name"] == "NUMBA_CACHE_DIR")
    else:
        yield container["args"][container["args"].index("--socket") + 1]


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_with_a_read_only_root_write_only_below_their_volumes(objects: dict[tuple[str, str], Any], name: str) -> None:
    pod, container = pod_of(objects, name), container_of(objects, name)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    claims = objects[WORKLOADS[name]]["spec"].get("volumeClaimTemplates", ())
    volumes = {volume["name"]: volume for volume in [*pod["volumes"], *(claim["metadata"] for claim in claims)]}
    writable = {
        PurePosixPath(mount["mountPath"])
        for mount in container["volumeMounts"]
        if not mount.get("readOnly") and "configMap" not in volumes[mount["name"]]
    }
    for path in written_by(name, container):
        assert writable & set(PurePosixPath(path).parents), path  # below a mount: a mount's root may be another user's


# ── Prometheus ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]


def test_alerts_are_of_metrics_that_the_planner_has() -> None:
    """A rule on a metric that nobody exports never fires."""
    known: dict[str, set[str]] = {}
    for family in Metrics("0").registry.collect():
        known[family.name + ("_total" if family.type == "counter" else "")] = set()
    assert {"eplb_engine_silent", "eplb_questions_total"} <= known.keys()
    for rule in ALERTS:
        named = set(re.findall(r"\beplb_\w+", rule["expr"]))
        assert named, rule
        assert named <= known.keys(), rule["expr"]


def test_alerts_say_what_is_wrong_and_what_to_look_at() -> None:
    manual = (DEPLOY / "README.md").read_text()
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert f"`{rule['alert']}`" in manual
        for words in re.findall(r"`eplb ([^`]+)`", rule["annotations"]["description"]):
            assert words.split()[0] in root.list_commands(click.Context(root)), words


def test_engine_that_asks_no_more_sets_the_metric_of_its_alert_off() -> None:
    """The expression is compared with what the planner exports, as Prometheus would do it."""
    (rule,) = [rule for rule in ALERTS if rule["alert"] == "EplbEngineSilent"]
    metric, operator, wanted = rule["expr"].split()
    assert operator == "=="
    metrics = Metrics("0")
    quiet = DeploymentGauges(
        imbalance_mean=None, imbalance_worst=None, window_coverage=None, rollout_age_s=0.0, rollout_stalled=False, ranks={},
        agents=0, generation=0, epoch=1, leading=True,
    )  # fmt: skip
    fires = {}
    for silent in (None, False, True):
        metrics.state_changed("d", dataclasses.replace(quiet, engine_silent=silent))
        value = metrics.registry.get_sample_value(metric, {"deployment": "d"})
        fires[silent] = value is not None and value == float(wanted)
    assert fires == {None: False, False: False, True: True}


def test_variables_that_the_manual_gives_to_engines_are_the_hooks() -> None:
    text = (DEPLOY / "README.md").read_text()
    for variable in re.findall(r"name: (EPLB_\w+)", text):
        assert variable in VARIABLES
