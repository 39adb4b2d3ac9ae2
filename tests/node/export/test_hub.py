"""What is pushed is in the repository, private unless it is said to be public; what was sent is not sent again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub_server import TOKEN, Hub, Repository, serving
from huggingface_hub import constants
from states import filled

from atoll.comm.errors import ConfigError, Refused, Unreachable
from atoll.node.export import hub as pushing
from atoll.node.export.command import export
from atoll.node.export.folder import FolderExporter, FolderOptions
from atoll.node.export.hub import RETRY_INTERVALS, HubRepository, push


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its store is another service, and not imitated
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    node = filled(tmp_path / "node", 1)
    FolderExporter(node.state_dir, options=FolderOptions(shard_bytes=20_000)).export(tmp_path / "out")
    return tmp_path / "out"


def repository(hub: Hub, public: bool = False) -> HubRepository:
    return HubRepository("reef/tiny", public, hub.url)


def never(seconds: float) -> None:
    raise AssertionError(f"nothing passing failed, and it waits {seconds:g} s")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_files_arrive_in_a_private_repository(hub: Hub, exported: Path) -> None:
    url = push(exported, repository(hub), "Round 1 of run tiny", never)
    there = hub.repositories["reef/tiny"]
    assert url == f"{hub.url}/reef/tiny" and there.private
    assert there.files == contents(exported) and there.commits == ["Round 1 of run tiny"]


def test_pushed_again_nothing_is_sent_and_after_a_change_only_that(hub: Hub, exported: Path) -> None:
    push(exported, repository(hub), "first", never)
    sent = list(hub.uploads)
    push(exported, repository(hub), "second", never)
    assert hub.uploads == sent and hub.repositories["reef/tiny"].commits == ["first"]
    node = exported.parent / "node"
    FolderExporter(node, options=FolderOptions(overwrite=True)).export(exported)  # in one file now
    push(exported, repository(hub), "third", never)
    assert len(hub.uploads) == len(sent) + 1
    assert hub.repositories["reef/tiny"].files == contents(exported), "what is no part of it any more is gone"


def test_a_push_that_breaks_off_goes_on_where_it_was(hub: Hub, exported: Path) -> None:
    hub.fail = [400]
    with pytest.raises(Refused, match="the Hub refuses reef/tiny"):
        push(exported, repository(hub), "first", never)
    assert not hub.repositories["reef/tiny"].commits
    push(exported, repository(hub), "first", never)
    assert sorted(hub.uploads) == sorted(hub.blobs) and len(hub.uploads) == 2, "each file was sent once"
    assert hub.repositories["reef/tiny"].files == contents(exported)


def test_what_passes_is_tried_again_for_a_while(hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, left, waited = pushing._push, [ConnectionError("reset"), TimeoutError("late")], list[float]()

    def failing(*arguments: object) -> str:
        if left:
            raise left.pop(0)
        return work(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pushing, "_push", failing)
    push(exported, repository(hub), "first", waited.append)
    assert waited == list(RETRY_INTERVALS[:2]) and hub.repositories["reef/tiny"].commits == ["first"]
    left.extend(ConnectionError("reset") for _ in range(9))
    with pytest.raises(
        Unreachable, match=r"could not be sent to the Hub \(reset\).*give the same command once more"
    ):
        push(exported, repository(hub), "first", waited.append)
    assert waited[2:] == list(RETRY_INTERVALS)


def test_a_repository_that_everybody_sees_is_written_to_only_if_that_is_said(hub: Hub, exported: Path) -> None:
    hub.repositories["reef/tiny"] = Repository(private=False)
    with pytest.raises(ConfigError, match="is public already: give --public"):
        push(exported, repository(hub), "first", never)
    assert not hub.repositories["reef/tiny"].files
    push(exported, repository(hub, public=True), "first", never)
    assert hub.repositories["reef/tiny"].files


def test_a_model_that_no_export_has_pushed_is_replaced_only_if_that_is_said(hub: Hub, exported: Path) -> None:
    files = {
        ".gitattributes": b"",
        "README.md": b"mine",
        "model-1.safetensors": b"mine",
        "adapter_config.json": b"{}",
    }
    hub.repositories["reef/tiny"] = there = Repository(private=True, files=dict(files))
    with pytest.raises(ConfigError, match="has README.md, and its card no tag 'atoll'.*--overwrite"):
        push(exported, repository(hub), "first", never)
    assert there.files == files
    push(exported, HubRepository("reef/tiny", endpoint=hub.url, overwrite=True), "first", never)
    assert there.files == {".gitattributes": b"", **contents(exported)}, "of the other kind nothing is left"


def test_a_token_that_may_not_write_and_none_at_all(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(Refused, match=r"refuses to write reef/tiny \(403"):
        push(exported, repository(hub), "first", never)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(exported / "none"))
    with pytest.raises(ConfigError, match="there is no Hugging Face token"):
        push(exported, repository(hub), "first", never)


def test_the_command_exports_and_pushes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "sleep", never)
    node = filled(tmp_path / "node", 2)
    arguments = [str(node.state_dir), "--out", str(tmp_path / "out"), "--push", "reef/tiny", "--public"]
    done = CliRunner().invoke(export, arguments)
    assert done.exit_code == 0 and f"sent to {hub.url}/reef/tiny" in done.output, (done.output, done.exception)
    there = hub.repositories["reef/tiny"]
    assert not there.private and there.files == contents(tmp_path / "out")
    assert there.commits == ["Round 2 of run tiny"]
