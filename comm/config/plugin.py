"""Parts of a run that packages outside Atoll have, named in the run's configuration: entry points of Python
packages.

A run's configuration comes from elsewhere, and a plugin is code. So a node takes one only from a package that its
owner has installed, and imports nothing but the entry point of that name in that group; it never installs any.
Nodes look before they train (`Plugin.find`, which imports nothing) and call where the part is needed
(`Plugin.call`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from atoll.comm.config.rules import Rule
from atoll.comm.errors import AtollError, ConfigError, ResourceError

NAME = r"[\w.-]{1,100}"  # of an entry point
PACKAGE = r"[A-Za-z0-9][\w.-]{0,99}(==[\w.!+-]{1,50})?"  # a distribution, and its version


class PluginGroup(StrEnum):
    """The parts of a run that a plugin can be, by their group of entry points."""

    MODELS = "atoll.models"  # ModelConfig -> torch.nn.Module
    DATA = "atoll.data"  # (RunConfig, NodeConfig) -> atoll.node.data.samples.Source
    OUTER = "atoll.outer"  # OuterConfig -> atoll.outer_opt.schedule.Schedule


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that a run's configuration names."""

    group: PluginGroup
    key: str  # of the run's configuration that names it
    name: str
    packages: tuple[str, ...]  # NAME or NAME==VERSION: those that the run's operator says have its plugins

    def find(self) -> EntryPoint:
        """The entry point on this machine; nothing is imported. Raises `ResourceError` with what to install where
        none is there, where several packages have it, or where it is of another package or version."""
        found = tuple(entry_points(group=self.group, name=self.name))
        what = f"{self.key} is {self.name}"
        if not found:
            raise ResourceError(
                f"{what}, and no package on this machine has the entry point {self.name} in the group "
                f"{self.group}: {self._remedy}; a node installs none by itself"
            )
        owners = [_owner(entry) for entry in found]
        if len(found) > 1:
            names = " and ".join(name for name, _ in owners)
            raise ResourceError(
                f"{what}, and {names} each have the entry point {self.name} in the group {self.group}: uninstall "
                "all but the one that the run needs"
            )
        ((name, version),) = owners
        wanted = {normalised(package): version for package, version in map(_parts, self.packages)}
        if wanted and wanted.get(normalised(name)) not in ("", version):
            raise ResourceError(
                f"{what}, and the entry point {self.name} in the group {self.group} is of {name}=={version} on "
                f"this machine: {self._remedy}"
            )
        return found[0]

    def call(self, *arguments: object) -> Any:
        """Import the entry point's function and call it; returns what it returns. Raises `ResourceError` as `find`
        does, `ConfigError` where it cannot be imported or fails."""
        entry = self.find()
        try:
            return entry.load()(*arguments)
        except AtollError:
            raise
        except Exception as error:  # the package's code may raise anything
            raise self.unusable(f"failed: {type(error).__name__}: {error}") from error

    def unusable(self, why: str) -> ConfigError:
        """The error of a plugin that is installed and does not do what it must; `why` goes on the sentence."""
        return ConfigError(f"{self.key}={self.name} (entry point of the group {self.group}) {why}")

    @property
    def package(self) -> str:
        """NAME==VERSION of the package of this machine that has the entry point; empty: there is none, or
        several."""
        try:
            return "==".join(_owner(self.find()))
        except ResourceError:
            return ""

    @property
    def _remedy(self) -> str:
        if not self.packages:
            return "ask the run's operator which package has it, and install that here if you trust it"
        return f"install what the run's operator names ({', '.join(self.packages)}) here if you trust it"


def name_rules(key: str, name: str) -> Iterator[Rule]:
    """Rules of a plugin's name; empty: there is none."""
    yield (
        not name or re.fullmatch(NAME, name, re.ASCII) is not None,
        f"{key} is {name!r}: write the name of an entry point, of letters, digits, '_', '-' and '.'",
    )


def package_rules(packages: list[str]) -> Iterator[Rule]:
    """Rules of the packages that people are told to install."""
    for package in packages:
        yield (
            re.fullmatch(PACKAGE, package, re.ASCII) is not None,
            f"plugin_packages has {package!r}: write the name of a package, or NAME==VERSION",
        )


def normalised(package: str) -> str:
    """The name of a package as all ways to write it are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _parts(package: str) -> tuple[str, str]:
    name, _, version = package.partition("==")
    return name, version


def _owner(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of the package that an entry point is of."""
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("an unknown package", "")
