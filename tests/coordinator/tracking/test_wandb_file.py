"""The file that wandb keeps a run in, where it has no record yet."""

from pathlib import Path

import pytest

from atoll.coordinator.tracking import wandb_file


@pytest.mark.parametrize("length", range(wandb_file.HEADER + 1))
def test_a_file_whose_head_is_being_written_has_no_records_yet(length: int, tmp_path: Path) -> None:
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(b":W&B\xec\x3f\x00"[:length])
    assert list(wandb_file.records(file)) == [] and wandb_file.last_step(file) == 0
    wandb_file.tidy(file)
    assert file.with_name("run-abc.wandb.synced").exists(), "no sync is to stop at it"


@pytest.mark.parametrize("there", [0, 3, wandb_file.HEADER])
def test_a_file_whose_bytes_a_power_cut_took_has_no_records(there: int, tmp_path: Path) -> None:
    """Of which the file system kept the length."""
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(b":W&B\xec\x3f\x00"[:there].ljust(wandb_file.BLOCK + 1, b"\0"))
    assert wandb_file.last_step(file) == 0, "the run goes on in another file"
    wandb_file.tidy(file)
    assert file.with_name("run-abc.wandb.synced").exists(), "no sync is to stop at it"


def test_another_file_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(b"loss,round\n")
    with pytest.raises(ValueError, match="run-abc.wandb is no file of wandb's"):
        list(wandb_file.records(file))
