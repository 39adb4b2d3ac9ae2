"""`atoll export --push ORG/NAME`: an exported folder goes to the Hugging Face Hub, by huggingface_hub.

A repository is made private unless the user says otherwise, and one that is public already is not written to as if
it were private. What an upload that was cut short has sent is not sent again: the same call goes on. The token is
where huggingface_hub keeps it (`hf auth login`, HF_TOKEN); the Hub's address is HF_ENDPOINT's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from atoll.comm.errors import AtollError, ConfigError, Refused, Unreachable
from atoll.comm.extras import demand

RETRY_INTERVALS = (5.0, 15.0, 60.0, 180.0)  # seconds before each further try
TRANSIENT = {408, 429, 500, 502, 503, 504}  # HTTP status codes after which trying again may help
NOT_SENT = [".cache/*", ".cache/**"]  # huggingface_hub's own notes
# Weights of an earlier push that this one does not replace: in more files, or as adapters.
STALE = [
    *("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"),
    *("adapter_model*.safetensors", "adapter_model.safetensors.index.json", "adapter_config.json"),
]
TAG = "atoll"  # of each card
EMPTY = {".gitattributes"}  # files of a repository into which nothing was pushed


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A model repository to push to."""

    name: str  # ORG/NAME
    public: bool = False
    endpoint: str | None = None  # None: huggingface_hub's own
    overwrite: bool = False  # replace a model that no export has pushed


def check(repository: HubRepository) -> None:
    """Raise `ConfigError`, or `MissingPackage`, if nothing can be pushed, before anything else is done."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository.name):
        raise ConfigError(f"--push is {repository.name!r}: write ORG/NAME, an organisation or user and a model")
    demand("atoll export --push", "huggingface_hub")
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(
            "there is no Hugging Face token on this machine: run `hf auth login`, or set HF_TOKEN, with one that "
            f"may write to {repository.name}"
        )


def push(
    folder: Path, repository: HubRepository, message: str, wait: Callable[[float], object] | None = None
) -> str:
    """Send the files of `folder` as a commit with this message, and return the repository's URL. Passing failures
    are tried again after `RETRY_INTERVALS`, by `wait`. Raises `ConfigError`, `Refused`, `Unreachable`."""
    check(repository)
    for interval in (*RETRY_INTERVALS, None):
        try:
            return _push(folder, repository, message)
        except AtollError:
            raise
        except Exception as error:  # of the HTTP client, the file system, or the Hub
            sentence = _sentence(repository, error)
            if isinstance(sentence, Unreachable) and interval is not None:
                (wait or sleep)(interval)
                continue
            raise sentence from None
    raise AssertionError("the last try returns or raises")


def _push(folder: Path, repository: HubRepository, message: str) -> str:
    from huggingface_hub import HfApi

    api, name = HfApi(endpoint=repository.endpoint, library_name="atoll"), repository.name
    url = str(api.create_repo(name, private=not repository.public, exist_ok=True))
    there = api.model_info(name)
    if not repository.public and there.private is False:
        raise ConfigError(f"{url} is public already: give --public to push there, or another --push ORG/NAME")
    files = {file.rfilename for file in there.siblings or ()} - EMPTY
    if files and TAG not in (there.tags or ()) and not repository.overwrite:
        raise ConfigError(
            f"{url} has {min(files)}, and its card no tag {TAG!r}: no export has pushed there. Give another "
            "--push ORG/NAME, or --overwrite to replace its model"
        )
    api.upload_folder(
        repo_id=name,
        folder_path=folder,
        commit_message=message,
        ignore_patterns=list(NOT_SENT),
        delete_patterns=list(STALE),
    )
    return url


def _sentence(repository: HubRepository, error: Exception) -> AtollError:
    """The failure as a sentence; `Unreachable`: trying again may help."""
    cause: BaseException | None = error  # the Hub's answer may be behind an error of the upload
    while cause is not None and not hasattr(cause, "response"):
        cause = cause.__cause__
    status: int | None = getattr(getattr(cause, "response", None), "status_code", None)
    error = cause if isinstance(cause, Exception) else error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    name = repository.name
    if status in (401, 403):
        return Refused(
            f"the Hub refuses to write {name} ({status}: {reason}): the token must be of somebody who may write "
            "there, with write permission (hf auth login, HF_TOKEN)"
        )
    if status is not None and status not in TRANSIENT:
        return Refused(f"the Hub refuses {name} ({status}: {reason})")
    if isinstance(error, ValueError) and status is None:
        return ConfigError(f"--push {name} cannot be done: {reason}")
    return Unreachable(
        f"{name} could not be sent to the Hub ({reason}): what was sent is not sent again, give the same command "
        "once more"
    )
