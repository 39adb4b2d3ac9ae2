"""The arithmetic of a round, and the figures that the shipped configs' comments say of theirs."""

import re
from pathlib import Path

import pytest

from atoll.comm.accelerators import peak_flops
from atoll.comm.config.load import load_run
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import FragmentsConfig
from atoll.comm.config.round_time import RoundTime, exchanged_bytes, flops_per_token, tokens_per_step
from atoll.comm.config.run import CodecName, InnerConfig, ReduceConfig, RoundsConfig, RunConfig

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
UNITS = {"Mbit/s": 1e6, "Gbit/s": 1e9}
MACHINES = re.compile(
    r"# Arithmetic of a round on (\d+) nodes with (\d+) x (.+) at ([\d.]+) % MFU, without overlap:\n"
    r"#   ([\d,]+) tokens a step and node\n"
    r"#   ([\d,]+) s of training\n"
)
LINK = re.compile(r"#   (\d+) ([MG]bit/s): ([\d,]+) s of exchange, ([\d.]+) % utilisation\n")


def test_a_token_takes_six_operations_a_parameter_and_those_of_attention() -> None:
    """By hand, for 2 layers of width 8: each has 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 parameters."""
    tied = ModelConfig(vocab_size=10, dim=8, layers=2, heads=2, kv_heads=2, ffn_dim=16, seq_len=5, tied_head=True)
    matrices = 2 * (4 * 64 + 3 * 128 + 16) + 8
    attention = 12 * 2 * 8 * 5
    assert flops_per_token(tied) == 6 * (matrices + 10 * 8) + attention
    tied.tied_head = False
    assert flops_per_token(tied) == 6 * (matrices + 10 * 8) + attention, "the other table is only looked into"


def test_an_exchange_is_as_long_as_the_bytes_of_an_all_reduce_on_the_link() -> None:
    run = RunConfig(reduce=ReduceConfig(codec=CodecName.FP32), inner=InnerConfig(batch_size=2))
    payload = 4 * run.model.n_params
    assert exchanged_bytes(run, 1) == 0
    assert exchanged_bytes(run, 4) == 1.5 * payload
    run.rounds = RoundsConfig(inner_steps=10)
    work = 10 * 2 * run.model.seq_len * flops_per_token(run.model)
    times = RoundTime.of(run, 4, flops=work / 30, bits=8 * 1.5 * payload / 10)
    assert (times.training, times.exchange, times.utilisation) == pytest.approx((30, 10, 0.75))


def test_where_fragments_take_turns_a_round_is_a_part_of_both() -> None:
    run = RunConfig(rounds=RoundsConfig(inner_steps=100))
    whole = RoundTime.of(run, 4, 1e12, 1e8)
    run.fragments = FragmentsConfig(count=4, stagger=True)
    part = RoundTime.of(run, 4, 1e12, 1e8)
    assert (4 * part.training, 4 * part.exchange) == pytest.approx((whole.training, whole.exchange))


@pytest.mark.parametrize("name", ["150m", "1b", "10b"])
def test_the_figures_in_a_shipped_configs_comment_are_those_of_the_config(name: str) -> None:
    text, run = (CONFIGS / f"{name}.yaml").read_text(), load_run(CONFIGS / f"{name}.yaml", ("data.kind=stdlib",))
    said = MACHINES.search(text)
    assert said is not None, "the comment says what it is worked out for"
    members, cards, card, mfu, tokens, training = said.groups()
    peak = peak_flops(card)
    assert peak is not None and int(members) == run.members.start
    assert tokens == f"{tokens_per_step(run):,}"
    links = LINK.findall(text)
    assert [(number, unit) for number, unit, *_ in links] == [
        ("100", "Mbit/s"),
        ("500", "Mbit/s"),
        ("1", "Gbit/s"),
    ]
    for number, unit, exchange, utilisation in links:
        bits, flops = int(number) * UNITS[unit], int(cards) * peak * float(mfu) / 100
        times = RoundTime.of(run, int(members), flops, bits)
        assert (training, exchange, utilisation) == (
            f"{times.training:,.0f}",
            f"{times.exchange:,.0f}",
            f"{100 * times.utilisation:.1f}",
        )
        assert times.exchange < run.rounds.reduce_timeout


@pytest.mark.parametrize(
    ("name", "sequences", "length"), [("150m", 512, 1024), ("1b", 2048, 1024), ("10b", 128, 8192)]
)
def test_the_shipped_configs_have_the_batches_of_their_papers(name: str, sequences: int, length: int) -> None:
    run = load_run(CONFIGS / f"{name}.yaml", ("data.kind=stdlib",))
    assert (run.inner.batch_size, run.model.seq_len) == (sequences, length)


def test_ten_billion_parameters_use_their_nodes_well_at_500_megabits() -> None:
    text = (CONFIGS / "10b.yaml").read_text()
    (share,) = (utilisation for number, _, _, utilisation in LINK.findall(text) if number == "500")
    assert float(share) > 88
