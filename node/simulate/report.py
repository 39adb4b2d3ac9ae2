"""Files that a simulation leaves behind: curves, a summary, a picture."""

import csv
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.comm.errors import ResourceError
from atoll.comm.extras import installed
from atoll.node.simulate.simulation import RunOutcome

FIELDS = ("fragment", "round", "time", "tokens", "members", "bytes_sent", "train_loss", "val_loss")
TRIAL_SIZE = 1 << 16  # bytes that the folder must take before anything is trained


def summary(outcomes: Sequence[RunOutcome], baseline_of: dict[str, str]) -> list[dict[str, Any]]:
    """Figures in one row a run; `against_baseline` is the validation loss relative to data parallelism with the
    same inner optimizer."""
    by_label = {outcome.label: outcome for outcome in outcomes}
    rows = []
    for outcome in outcomes:
        row = {key: value for key, value in asdict(outcome).items() if key != "records"}
        row["reduction"] = outcome.reduction if math.isfinite(outcome.reduction) else None
        baseline = by_label.get(baseline_of.get(outcome.label, ""))
        row["against_baseline"] = outcome.val_loss / baseline.val_loss - 1 if baseline else None
        rows.append(row)
    return rows


def prepare(folder: Path) -> None:
    """Make the folder, and see that it takes files. Raises `ResourceError` if it does not."""
    with _in_sentences(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIAL_SIZE))


def write(folder: Path, outcomes: Sequence[RunOutcome], rows: Sequence[dict[str, Any]], settings: Any) -> None:
    """Write `LABEL.jsonl` and `curves.csv` with every round, `summary.json`, and `comparison.png` if there is
    matplotlib. Raises `ResourceError`."""
    with _in_sentences(folder):
        with (folder / "curves.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("method", *FIELDS))
            for outcome in outcomes:
                records = [asdict(record) for record in outcome.records]
                table.writerows((outcome.label, *(record[key] for key in FIELDS)) for record in records)
                lines = "".join(json.dumps(record) + "\n" for record in records)
                (folder / f"{outcome.label}.jsonl").write_text(lines)
        (folder / "summary.json").write_text(json.dumps({"runs": rows, "settings": settings}, indent=2) + "\n")
        if installed("matplotlib"):
            picture(folder / "comparison.png", outcomes)


@contextmanager
def _in_sentences(folder: Path) -> Iterator[None]:
    """A folder that is read-only, full or no folder is no fault of the program."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"--out {folder} cannot be used ({error}): give another --out") from None


def picture(path: Path, outcomes: Sequence[RunOutcome]) -> None:
    """Draw the validation loss over tokens, and over the bytes that a node has sent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    tokens, sent = figure.subplots(1, 2, sharey=True)
    for outcome in outcomes:
        evaluated = [record for record in outcome.records if record.val_loss is not None]
        label = f"{outcome.label}: {outcome.val_loss:.3f}"
        losses = [record.val_loss for record in evaluated]
        tokens.plot([record.tokens for record in evaluated], losses, label=label, linewidth=1.4)
        after_bytes = [record for record in evaluated if record.bytes_sent > 0]
        if after_bytes:
            losses = [record.val_loss for record in after_bytes]
            sent.plot([record.bytes_sent for record in after_bytes], losses, linewidth=1.4)
    tokens.set_xlabel("tokens committed")
    tokens.set_ylabel("validation loss of the anchor, nats a token")
    sent.set_xlabel("bytes that a node has sent")
    sent.set_xscale("log")
    tokens.legend(fontsize=8)
    for axes in (tokens, sent):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
