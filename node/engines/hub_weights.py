"""Fetches the files of a model's weights from the Hugging Face Hub into this machine's cache of it.

A run's config names the repository, and comes from elsewhere: so nothing is fetched that is larger than the run's
model can be, or than the disk has room for. While bytes arrive the caller is told how far it is, and only then: a
download that stands still says nothing.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.comm.config.model_source import hub_repository
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import demand

WEIGHTS, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model-*.safetensors"
REPORT_SECONDS = 10.0  # between two sentences on how far it is
DISK_RESERVE_BYTES = 1 << 30  # that stay free on the disk
GB = 1e9


class NotFetched(ResourceError):
    """The hub does not give a repository's files to this machine."""


@dataclass(frozen=True)
class RemoteFiles:
    """The files of a repository's weights, as the hub lists them."""

    commit: str
    sizes: dict[str, int]  # bytes, by name


def fetch_weights(
    url: str,
    largest: int | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
    interval: float = REPORT_SECONDS,
) -> Path:
    """The folder with the weights of hf://org/name[@revision] in this machine's cache of the hub; files that it
    lacks are fetched. `largest`: bytes that all files may have together; None: as many as they like. `tell`,
    called by any thread each `interval` seconds in which bytes have come, takes sentences. Raises `ConfigError`
    where the files are larger, `ResourceError` where the disk has no room for them, `NotFetched` where the hub
    does not give them."""
    demand(f"the weights of {url}", "huggingface_hub")
    from huggingface_hub import snapshot_download

    name, revision = hub_repository(url)
    try:
        remote = list_files(name, revision)
    except Exception as error:  # the hub's client raises its own, and those of two HTTP libraries
        raise _failure(url, error) from None
    check_size(url, remote, largest)
    missing = missing_bytes(name, remote)
    check_room(url, missing)
    with told_progress(name, missing, tell, interval):
        try:
            patterns = _patterns(INDEX in remote.sizes)
            return Path(snapshot_download(name, revision=remote.commit, allow_patterns=patterns))
        except Exception as error:
            raise _failure(url, error) from None


def list_files(name: str, revision: str | None) -> RemoteFiles:
    """The repository's files of weights: shards and their index where it has one, else the only file. Raises what
    the hub's client raises."""
    from fnmatch import fnmatch

    from huggingface_hub import HfApi

    api = HfApi()
    commit = str(api.model_info(name, revision=revision).sha)
    found = {
        str(entry.path): int(entry.size)
        for entry in api.list_repo_tree(name, revision=commit)
        if hasattr(entry, "size")
    }
    patterns = _patterns(INDEX in found)
    return RemoteFiles(
        commit, {file: size for file, size in found.items() if any(fnmatch(file, p) for p in patterns)}
    )


def newest_cached(url: str) -> Path | None:
    """The newest folder with weights of hf://org/name in this machine's cache of the hub, of whatever revision;
    None: there is none."""
    name, _ = hub_repository(url)
    folders = [
        folder
        for folder in (_repository(name) / "snapshots").glob("*")
        if (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    ]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def check_size(url: str, remote: RemoteFiles, largest: int | None) -> None:
    """Raise `ConfigError` where the files have more bytes than `largest`."""
    total = sum(remote.sizes.values())
    if largest is not None and total > largest:
        raise ConfigError(
            f"the weights in {url} have {total / GB:,.3f} GB, and those of hf.config's model at most "
            f"{largest / GB:,.3f} GB: nothing was fetched; hf.base must be of the same model as hf.config"
        )


def missing_bytes(name: str, remote: RemoteFiles) -> int:
    """The bytes of the files that the cache lacks."""
    from huggingface_hub import try_to_load_from_cache

    return sum(
        size
        for file, size in remote.sizes.items()
        if not isinstance(try_to_load_from_cache(name, file, revision=remote.commit), str)
    )


def check_room(url: str, missing: int) -> None:
    """Raise `ResourceError` where the disk of the hub's cache has no room for so many bytes more."""
    cache = _cache()
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if missing and missing + DISK_RESERVE_BYTES > free:
        raise ResourceError(
            f"the weights in {url} take another {missing / GB:,.3f} GB in {cache}, whose disk has "
            f"{free / GB:,.3f} GB free, of which {DISK_RESERVE_BYTES / GB:.1f} stay free: make room, set HF_HOME "
            "to a folder on a larger disk, or give a folder that has them, base=FOLDER"
        )


@contextmanager
def told_progress(name: str, missing: int, tell: Callable[[str], None], interval: float) -> Iterator[None]:
    """Tell how much of a repository's `missing` bytes has come, while the context lasts."""
    blobs, over = _repository(name) / "blobs", threading.Event()
    before = last = _bytes_in(blobs)

    def watch() -> None:
        nonlocal last
        while not over.wait(interval):
            if (now := _bytes_in(blobs)) != last:
                last = now
                done = min(max(now - before, 0), missing)
                share = f"{100 * done / missing:.0f} % of {missing / GB:,.3f} GB"
                tell(f"fetches the run's frozen weights: {share}")

    if not missing:
        yield
        return
    tell(f"fetches the run's frozen weights: {missing / GB:,.3f} GB")
    thread = threading.Thread(target=watch, name="fetch progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _patterns(sharded: bool) -> list[str]:
    return [INDEX, SHARDS] if sharded else [WEIGHTS]


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repository(name: str) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return _cache() / str(repo_folder_name(repo_id=name, repo_type="model"))


def _bytes_in(folder: Path) -> int:
    """The bytes of the files in a folder, some of which may go meanwhile."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def _failure(url: str, error: Exception) -> NotFetched:
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    return NotFetched(
        f"cannot fetch the run's frozen weights {url}: {said}; or give a folder that has them, base=FOLDER"
    )
