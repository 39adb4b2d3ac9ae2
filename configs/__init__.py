"""The runs and outer methods that come with Atoll: YAML files, installed with it."""

from pathlib import Path

FOLDER = Path(__file__).parent
DEMO = FOLDER / "demo.yaml"
METHODS = FOLDER / "methods"


def names(folder: Path) -> list[str]:
    """What the YAML files of a folder are called, without their suffix."""
    return sorted(file.stem for file in folder.glob("*.yaml"))
