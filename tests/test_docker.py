"""What the images and compose.yaml say to the command line is what it understands. Nothing is built here."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from atoll.comm.cli import cli
from atoll.comm.config.load import load_dataclass, load_run
from atoll.comm.config.shipped import run_file
from atoll.comm.extras import EXTRA_OF
from atoll.comm.invite import split_host_port
from atoll.comm.xdg import FORMER, default_state_dir
from atoll.node.config import NodeConfig

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("coordinator", "node")
HOME, STATE = Path("/home/atoll"), "/var/lib/atoll"
HELP = {"-h", "--help"}
Service = dict[str, Any]


def parse(args: list[str]) -> click.Context:
    """What `atoll ARGS` would run, with its parameters; raises `click.UsageError` as it would."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), args[0])
        assert found is not None, f"there is no command {args[0]!r}"
        command, args = found, args[1:]
    return command.make_context(
        command.name, [a for a in args if a not in HELP], resilient_parsing=args == ["--help"]
    )


@pytest.fixture(scope="module")
def everything() -> dict[str, Service]:
    loaded: dict[str, Service] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    return loaded


@pytest.fixture(scope="module")
def services(everything: dict[str, Service]) -> dict[str, Service]:
    """Those that are Atoll's own."""
    return {name: service for name, service in everything.items() if "build" in service}


def called(service: Service) -> click.Context:
    """The `atoll` command of a service, also where a shell starts it."""
    args = [arg.replace("$$", "$") for arg in service["command"]]
    if "entrypoint" not in service:
        return parse(args)
    assert service["entrypoint"] == ["sh", "-c"] and len(args) == 1
    assert subprocess.run(["sh", "-n", "-c", args[0]]).returncode == 0
    words = shlex.split(args[0].partition(">")[0])
    return parse(words[words.index("atoll") + 1 :])


def nodes(services: dict[str, Service]) -> list[str]:
    return [name for name, service in services.items() if called(service).command.name == "join"]


def mounts(service: Service) -> dict[str, str]:
    """Path in the container: volume."""
    return {path: volume for volume, path, *_ in (text.split(":") for text in service["volumes"])}


def stages(image: str) -> list[list[tuple[str, str]]]:
    """A Dockerfile's instructions, by stage."""
    text = (ROOT / f"docker/{image}.Dockerfile").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", "")
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest.strip()))
    return found


def last(image: str, word: str) -> str:
    return [rest for found, rest in stages(image)[-1] if found == word][-1]


def argument(image: str, name: str) -> str:
    """The default of a build argument."""
    given = [
        rest for stage in stages(image) for word, rest in stage if word == "ARG" and rest.startswith(name + "=")
    ]
    return given[0].partition("=")[2].strip('"')


def test_compose_gives_the_run_as_many_nodes_as_it_waits_for(services: dict[str, Service]) -> None:
    given = called(services["coordinator"]).params
    run = load_run(run_file(given["run_yaml"]), given["overrides"])
    assert run.members.start == len(nodes(services)) >= run.members.minimum
    assert called(services["invite"]).params["uses"] >= len(nodes(services))


def test_compose_nodes_can_reach_the_coordinator_and_the_operator_its_page(services: dict[str, Service]) -> None:
    given = called(services["coordinator"]).params
    host, port = split_host_port(given["advertise"], "--advertise")
    assert host in services and called(services[host]).command.name == "start"
    assert port == split_host_port(given["listen"], "--listen")[1]
    published = [text.rpartition(":")[2] for text in services["coordinator"]["ports"]]
    assert published == [str(split_host_port(given["http"], "--http")[1])]


def test_compose_hands_the_join_url_over(services: dict[str, Service]) -> None:
    waited_for = {"coordinator": "service_healthy", "invite": "service_completed_successfully"}
    written = services["invite"]["command"][0].partition("> ")[2]
    folder = str(Path(written).parent)
    assert services["invite"]["depends_on"] == {"coordinator": {"condition": waited_for["coordinator"]}}
    assert mounts(services["invite"])[STATE] == mounts(services["coordinator"])[STATE]
    for name in nodes(services):
        assert called(services[name]).params["url"] == f"$(cat {written})"
        assert mounts(services[name])[folder] == mounts(services["invite"])[folder]
        assert services[name]["depends_on"] == {"invite": {"condition": waited_for["invite"]}}
    for image in IMAGES:
        assert re.search(rf"install -d -o atoll -g atoll [^&]*{folder}\b", last(image, "RUN"))


def test_compose_nodes_share_neither_state_nor_name_and_their_settings_exist(services: dict[str, Service]) -> None:
    joined = nodes(services)
    assert len({mounts(services[name])[STATE] for name in joined}) == len(joined)
    assert len({services[name]["hostname"] for name in joined}) == len(joined)
    for name in joined:
        load_dataclass(NodeConfig, None, called(services[name]).params["overrides"])


def test_monitoring_is_asked_for_and_finds_the_coordinator_and_every_node(
    everything: dict[str, Service], services: dict[str, Service]
) -> None:
    others = {name: service for name, service in everything.items() if name not in services}
    assert others and all(service["profiles"] == ["monitoring"] for service in others.values())
    for service in others.values():
        assert ":" in service["image"] and all(port.startswith("127.0.0.1:") for port in service["ports"])
        folders = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith(".")]
        assert folders and all((ROOT / "docker" / folder).is_dir() for folder in folders)
    scraped = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for config in job["static_configs"] for target in config["targets"]]
    page = split_host_port(called(services["coordinator"]).params["http"], "--http")[1]
    own = {split_host_port(called(services[name]).params["metrics"], "--metrics")[1] for name in nodes(services)}
    assert len(own) == 1
    assert sorted(targets) == sorted(
        [f"coordinator:{page}", *(f"{name}:{own.copy().pop()}" for name in nodes(services))]
    )


@pytest.mark.parametrize("image", IMAGES)
def test_images_run_a_command_that_exists_as_a_user_without_rights(image: str) -> None:
    user = re.search(r"useradd --uid (\d+) --create-home atoll", last(image, "RUN"))
    assert user and int(user[1]) > 0 and last(image, "USER") == user[1]
    after = [word for word, _ in stages(image)[-1]]
    assert not {"RUN", "COPY", "ADD"} & set(after[after.index("USER") :])
    assert json.loads(last(image, "ENTRYPOINT")) == ["atoll"]
    parse(json.loads(last(image, "CMD")))


def test_images_users_can_read_each_others_files() -> None:
    assert last("coordinator", "USER") == last("node", "USER")


@pytest.mark.parametrize("image", IMAGES)
def test_images_default_state_directory_is_the_volume(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert last(image, "VOLUME") == STATE
    (link,) = re.findall(rf"ln -s {STATE} (\S+)", last(image, "RUN"))
    assert f"HOME={HOME} " in last(image, "ENV")
    monkeypatch.setenv("HOME", str(tmp_path))
    there = tmp_path / Path(link).relative_to(HOME)
    there.parent.mkdir(parents=True)
    (tmp_path / "volume").mkdir()
    there.symlink_to(tmp_path / "volume")
    assert default_state_dir(image, {}) == there == FORMER.expanduser() / image


def test_coordinator_image_listens_where_it_says_and_looks_at_its_own_page() -> None:
    given = parse(json.loads(last("coordinator", "CMD"))).params
    load_run(run_file(given["run_yaml"]), given["overrides"])
    ports = [split_host_port(given[what], what) for what in ("listen", "http")]
    assert {host for host, _ in ports} == {"0.0.0.0"}
    assert last("coordinator", "EXPOSE").split() == [str(port) for _, port in ports]
    probe = json.loads(last("coordinator", "HEALTHCHECK").partition("CMD ")[2])
    assert probe[:2] == ["python", "-c"] and f"'127.0.0.1', {ports[1][1]}" in probe[2]
    compile(probe[2], "HEALTHCHECK", "exec")


def installed_extras(image: str) -> set[str]:
    """The extras whose requirements the image's build installs."""
    builds = [rest for stage in stages(image) for word, rest in stage if word == "RUN" and "tomllib" in rest]
    assert len(builds) == 1 and 'project["dependencies"]' in builds[0]
    return set(EXTRA_OF.values()) & set(re.findall(r'\["(\w+)"\]', builds[0]))


def test_images_have_the_extras_that_they_are_for() -> None:
    assert installed_extras("coordinator") == {"wandb"}
    assert installed_extras("node") >= {"node", "text"}


def test_coordinator_imports_nothing_that_its_image_leaves_out() -> None:
    left_out = [package for package, extra in EXTRA_OF.items() if extra not in installed_extras("coordinator")]
    assert {"torch", "numba"} <= set(left_out)
    probe = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1:])); "
        "import atoll.comm.cli, atoll.coordinator.server; "
        "atoll.comm.cli.cli(['--help'], standalone_mode=False)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe, *left_out], timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_node_image_has_the_torch_that_make_installs() -> None:
    makefile = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile and argument("node", "TORCH") == makefile[1]


def test_build_context_has_every_package() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.split(".")[1] for name in pyproject["tool"]["setuptools"]["packages"]}
    assert "*" in lines
    assert let_in >= packages | {
        "pyproject.toml",
        "constraints.txt",
        "configs",
        *pyproject["project"]["license-files"],
    }
