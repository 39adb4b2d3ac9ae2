"""Packages with entry points, installed in a folder: the sample package as a wheel, others by what they consist
of."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

SAMPLE = Path(__file__).resolve().parent / "plugins" / "atoll_sample"
BUILD = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"


def install_sample(target: Path, work: Path) -> None:
    """Build the sample package's wheel in `work` and install it in `target`, as pip install --target does."""
    source = shutil.copytree(SAMPLE, work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-P", "-c", BUILD, work], cwd=source, check=True, capture_output=True)
    (wheel,) = work.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)


def write_package(folder: Path, name: str, group: str, entry: str, code: str = "", version: str = "1.0") -> None:
    """A package of one module and one entry point, `entry` as in NAME = "module:function", in `folder`."""
    module = entry.partition("=")[2].strip().partition(":")[0]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    (folder / f"{module}.py").write_text(code)
