"""Runs and methods by name: what comes with Atoll is found from any folder, a file by its path."""

from pathlib import Path

from atoll import configs
from atoll.comm.errors import ConfigError


def run_file(run: Path) -> Path:
    """The YAML file of a run: a path, or the name of one that comes with Atoll (`demo`). Raises `ConfigError`."""
    if run.exists() and not run.is_dir():
        return run
    shipped = configs.FOLDER / f"{run}.yaml"
    if str(run) == run.name and shipped.is_file():
        return shipped
    if run.is_dir():
        raise ConfigError(f"{run} is a folder: name a run's YAML file in it")
    raise ConfigError(
        f"cannot read the config file {run}: there is none. Give a .yaml file, or the name of a run that comes "
        f"with Atoll: {', '.join(configs.names(configs.FOLDER))}"
    )


def method_file(name: str, run: Path) -> Path:
    """The YAML file of a named method: a path, or NAME.yaml in the folder `methods` beside the run's file, or
    one that comes with Atoll. Raises `ConfigError`."""
    folders = [run.resolve().parent / "methods", configs.METHODS]
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted({method for folder in folders for method in configs.names(folder)})
    raise ConfigError(f"there is no method {name!r}: name one of {', '.join(known)}, or a .yaml file")
