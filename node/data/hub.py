"""Records of what Hugging Face's `datasets` reads: from its hub, or offline from local files and folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.node.data.sources import HubSource

SAVED = ("state.json", "dataset_dict.json")  # in a folder that `save_to_disk` wrote


def hub_rows(source: HubSource, column: str, first: int) -> Iterator[Any]:
    """The values of a column from record `first` on, streamed. Raises `ConfigError` for a data set, split or
    column that is not there, and `ResourceError` when the reading fails."""
    demand(source.label, "datasets")
    records = _open(source)
    names = records.column_names or _names_of_first(records)
    if names and column not in names:
        raise ConfigError(f"{source.label} has no column {column!r}: it has {', '.join(names)}; say --column NAME")
    try:
        for record in records.select_columns([column]).skip(first):
            yield record[column]
    except Exception as error:  # whatever the format's reader raises
        raise ResourceError(f"{source.label} cannot be read further: {_line(error)}") from error


def _open(source: HubSource) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        if any((Path(source.path).expanduser() / name).is_file() for name in SAVED):
            saved = datasets.load_from_disk(str(Path(source.path).expanduser()))
            return saved[source.split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(
            source.path,
            source.name or None,
            split=source.split,
            data_files=source.data_files or None,
            data_dir=source.data_dir or None,
            revision=source.revision or None,
            streaming=True,
        )
    except Exception as error:  # of a dozen kinds
        raise ConfigError(f"{source.label} cannot be opened: {_line(error)}") from error


def _names_of_first(records: Any) -> list[str]:
    """The columns of the first record, where the data set does not say them."""
    return next((list(record) for record in records.take(1)), [])


def _line(error: Exception) -> str:
    """The first line of what the error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
