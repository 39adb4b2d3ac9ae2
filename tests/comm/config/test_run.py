"""The run's config: files, overrides, the wire, and sentences for what is wrong."""

from pathlib import Path

import msgspec
import pytest

from atoll.comm.config.load import load_dataclass, load_run, to_yaml
from atoll.comm.config.run import RunConfig, from_json, to_json
from atoll.comm.config.shipped import method_file
from atoll.comm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
METHODS = sorted((ROOT / "configs" / "methods").glob("*.yaml"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
NO_DATA_SET = ("data.kind=stdlib",)  # some runs name theirs when they are started


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_valid_and_survives_the_wire(path: Path) -> None:
    config = load_run(path, NO_DATA_SET)
    assert from_json(to_json(config)) == config


def test_a_key_that_there_is_not_is_named_with_the_one_that_was_meant() -> None:
    sentence = r"'rounds.totl' in the overrides: there is no such key. Did you mean: 'total'\?$"
    with pytest.raises(ConfigError, match=sentence):
        load_run(ROOT / "configs" / "demo.yaml", ("rounds.totl=4",))


@pytest.mark.long
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
@pytest.mark.parametrize("method", METHODS, ids=lambda p: p.stem)
def test_every_method_can_be_merged_over_every_shipped_config(path: Path, method: Path) -> None:
    config = load_run(path, NO_DATA_SET, method_file(method.stem, path))
    assert config.model == load_run(path, NO_DATA_SET).model
    assert from_json(to_json(config)) == config


def test_overrides_win_over_the_method_and_the_method_over_the_run() -> None:
    demo = ROOT / "configs" / "demo.yaml"
    config = load_run(demo, ("outer.lr=0.123",), method_file("muloco", demo))
    assert (config.outer.lr, config.outer.momentum, config.rounds.inner_steps) == (0.123, 0.9, 30)


@pytest.mark.parametrize(
    ("name", "billions"), [("demo", 0.00082), ("10m", 0.010), ("150m", 0.15), ("1b", 1.0), ("10b", 10.2)]
)
def test_the_shipped_models_have_the_size_of_their_names(name: str, billions: float) -> None:
    params = load_run(ROOT / "configs" / f"{name}.yaml", NO_DATA_SET).model.n_params
    assert params / 1e9 == pytest.approx(billions, rel=0.25)


def test_the_printed_config_is_one_that_can_be_read(tmp_path: Path) -> None:
    config = load_run(ROOT / "configs" / "demo.yaml", ("outer.lr=0.5", "rounds.total=3"))
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_run(tmp_path / "again.yaml") == config
    assert config.outer.lr == 0.5


@pytest.mark.parametrize("word", ["on", "off", "auto", "ON"])
def test_tls_is_on_off_or_auto_though_yaml_takes_two_of_them_for_truths(word: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"security:\n  tls: {word}\n")
    for config in (
        load_run(tmp_path / "run.yaml"),
        load_run(ROOT / "configs" / "demo.yaml", (f"security.tls={word}",)),
    ):
        assert config.security.tls == word.lower()
        assert from_json(to_json(config)) == config
        (tmp_path / "again.yaml").write_text(to_yaml(config))
        assert load_run(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("outer.lrr=1", "outer.lrr"),
        ("rounds.inner_steps=many", "many"),
        ("rounds.inner_steps=0", "greater than 0"),
        ("outer.momentum=1", "must be in"),
        ("model.heads=3", "multiple"),
        ("seed=-1", "seed is -1: it must be in 0"),
        (f"seed={10**23}", "seed is 1"),
        ("reduce.chunk=50", "reduce.block"),
        ("reduce.chunk=2147483649", "reduce.chunk is 2147483649: it must be"),
        ("data.kind=dataset", "give data.url=URL and data.digest=DIGEST, as `atoll data check URL` prints them"),
        ("data.kind=images", "images"),
        ("outer.lr", "key=value"),
        ("inner.warmup_tokens=2000000", "inner.decay_tokens"),
        ("inner.lr=inf", "inner.lr is inf"),
        ("inner.lr=-1", "inner.lr is -1"),
        ("inner.min_lr=1", "inner.min_lr 1 is above inner.lr 0.012"),
        ("members.reconnect=-5", "members.reconnect is -5"),
        ("checkpoint.remote_every=0", "checkpoint.remote_every is 0"),
        ("checkpoint.remote=http://192.168.1.1/runs", "a web server takes no checkpoints"),
        ("checkpoint.remote=s4://bucket/runs", "no store is known whose URLs begin with s4://"),
        ("init_from=s4://bucket/runs", "no store is known whose URLs begin with s4://"),
        ("checkpoint.remote=s3://me:secret@host/runs", "checkpoint.remote has a password in it"),
        ("init_from=zip://a::s3://host/b", "init_from is 'zip://a::s3://host/b': it must be one URL"),
        ("inner.beta1=2", "inner.beta1 is 2"),
        ("inner.muon_momentum=1", "inner.muon_momentum is 1"),
        ("inner.optimizer=lion", "lion"),
        ("outer.merge=median", "median"),
        ("outer.trim=0.5", "outer.trim is 0.5"),
        ("outer.decay_begin=5", "below outer.decay_end 0"),
        ("outer.final_momentum=1", "outer.final_momentum is 1"),
        ("outer.momentum_warmup=-1", "outer.momentum_warmup is -1"),
        ("fragments.count=0", "fragments.count is 0"),
        ("overlap.delay=-1", "overlap.delay is -1"),
        ("overlap.alpha=0.5", "set overlap.take=mix"),
        ("rounds.data_parallel=-1", "rounds.data_parallel must not be negative"),
        ("checkpoint.every=0", "checkpoint.every is 0"),
        ("checkpoint.copies=-1", "every node"),
        ("model.layers=99999999999999999999", "no machine can hold"),
        ("model.layers=1000000", "model.layers is 1000000: 1024 are the most"),
        ("security.tls=perhaps", "security.tls"),
        ("inner.lr=[1", r"override 'inner.lr=\[1' is not valid YAML"),
        ("rounds=5", "'rounds' in the overrides is a section: set one of its keys, as in rounds.inner_steps=..."),
        ("data=~/texts", "as in data.kind=..."),
        ("wandb.mode=off", r"'off', expected one of \[online, offline, disabled, auto\]"),
    ],
)
def test_what_is_wrong_is_named(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_run(ROOT / "configs" / "demo.yaml", (override,))


def test_trimmed_means_are_not_of_sparse_deltas() -> None:
    sparse = ("reduce.codec=sparse", "outer.feedback=0.95")
    with pytest.raises(ConfigError, match="set outer.merge=centered"):
        load_run(ROOT / "configs" / "demo.yaml", (*sparse, "outer.merge=trimmed"))
    load_run(ROOT / "configs" / "demo.yaml", (*sparse, "outer.merge=centered"))


DIGEST = "0123456789abcdef" * 2
URL = "https://host/corpus"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((f"data.url={URL}",), f"data.digest is empty: `atoll data check {URL}` prints the digest"),
        ((f"data.url={URL}", "data.digest=12ab"), "must be the 32 hexadecimal digits"),
        ((f"data.digest={DIGEST}",), "no data set is given"),
        (
            ("data.url=s4://bucket/corpus", f"data.digest={DIGEST}"),
            "no store is known whose URLs begin with s4://",
        ),
        ((f"data.mixture=[{', '.join(65 * [f'{{url: {URL}, digest: {DIGEST}}}'])}]",), "64 are the most"),
        (("data.url='https://host/x#y'", f"data.digest={DIGEST}"), "it must be without '#'"),
        (("data.url=https://me@host/x", f"data.digest={DIGEST}"), "it must be without '@'"),
        (("data.url=https://me:secret@host/x", f"data.digest={DIGEST}"), "data.url has a password in it"),
        ((f"data.mixture=[{{url: {URL}}}]",), r"data.mixture\[0\].digest is empty"),
        ((f"data.mixture=[{{url: {URL}, digest: {DIGEST}, weight: 0}}]",), r"mixture\[0\].weight is 0"),
        ((f"data.mixture=[{{digest: {DIGEST}}}]",), r"data.mixture\[0\].url is empty"),
        (
            (f"data.mixture=[{{url: {URL}, digest: {DIGEST}}}]", f"data.url={URL}", f"data.digest={DIGEST}"),
            "data.mixture and data.url are given",
        ),
        ((f"data.url={URL}", f"data.digest={DIGEST}", "data.slice=validation"), "never trained on"),
        ((f"data.url={URL}", f"data.digest={DIGEST}", "data.validation=''"), "data.validation is empty"),
        ((f"data.url={URL}", f"data.digest={DIGEST}", "data.kind=stdlib"), "set data.kind=dataset, or leave out"),
    ],
)
def test_a_data_set_that_is_named_wrongly_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_run(ROOT / "configs" / "demo.yaml", ("data.kind=dataset", *overrides))


def test_data_sets_are_named_on_the_command_line_and_survive_the_wire(tmp_path: Path) -> None:
    one = load_run(ROOT / "configs" / "150m.yaml", (f"data.url={URL}", f"data.digest={DIGEST}"))
    assert [(part.url, part.digest, part.weight) for part in one.data.sets] == [(URL, DIGEST, 1.0)]
    parts = ", ".join(
        f"{{url: {URL}/{name}, digest: {DIGEST}, weight: {weight}}}" for name, weight in ("a3", "b1")
    )
    mixed = load_run(ROOT / "configs" / "150m.yaml", (f"data.mixture=[{parts}]",))
    assert [(part.url, part.weight) for part in mixed.data.sets] == [(f"{URL}/a", 3.0), (f"{URL}/b", 1.0)]
    (tmp_path / "again.yaml").write_text(to_yaml(mixed))
    assert from_json(to_json(mixed)) == mixed == load_run(tmp_path / "again.yaml")


def test_the_examples_runs_can_be_loaded_and_a_scripts_vocabulary_is_its_own_matter() -> None:
    files = sorted((ROOT / "examples").glob("*.yaml"))
    assert [file.stem for file in files if not file.with_suffix(".py").exists()] == [] != files
    assert {load_run(file).name for file in files} == {file.stem.replace("_", "-") for file in files}
    load_run(ROOT / "examples" / "plain_loop.yaml", ("model.vocab_size=2",))
    with pytest.raises(ConfigError, match="needs at least 256"):
        load_run(ROOT / "examples" / "plain_loop.yaml", ("model.vocab_size=2", "data.kind=bytes"))


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1,\nb: }")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_run(tmp_path / "bad.yaml")


@pytest.mark.parametrize("text", ["rounds: 5", "rounds:", "rounds: [total, 5]"])
def test_a_value_in_the_place_of_a_section_is_named_with_its_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="'rounds' in .*run.yaml is a section: set one of its keys"):
        load_run(tmp_path / "run.yaml")


def test_interpolation_from_the_wire_is_refused() -> None:
    data = msgspec.json.encode({"name": "${oc.env:HOME}"})
    with pytest.raises(ConfigError, match="plain values"):
        from_json(data)


@pytest.mark.parametrize("data", [b"[]", b"{", b'{"seed": "x"}', b'{"model": {"dim": -1}}'])
def test_a_config_from_the_wire_that_does_not_fit_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        from_json(data)


def test_the_learning_rate_follows_the_optimizer_until_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: run\n")
    muon, adamw = (load_run(tmp_path / "run.yaml", (f"inner.optimizer={o}",)) for o in ("muon", "adamw"))
    assert from_json(to_json(muon)).inner.peak_lr == 4 * from_json(to_json(adamw)).inner.peak_lr
    (tmp_path / "again.yaml").write_text(to_yaml(muon))
    assert load_run(tmp_path / "again.yaml") == muon
    assert load_run(tmp_path / "run.yaml", ("inner.lr=1e-3",)).inner.final_lr == pytest.approx(1e-4)


def test_defaults_are_valid() -> None:
    assert from_json(to_json(RunConfig())) == RunConfig()


@pytest.mark.parametrize("digest", ["0" * 32, "12345678" * 4, "0123456" * 4 + "7777", "1234567" * 4 + "1e23"])
def test_a_digest_of_digits_is_what_was_written_though_yaml_takes_it_for_a_number(digest: str) -> None:
    overrides = ("data.kind=dataset", "data.url=https://host/set", f"data.digest={digest}")
    assert load_run(ROOT / "configs" / "demo.yaml", overrides).data.digest == digest
    assert load_dataclass(RunConfig, None, (f"hf.digest={digest}", "seed=7")).hf.digest == digest
