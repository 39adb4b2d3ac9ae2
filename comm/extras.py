"""The optional parts of an installation: who lacks one is told in a sentence what to install.

`pip install atoll` is what an operator needs, and who exports a model. What a node, a chart or a service needs
besides is an extra of pyproject.toml. Commands ask here before they begin, so that nobody is stopped half-way.
"""

from importlib.util import find_spec

from atoll.comm.errors import ResourceError

EXTRA_OF = {
    "accelerate": "hf",
    "datasets": "datasets",
    "hivemind": "p2p",
    "huggingface_hub": "hub",
    "jinja2": "text",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "numba": "node",
    "peft": "hf",
    "pyarrow": "parquet",
    "s3fs": "s3",
    "safetensors": "hf",
    "textual": "top",
    "tensorboardX": "tensorboard",
    "tokenizers": "text",
    "torch": "node",
    "torchtitan": "titan",
    "transformers": "hf",
    "triton": "titan",
    "wandb": "wandb",
    "wandb_workspaces": "wandb",
}


class MissingPackage(ResourceError):
    """A Python package that an extra brings is not installed here."""


def installed(package: str) -> bool:
    """Whether `package` is there; it is not imported."""
    return find_spec(package) is not None


def lacking(what: str, *packages: str) -> str:
    """A sentence about those of the packages that are not installed and how to get them; empty if all are there.
    `what` is its subject, such as `atoll demo`."""
    missing = [package for package in packages if not installed(package)]
    extras = ",".join(sorted({EXTRA_OF[package] for package in missing}))
    names, install = " and ".join(missing), f'pip install ".[{extras}]" in Atoll\'s clone'
    return f"{what} needs {names}, not installed here: {install}" if missing else ""


def demand(what: str, *packages: str) -> None:
    """Raise `MissingPackage` unless all of these packages are installed; `what` is the sentence's subject."""
    if sentence := lacking(what, *packages):
        raise MissingPackage(sentence)
