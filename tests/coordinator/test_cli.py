"""What the operator's commands take for granted."""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from data_sets import web_server, write_data_set
from journal_contents import record

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.hf_config import to_hf
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.round_time import exchanged_bytes, flops_per_round
from atoll.comm.config.run import RunConfig
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, Unreachable
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator import cli
from atoll.coordinator.causes.explanation import Confidence, Kind, Verdict
from atoll.coordinator.monitor.blame import Blame
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.state_machine.conduct import Consequence, Evidence, Offence
from atoll.coordinator.state_machine.events import Decision, Note, Pardoned


def test_status_asks_the_page_where_a_coordinator_has_it_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def fetch(url: str) -> dict[str, Any]:
        asked.append(url)
        return {"run_id": "reef"}

    monkeypatch.setattr(cli, "fetch", fetch)
    (page,) = [option.default for option in cli.start.params if option.name == "http"]
    for arguments, expected in (
        ([], f"http://{page}/api/run"),
        (["http://reef:80/"], "http://reef:80/api/run"),
        (["reef:80"], "http://reef:80/api/run"),
    ):
        done = CliRunner().invoke(cli.status, [*arguments, "--json"], catch_exceptions=False)
        assert (done.exit_code, json.loads(done.output)) == (0, {"run_id": "reef"})
        assert asked.pop() == expected


def test_status_finds_the_page_of_a_coordinator_by_its_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = CliRunner().invoke(cli.status, ["--state-dir", str(tmp_path)])
    assert isinstance(found.exception, ConfigError) and "holds no run" in str(found.exception)
    journal = Journal(tmp_path)
    journal.set_meta("http", "http://127.0.0.1:21701")
    journal.close()
    monkeypatch.setattr(cli, "fetch", lambda url: {"asked": url})
    done = CliRunner().invoke(cli.status, ["--state-dir", str(tmp_path), "--json"], catch_exceptions=False)
    assert json.loads(done.output) == {"asked": "http://127.0.0.1:21701/api/run"}


def test_of_a_coordinator_that_has_stopped_status_says_what_shows_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.set_meta("http", "http://127.0.0.1:1")

    def gone(url: str) -> None:
        raise Unreachable(f"no coordinator's page at {url}")

    monkeypatch.setattr(cli, "fetch", gone)
    for arguments, told in (([], True), (["http://reef:80"], False)):
        done = CliRunner().invoke(cli.status, [*arguments, "--state-dir", str(tmp_path)])
        assert isinstance(done.exception, Unreachable)
        assert (f"`atoll replay {tmp_path}` shows the run" in str(done.exception)) == told


def test_check_says_what_a_round_comes_to() -> None:
    done = CliRunner().invoke(cli.check_, ["demo", "inner.batch_size=1000", "members.start=8"])
    assert done.exit_code == 0, done.output
    assert "engine: builtin\n" in done.output, "as the config has it"
    first, *_ = lines = done.output.splitlines()
    assert first.startswith("# the resolved config of demo") and "last lines" in first and "# ok" in lines[-5]
    assert "docs/config.md" in lines[1]
    run = RunConfig()  # whose model the demo has
    run.inner.batch_size, run.rounds.inner_steps = 1000, 36
    work, sent = flops_per_round(run), exchanged_bytes(run, 8)
    for said in (
        f"128,000 tokens a node, a round 36 steps of {work / 36:.3g} FLOP: {work / 1e15:.3g} s at 1 PFLOP/s",
        f"between 8 members is {sent / 1e6:.3g} MB out and in: {8 * sent / 1e8:.3g} s at 100 Mbit/s",
    ):
        assert said in done.output


def a_decision(number: int, node: str, round_: int, consequence: Consequence) -> tuple[float, Decision]:
    evidence = Evidence(round_, Offence.LATE, "it was late", (("seconds", "60"),), NodeId("n9"))
    key = f"02{number:062x}"
    return 1e9, Decision(number, NodeId(node), key, round_, evidence, consequence, 2.5, f"name of {node}")


def operator(command: Any, *arguments: str) -> str:
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The state directory of a run with three decisions."""
    with closing(Journal(tmp_path)) as journal:
        for key, value in (("address", "127.0.0.1:1"), ("run", "reef"), ("pin", "")):
            journal.set_meta(key, value)
        found = [("n1", 4, Consequence.STRUCK), ("n2", 5, Consequence.BANNED), ("n1", 5, Consequence.NO_OWNER)]
        journal.append([], [], [], [a_decision(i, *one) for i, one in enumerate(found, 1)])
    return str(tmp_path)


def test_blame_prints_the_evidence_against_a_node_or_in_a_round(folder: str) -> None:
    def numbers(*what: str) -> list[int]:
        said = operator(cli.blame, *what, "--state-dir", folder, "--json").splitlines()
        return [json.loads(line)["number"] for line in said]

    assert numbers() == [1, 2, 3]
    assert numbers("n1") == [1, 3] and numbers("name of n2") == [2] and numbers("5") == [2, 3]
    assert numbers(f"02{2:062x}") == [2] and numbers("n3") == []
    with pytest.raises(ConfigError, match="round 2 is not committed"):
        numbers("02")  # too short for a key
    first = json.loads(operator(cli.blame, "n1", "--state-dir", folder, "--json").splitlines()[0])
    assert first["evidence"]["offence"] == "late" and first["evidence"]["by"] == "n9" and first["at"] == 1e9
    text = operator(cli.blame, "n2", "--state-dir", folder)
    for part in (
        "name of n2 (n2, key 02",
        "round 5: late, banned (weight 2.5)",
        "it was late (says n9)",
        "seconds 60",
    ):
        assert part in text
    assert operator(cli.blame, "n3", "--state-dir", folder) == "no verdict and no decision names n3\n"


def test_blame_says_who_was_to_blame_for_a_round(tmp_path: Path) -> None:
    hung = Verdict(
        *(Kind.HUNG_TRAINER, "n2", "bo", "", "", "bo's trainer hung after step 4", Confidence.AGREED),
        *(6.0, 7.5, (("steps taken", "4"),), ("cy's disk is full",)),
    )
    slow = Verdict(Kind.SLOW_LINK, "n1", "ada", "n2", "bo", "the path from ada to bo is slow", Confidence.TOLD)
    with closing(Journal(tmp_path)) as journal:
        commits = [replace(record(k), verdict=hung if k == 2 else None) for k in (1, 2)]
        noted = [
            (1e9, Note("round 2: bo hung", NodeId("n2"), 2, hung)),
            (1e9, Note("round 3: slow", None, 3, slow)),
        ]
        journal.append([], commits, [*noted, (1e9, Note("something else"))])

    def blamed(*what: str) -> list[int]:
        said = operator(cli.blame, *what, "--state-dir", str(tmp_path), "--json").splitlines()
        return [json.loads(line)["round"] for line in said]

    assert blamed() == blamed("bo") == blamed("n2") == [2, 3] and blamed("ada") == [3] and blamed("cy") == []
    assert blamed("2") == [2] and blamed("3") == [3], "what is noted stands before its record does"
    text = operator(cli.blame, "2", "--state-dir", str(tmp_path))
    for part in (
        "7.5 s slower than usual: hung trainer: bo (two sides say the same)",
        "bo's trainer hung after step 4",
        "steps taken 4",
        "besides: cy's disk is full",
    ):
        assert part in text
    assert "slow link: ada to bo (one member says so)" in operator(cli.blame, "3", "--state-dir", str(tmp_path))
    assert "there is no verdict on round 1" in operator(cli.blame, "1", "--state-dir", str(tmp_path))
    for options in ((), ("--json",)):
        said = CliRunner().invoke(cli.blame, ["9", "--state-dir", str(tmp_path), *options])
        assert isinstance(said.exception, ConfigError) and "round 9 is not committed" in str(said.exception)


def test_blame_reads_the_run_that_status_shows_and_says_which(
    folder: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = Blame("live", [], [a_decision(7, "n7", 9, Consequence.STRUCK)], None, 3)
    asked = list[str]()

    def fetch(url: str) -> Any:
        asked.append(url)
        if "4701" not in url:
            raise Unreachable("nobody is there")
        return json.loads(msgspec.json.encode(living))

    monkeypatch.setattr(cli, "fetch", fetch)
    monkeypatch.setattr(cli, "default_state_dir", lambda part: Path(folder))
    by_page = CliRunner().invoke(cli.blame, ["name of", "--json"])
    assert json.loads(by_page.stdout)["number"] == 7 and "run live, by the page at http://127" in by_page.stderr
    assert asked == ["http://127.0.0.1:4701/api/blame?about=name+of"]
    assert "and 3 earlier" in operator(cli.blame)
    elsewhere = CliRunner().invoke(cli.blame, ["--url", "reef:80"])
    assert isinstance(elsewhere.exception, Unreachable), "another run's is not what was asked for"
    monkeypatch.setattr(cli, "PAGE_ADDRESS", "127.0.0.1:1")
    by_folder = CliRunner().invoke(cli.blame, ["n2", "--json"])
    assert json.loads(by_folder.stdout)["number"] == 2 and f"run reef, by {folder}" in by_folder.stderr
    monkeypatch.setattr(cli, "default_state_dir", lambda part: tmp_path_factory.mktemp("empty") / "no")
    assert isinstance(CliRunner().invoke(cli.blame).exception, Unreachable)
    both = CliRunner().invoke(cli.blame, ["--url", "reef", "--state-dir", folder])
    assert isinstance(both.exception, ConfigError)


def test_a_pardon_is_left_for_the_coordinator(folder: str) -> None:
    said = operator(cli.pardon, "name of n2", "--reason", "its memory was broken", "--state-dir", folder, "--json")
    assert json.loads(said) == {"pardoned": ["n2"]}
    with closing(Journal(Path(folder))) as journal:
        assert journal.rulings() == [(1, Pardoned(NodeId("n2"), "its memory was broken"))]
        journal.take_rulings(1)
        assert journal.rulings() == []
    for unknown in ("n7", "5"):
        with pytest.raises(ConfigError, match="nothing was held against"):
            operator(cli.pardon, unknown, "--state-dir", folder)


def test_invites_are_made_listed_and_revoked(folder: str) -> None:
    operator(cli.invite, "--state-dir", folder, "--name", "ada", "--uses", "3", "--role", "trainer")
    operator(cli.invite, "--state-dir", folder, "--name", "bo")
    listed = [json.loads(i) for i in operator(cli.invite, "--state-dir", folder, "--list", "--json").splitlines()]
    assert [(i["number"], i["name"], i["nodes"], i["left"], i["roles"]) for i in listed] == [
        (1, "ada", 3, 3, ["trainer"]),
        (2, "bo", 1, 1, []),
    ]
    assert "ada: 3 of 3 nodes left, trainer" in operator(cli.invite, "--state-dir", folder, "--list")
    assert "revoked: by the operator" in operator(cli.invite, "--state-dir", folder, "--revoke", "ada")
    states = [
        line.rpartition(": ")[2] for line in operator(cli.invite, "--state-dir", folder, "--list").splitlines()
    ]
    assert states == ["by the operator", "open"]
    with pytest.raises(ConfigError, match="no invite 'cy'"):
        operator(cli.invite, "--state-dir", folder, "--revoke", "cy")
    with pytest.raises(ConfigError, match="--role is 'boss'"):
        operator(cli.invite, "--state-dir", folder, "--role", "boss")


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli.check_, ["demo", *arguments])


def refusal(*arguments: str) -> str:
    said = check(*arguments).exception
    assert isinstance(said, ConfigError)
    return str(said)


def test_check_looks_at_the_data_set_as_nodes_will(tmp_path: Path) -> None:
    right = write_data_set(tmp_path / "set")
    titan = ("engine=torchtitan", "titan.config=llama3_8b", "inner.optimizer=adamw")
    of_set = ("data.kind=dataset", f"data.digest={right}", "model.seq_len=16")
    with web_server(tmp_path / "set") as web:
        at = f"data.url={web.url}"
        good = check(*of_set, at)
        assert good.exit_code == 0 and good.stderr == "", good.output
        assert "has the digest" in refusal(*of_set, at, f"data.digest={'0' * 32}")
        assert "model.vocab_size=256 or more" in refusal(*of_set, at, *titan, "model.vocab_size=99")
        assert "blocks of 64 tokens" in refusal(*of_set, at, "model.seq_len=128")
        assert "has no slice 'chat'" in refusal(*of_set, at, "data.slice=chat")
        web.serves_ranges = False
        assert "does not serve ranges" in refusal(*of_set, at)
        web.status = 404
        away = check(*of_set, at)
        assert away.exit_code == 0 and "warning: " in away.stderr and "404" in away.stderr
    bare = write_data_set(tmp_path / "bare", validation=0)
    said = refusal(*of_set, f"data.url={tmp_path}/bare", f"data.digest={bare}")
    assert "build it with a smaller --validation-every" in said


def test_check_warns_of_a_run_that_one_member_can_spoil() -> None:
    assert check().stderr == ""
    assert "outer.clip=false: invite only whom you trust" in check("outer.clip=false").stderr


def test_start_warns_of_what_check_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = write_data_set(tmp_path / "bare", validation=0)
    run = RunConfig()
    run.data = DataConfig(DataKind.DATASET, str(tmp_path / "bare"), bare)
    run.model.seq_len = 16
    cli._warn_of_problems(run)
    assert "nodes will end with: data set made has no slice 'validation'" in caplog.text
    run.data.url = str(tmp_path / "gone")
    cli._warn_of_problems(run)
    assert f"the data set at {tmp_path}/gone is not looked at" in caplog.text


def test_start_takes_a_webhook_of_the_environment_and_refuses_what_is_none_without_repeating_it(
    tmp_path: Path,
) -> None:
    arguments = ["start", "demo", "--state-dir", str(tmp_path), "wandb.mode=disabled"]
    for words, environment in ((["--webhook", "s3cret"], {}), ([], {"ATOLL_WEBHOOK": "s3cret"})):
        error = CliRunner().invoke(cli.coordinator, [*arguments, *words], env=environment).exception
        assert isinstance(error, ConfigError) and "--webhook" in str(error) and "s3cret" not in str(error)
    error = CliRunner().invoke(cli.coordinator, [*arguments, "--records-age", "ninety"]).exception
    assert isinstance(error, ConfigError) and "--records-age is 'ninety'" in str(error)
    assert not (tmp_path / "journal.sqlite").exists()


def test_check_compares_the_tokenizers_of_a_mixture(tmp_path: Path) -> None:
    digests = [write_data_set(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    manifest = tmp_path / "b" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("ab" * 16, "cd" * 16))
    parts = [
        {"url": str(tmp_path / name), "digest": digest(path.read_bytes()).hex(), "weight": 1}
        for name in "ab"
        if (path := tmp_path / name / "manifest.json")
    ]
    assert parts[0]["digest"] == digests[0]
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"data": {"kind": "dataset", "mixture": parts}, "model": {"seq_len": 16}}))
    said = CliRunner().invoke(cli.check_, [str(run)]).exception
    assert isinstance(said, ConfigError) and "their tokenizers differ" in str(said)


def test_check_says_what_the_run_begins_with(tmp_path: Path) -> None:
    assert "# the run begins with random weights\n" in check().output
    away = check("init_from=/no/such/folder")
    assert away.exit_code == 0 and "is neither a file nor a folder of this machine" in away.stderr
    (tmp_path / "config.json").write_text(json.dumps(to_hf(ModelConfig(dim=64))))
    assert f"{tmp_path}/config.json says dim=64" in refusal(f"init_from={tmp_path}")
    named = check(f"model={tmp_path}", f"init_from={tmp_path}")
    assert named.exit_code == 0 and f"# model={tmp_path} has " in named.output
    assert f"# the run begins with init_from={tmp_path}\n" in named.output
    assert json.loads(check(f"model={tmp_path}", "--json").stdout)["model"]["dim"] == 64


def test_check_says_that_the_learning_rate_ends_long_before_the_run(tmp_path: Path) -> None:
    tokens = 4 * 128 * 36 * 4  # of a round: batch, sequence, steps, members
    said = check("rounds.total=1000").output
    assert f"in round {math.ceil(1e6 / tokens)} of 1,000 with 4 members" in said
    assert f"inner.decay_tokens={1000 * tokens}" in said
    for quiet in ((), ("rounds.total=0",), ("rounds.total=1000", f"inner.decay_tokens={1000 * tokens}")):
        assert "the learning rate reaches" not in check(*quiet).output
