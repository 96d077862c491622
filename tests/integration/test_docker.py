"""docker/ without a Docker engine: every name, file, flag and query in it is a real one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from capture.store import default_path
from serve.settings import Settings, variable
from tests.board import ALERTS, BOARD, DOCKER, metric_names, queries
from tests.servers import ROOT, clean_environment, running_process

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
CUDA = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text(encoding="utf-8"))
HADOLINT = Path(sys.executable).with_name("hadolint")
# The upstream's key is the one variable without a flag.
VARIABLES = {*map(variable, Settings.model_fields), "DRAFTLOOP_UPSTREAM_API_KEY"}


def stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages by name, each with its (instruction, rest), those it is built on first."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(encoding="utf-8")).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    lines: list[tuple[str, str]] = []  # of the stage being read; the first belong to none
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.split()
            lines = found[name] = list(found.get(base, ()))
        else:
            lines.append((instruction, " ".join(rest.split())))
    return found


STAGES = stages()


def of(stage: str, instruction: str) -> list[str]:
    return [rest for kind, rest in STAGES[stage] if kind == instruction]


def environment(stage: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for line in of(stage, "ENV") for pair in line.split())


def copied() -> dict[str, set[str]]:
    """What each stage copies from the checkout."""
    sources: defaultdict[str, set[str]] = defaultdict(set)
    for stage in STAGES:
        for line in of(stage, "COPY"):
            words = [word for word in line.split() if not word.startswith("--")]
            if "--from=" not in line:
                sources[stage].update(words[:-1])
    return sources


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint has no wheel for this machine")
def test_its_linter_has_nothing_against_the_dockerfile(tmp_path: Path) -> None:
    def told(file: Path) -> str:
        done = subprocess.run([HADOLINT, "--no-color", file], capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""
        return done.stdout

    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    (tmp_path / "Dockerfile").write_text(text + "RUN cd /tmp && sudo pip install draftloop\n", encoding="utf-8")
    assert "DL3004" in told(tmp_path / "Dockerfile")
    assert told(DOCKER / "Dockerfile") == ""


def test_the_images_are_built_from_files_that_exist_and_are_not_ignored():
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    sources = set().union(*copied().values())
    assert {"pyproject.toml", "docker/constraints.txt", "docker/healthcheck.py"} <= sources
    assert all((ROOT / source).exists() for source in sources)
    assert sources == allowed


def test_the_wheel_is_built_from_every_package_and_what_its_metadata_names():
    project = PYPROJECT["project"]
    packages = {name.split(".")[0] for name in PYPROJECT["tool"]["setuptools"]["packages"]}
    assert copied()["wheel"] >= {*packages, "pyproject.toml", project["readme"], *project["license-files"]}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_is_what_make_serve_runs_as_somebody_else_than_root(target):
    (entry,) = of(target, "ENTRYPOINT")
    assert json.loads(entry) == ["serve"]
    assert "$(VENV)/bin/serve $(ARGS)" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert PYPROJECT["project"]["scripts"]["serve"] == "serve.cli:main"
    # It is where the environment was made, and on the path.
    assert f"--from={target}-environment /opt/draftloop /opt/draftloop" in of(target, "COPY")
    assert environment(target)["PATH"].startswith("/opt/draftloop/bin:")
    assert of(target, "USER") == ["10001:10001"]
    (check,) = of(target, "HEALTHCHECK")
    (script,) = re.findall(r'CMD \["(.+)"\]', check)
    assert f"--chmod=755 docker/healthcheck.py /usr/local/bin/{script}" in of(target, "COPY")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_what_must_outlive_a_container_is_in_its_volumes(target, monkeypatch):
    volumes = [Path(path) for path in json.loads(of(target, "VOLUME")[0])]
    monkeypatch.setenv("XDG_DATA_HOME", environment(target)["XDG_DATA_HOME"])
    for kept in (default_path(), Path(environment(target)["HF_HOME"]), Path(of(target, "WORKDIR")[-1])):
        assert any(kept.is_relative_to(volume) for volume in volumes), kept
    mounted = {mount.split(":")[1] for mount in COMPOSE["services"]["draftloop"]["volumes"]}
    assert mounted == {str(volume) for volume in volumes}


def test_every_dependency_is_pinned_to_a_version_that_the_package_allows():
    lines = (DOCKER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    todo = [
        Requirement(line) for line in (*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"])
    ]
    seen = set()
    for wanted in todo:  # it grows
        assert canonicalize_name(wanted.name) in pins, f"docker/constraints.txt does not pin {wanted.name}"
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), wanted
    while todo:
        wanted = todo.pop()
        if wanted.name in seen or wanted.name == "pip":  # which the image brings
            continue
        seen.add(wanted.name)
        assert canonicalize_name(wanted.name) in pins, f"docker/constraints.txt does not pin {wanted.name}"
        installed = distribution(wanted.name)
        if installed.version.partition("+")[0] != pins[canonicalize_name(wanted.name)]:
            continue  # what another version needs says nothing of this one
        for inner in map(Requirement, installed.requires or ()):
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                todo.append(inner)


def test_every_variable_is_an_option_of_serve():
    given = {name for target in ("cpu", "cuda") for name in environment(target)}
    services = [*COMPOSE["services"].values(), *CUDA["services"].values()]
    given |= {name for service in services for name in service.get("environment", ())}
    example = (DOCKER / ".env.example").read_text(encoding="utf-8")
    ours = {name for name in given if name.startswith("DRAFTLOOP_")}
    assert ours >= {"DRAFTLOOP_HOST", "DRAFTLOOP_API_KEY", "DRAFTLOOP_UPSTREAM"}
    assert ours <= VARIABLES
    # What .env.example offers is read by compose.
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    assert all(name in text for name in re.findall(r"(?m)^(\w+)=", example))


def test_compose_mounts_and_builds_from_what_is_there():
    build = COMPOSE["services"]["draftloop"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert {build["target"], CUDA["services"]["draftloop"]["build"]["target"]} <= set(STAGES)
    assert list(STAGES)[-1] == build["target"]  # what a build without a target makes
    named = set(COMPOSE["volumes"])
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in named or (DOCKER / source).is_dir(), mount
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]) or "build" in service, "an image without a version"
        for port in service.get("ports", ()):
            assert ":-127.0.0.1:" in port, "published to other machines unless asked to"


def test_grafana_finds_its_board_and_prometheus():
    grafana = COMPOSE["services"]["grafana"]
    provisioning = DOCKER / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/draftloop.yml").read_text(encoding="utf-8"))["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].endswith("/draftloop.json")
    # Every panel asks the source that is chosen on the board, which is the provisioned one at first.
    assert BOARD["templating"]["list"][0]["current"]["value"] == source["uid"]
    drawn = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    assert {target["datasource"]["uid"] for panel in drawn for target in panel["targets"]} == {"${datasource}"}
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_the_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_every_metric_of_the_board_and_the_alerts_is_one_of_ours(serve):
    server = serve()
    server.chat()
    exposed = {line.split("{")[0].split(" ")[0] for line in server.http.get("/metrics").text.splitlines()}
    shown = {name for _, _, expression in queries() for name in metric_names(expression)}
    chosen = metric_names(json.dumps(BOARD["templating"]))
    alerting = {name for rule in ALERTS["groups"][0]["rules"] for name in metric_names(rule["expr"])}
    assert len(shown) > 20
    assert chosen
    assert alerting
    assert shown | chosen | alerting <= exposed


def image_command(**more: str) -> list[str]:
    """`serve` over the fake backend with the variables of the image, and these."""
    given = {name: value for name, value in environment("cpu").items() if name.startswith("DRAFTLOOP_")} | more
    assignments = [f"{name}={value}" for name, value in given.items()]
    return ["env", *assignments, sys.executable, "-m", "tests.fake_backend"]


def health(**given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DOCKER / "healthcheck.py"],
        env=clean_environment() | given,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_a_container_without_a_key_says_so_and_ends():
    done = subprocess.run(
        image_command(), cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("serve: --host (DRAFTLOOP_HOST): 0.0.0.0 is reachable")
    assert "--api-key" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_container_with_keys_is_healthy_and_lets_prometheus_in(tmp_path):
    # As compose joins them where Prometheus has a key of its own.
    command = image_command(DRAFTLOOP_API_KEY="alice=K1,prometheus=K2")
    with running_process(command, tmp_path / "capture.db") as server:
        port = str(httpx.URL(server.url).port)
        assert health(DRAFTLOOP_PORT=port).returncode == 0
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/metrics", headers={"Authorization": "Bearer K2"}).status_code == 200
    gone = health(DRAFTLOOP_PORT=port)
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"http://127.0.0.1:{port}/health: ")
    assert gone.stderr.count("\n") == 1


def compose(*arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Compose itself on our files; skips where there is none."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        version = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
        if version.returncode or int(version.stdout.strip().lstrip("v").split(".")[0]) < 2:
            continue
        return subprocess.run(
            [*command, "--env-file", "/dev/null", "-f", DOCKER / "compose.yaml", *arguments],
            env=clean_environment() | given,
            capture_output=True,
            text=True,
            timeout=60,
        )
    pytest.skip("Docker Compose 2 is not installed")


def test_compose_wants_a_key_and_says_which():
    assert COMPOSE["services"]["draftloop"]["environment"]["DRAFTLOOP_API_KEY"].startswith("${DRAFTLOOP_API_KEY:?")
    refused = compose("config", "--quiet")
    assert "required variable DRAFTLOOP_API_KEY is missing" in refused.stderr


@pytest.mark.parametrize(("own_key", "keys", "prometheus"), [("", "K1", "K1"), ("K2", "K1,prometheus=K2", "K2")])
def test_compose_gives_prometheus_a_key_that_the_server_knows(own_key, keys, prometheus):
    done = compose("config", "--format", "json", DRAFTLOOP_API_KEY="K1", DRAFTLOOP_METRICS_KEY=own_key)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert read["services"]["draftloop"]["environment"]["DRAFTLOOP_API_KEY"] == keys
    assert read["configs"]["metrics_key"]["content"] == prometheus
    assert set(read["services"]) == {"draftloop", "prometheus", "grafana"}


def test_compose_accepts_the_gpu_and_a_vllm_behind_it():
    files = ("-f", str(DOCKER / "compose.cuda.yaml"))
    done = compose(*files, "--profile", "vllm", "config", "--format", "json", DRAFTLOOP_API_KEY="K1")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert services["draftloop"]["build"]["target"] == "cuda"
    assert services["draftloop"]["deploy"]["resources"]["reservations"]["devices"]
    (speculation,) = [flag for flag in services["vllm"]["command"] if flag.startswith("--speculative-config=")]
    assert json.loads(speculation.partition("=")[2]) == {"method": "mtp", "num_speculative_tokens": 2}
