"""A run of plugins: nodes that have the sample package train, and one without it is refused with a sentence."""

import json
import subprocess
from pathlib import Path

import pytest
from e2e.harness import ATOLL, Run, until
from plugin_packages import install_sample

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]

PLUGINS = (
    *("model.plugin=bigram", "data.kind=plugin", "data.plugin=counting", "outer.plugin=heavy-ball"),
    *("plugin_packages=[atoll-sample==0.1.0]", "outer.momentum=0.5", "inner.lr=0.05", "inner.warmup_tokens=64"),
)


def exports(state_dir: Path, out: Path, *options: str, code: int) -> subprocess.CompletedProcess[str]:
    command = [*ATOLL, "export", str(state_dir), "--out", str(out), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done


def losses(run: Run) -> list[float]:
    return [record["val_loss"] for record in run.rounds() if record["val_loss"] is not None]


def test_nodes_with_the_package_train_and_agree_and_one_without_it_is_told_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work := tmp_path / "work").mkdir()
    install_sample(tmp_path / "site", work)
    run.start(*PLUGINS)  # the coordinator has no plugin
    url = run.invite(3)
    assert run.join(url, "without").wait(60) == 3
    assert "install what the run's operator names (atoll-sample==0.1.0) here" in run.log("without")
    assert "Traceback" not in run.log("without")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    for name in ("one", "two"):
        run.join(url, name)
    run.commit_after(8)
    run.whole(8)
    until("a loss far below that of a guess, 5.5", lambda: min(losses(run)) < 2.5)
    exported = json.loads(exports(run.folder / "one", tmp_path / "model", code=0).stdout)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert exported["round"] > 0 and config["model"]["plugin"] == "bigram" and "architectures" not in config
    card = (tmp_path / "model" / "README.md").read_text()
    assert "the plugin bigram" in card and "the plugin heavy" in card and "those of the plugin" in card
    refused = exports(run.folder / "one", tmp_path / "llama", "--layout", "llama", code=2)
    assert "trains the model of a plugin (model.plugin=bigram)" in refused.stderr
    monkeypatch.delenv("PYTHONPATH")
    assert "outer.plugin is heavy-ball, and no" in exports(run.folder / "one", tmp_path / "absent", code=3).stderr
