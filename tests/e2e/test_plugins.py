"""A run of plugins: nodes that have the sample package train, and one without it is refused with a sentence."""

from pathlib import Path

import pytest
from e2e.harness import Run
from plugin_packages import install_sample

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PLUGINS = (
    *("model.plugin=bigram", "data.kind=plugin", "data.plugin=counting", "outer.plugin=heavy-ball"),
    *("plugin_packages=[atoll-sample==0.1.0]", "outer.momentum=0.5", "inner.lr=0.05", "inner.warmup_tokens=64"),
)


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
    losses = [record["val_loss"] for record in run.rounds() if record.get("val_loss") is not None]
    assert losses[-1] < losses[0] / 2
