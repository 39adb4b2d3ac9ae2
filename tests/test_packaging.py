"""Every folder that holds Python is listed in pyproject.toml, and the wheel has what the packages read."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from atoll.comm import extras

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("node", "coordinator", "outer_opt", "comm", "configs")
READ = {".yaml", ".html", ".css", ".js", ".txt", ".typed", ".pyi", ".proto", ".json"}  # besides Python


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    on_disk = {
        "atoll." + ".".join(init.parent.relative_to(ROOT).parts)
        for top in PACKAGES
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert on_disk == set(project["tool"]["setuptools"]["packages"])


def test_the_wheel_has_every_file_that_the_packages_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listing = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    tracked = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in tracked if (ROOT / name).is_file()]
    for file in (*files, Path("pyproject.toml"), Path("README.md"), Path("LICENSE")):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes((ROOT / file).read_bytes())
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-P", "-c", build, tmp_path], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    within = {name.removeprefix("atoll/") for name in zipfile.ZipFile(wheel).namelist()}
    expected = {str(file) for file in files if file.suffix in {".py", *READ}}
    assert "configs/methods/diloco.yaml" in expected and expected <= within
    unread = {file.suffix for file in files} - {".py", ".sh", *READ}
    assert not unread, f"do the packages read these? package-data does not name them: {unread}"


def test_each_extra_that_an_error_names_brings_the_package(project: dict[str, Any]) -> None:
    brought = project["project"]["optional-dependencies"]
    for package, extra in extras.EXTRA_OF.items():
        assert any(requirement.startswith(package) for requirement in brought[extra]), (package, extra)
        assert not any(requirement.startswith(package) for requirement in project["project"]["dependencies"])
    (everything,) = brought["all"]
    apart = {"datasets", "eval", "p2p", "parquet", "titan"}  # large, or want an environment of their own
    named = set(everything.removeprefix("atoll[").removesuffix("]").split(","))
    assert named == set(extras.EXTRA_OF.values()) - apart


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert extras.lacking("a node", "torch", "numba") == (
        'a node needs torch, not installed here: pip install ".[node]" in Atoll\'s clone'
    )
    with pytest.raises(extras.MissingPackage, match=r'needs torch and wandb, .*pip install ".\[node,wandb\]"'):
        extras.demand("this", "torch", "wandb")
    assert extras.lacking("this", "numpy") == ""
