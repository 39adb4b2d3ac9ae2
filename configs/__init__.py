"""The runs and outer methods that come with Atoll: YAML files, installed with it."""

from pathlib import Path

FOLDER = Path(__file__).parent
DEMO = FOLDER / "demo.yaml"
METHODS = FOLDER / "methods"
