"""What a model writes for people: always the same prompt and the same draws."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainers import launched, small

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig
from atoll.node import trainer_channel
from atoll.node.config import NodeConfig
from atoll.node.data.detokenise import NoText, detokeniser
from atoll.node.data.source import open_source
from atoll.node.participant.batches import RunTokens
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.model import build, init_parameters
from atoll.node.trainer.writing import PassageWriter
from atoll.node.trainer_channel import MAX_PASSAGE, Passage

RUN = RunConfig(
    model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=2, seq_len=48, vocab_size=256),
    data=DataConfig(passage_tokens=40),
)
CPU = torch.device("cpu")
ALONE = RankGroup(0, 1)


def written(
    tmp_path: Path, run: RunConfig = RUN, one_length: bool = False, seed: int = 1
) -> tuple[str, str] | None:
    model = build(run.model)
    init_parameters(model, seed)
    data = RunTokens(open_source(run, NodeConfig(), tmp_path))
    passage = PassageWriter(model, run, data, ALONE, CPU, one_length, print).write()
    return None if passage is None else (passage.prompt, passage.text)


def test_a_passage_goes_on_from_the_beginning_of_a_validation_sample(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert found is not None
    sample = open_source(RUN, NodeConfig(), tmp_path).validation(0).input_ids[:24]
    assert found[0] == bytes(sample.tolist()).decode(errors="replace") and 0 < len(found[1]) <= 40
    assert found == written(tmp_path) == written(tmp_path, one_length=True), "whatever lengths it is computed in"
    other = written(tmp_path, seed=2)
    assert other is not None and other[0] == found[0] and other[1] != found[1], "what changes is the model"


def test_a_run_that_asks_for_none_or_has_no_text_writes_none(tmp_path: Path) -> None:
    assert written(tmp_path, replace(RUN, data=DataConfig())) is None
    plugin, source = replace(RUN, data=DataConfig(kind=DataKind.PLUGIN)), open_source(RUN, NodeConfig(), tmp_path)
    with pytest.raises(NoText, match="data.kind=plugin"):
        detokeniser(plugin, source)
    said = list[str]()
    asked = replace(plugin, data=replace(plugin.data, passage_tokens=8))
    assert (
        PassageWriter(torch.nn.Identity(), asked, RunTokens(source), ALONE, CPU, False, said.append).write()
        is None
    )
    assert len(said) == 1 and said[0].startswith("this node writes no passages"), "and its owner is told why"


def test_a_model_whose_weights_are_no_numbers_writes_something(tmp_path: Path) -> None:
    data = RunTokens(open_source(RUN, NodeConfig(), tmp_path))
    nan = PassageWriter(lambda x: torch.full((1, x.shape[1], 256), torch.nan), RUN, data, ALONE, CPU, False, print)
    passage = nan.write()
    assert passage is not None and len(passage.text)


def test_whatever_a_script_writes_can_be_told() -> None:
    assert Passage("a\ud800", 3000 * "b").bounded() == Passage("a?", MAX_PASSAGE * "b")


@pytest.mark.long
def test_two_ranks_write_what_one_does(tmp_path: Path) -> None:
    async def passage(ranks: int) -> Passage | None:
        run = small(data=DataConfig(passage_tokens=20))
        async with launched(tmp_path / str(ranks), run, ranks=ranks) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            found = await node.ask(trainer_channel.Evaluate(0), trainer_channel.Evaluated)
            return found.passage

    one, two = asyncio.run(passage(1)), asyncio.run(passage(2))
    assert one is not None and one == two
