"""The real lm-evaluation-harness evaluates an exported folder on a task that needs no network (`make harness`)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from states import RUN, TINY, Node, filled
from tokenized import END_OF_TEXT, tokenizer_json

from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.export.command import eval_command
from atoll.node.export.evaluation import EvaluationOptions, evaluate
from atoll.node.export.folder import FolderExporter, FolderOptions

HERE = Path(__file__).parent
VOCAB = 280


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Node, Path]:
    folder = tmp_path_factory.mktemp("run")
    node = filled(folder / "node", 2, about=RunManifest(replace(RUN, model=replace(TINY, vocab_size=VOCAB))))
    (folder / "tokenizer.json").write_bytes(tokenizer_json(VOCAB))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    FolderExporter(node.state_dir, options=FolderOptions(tokenizer=folder)).export(folder / "out")
    return node, folder / "out"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    task = (HERE / "tiny_choice.yaml").read_text().replace("FOLDER", str(HERE))
    (folder / "tiny_choice.yaml").write_text(task)
    return folder


def test_a_task_of_the_users_own_is_run_offline(exported: tuple[Node, Path], tasks: Path) -> None:
    node, out = exported
    arguments = ["--tasks", "tiny_choice", "--include", str(tasks), "--device", "cpu", "--json"]
    done = CliRunner().invoke(eval_command, [str(out), *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    said = json.loads(done.stdout)
    assert said["round"] == 2 and bytes.fromhex(said["state_digest"]) == node.outer.finalize()
    assert said["samples"] == {"tiny_choice": 3} and said["harness"].startswith("lm_eval 0.4")
    assert said["tasks"]["tiny_choice"]["acc"] in [pytest.approx(n / 3) for n in range(4)]


def test_the_figure_is_what_the_model_itself_prefers(exported: tuple[Node, Path], tasks: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, out = exported
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)

    def log_likelihood(question: str, answer: str) -> float:
        before, both = tokenizer(question).input_ids, tokenizer(question + answer).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([both[:-1]])).logits[0].float().log_softmax(-1)
        return sum(float(logits[i - 1, both[i]]) for i in range(len(before), len(both)))

    right = 0
    for line in (HERE / "questions.jsonl").read_text().splitlines():
        q = json.loads(line)
        scores = [log_likelihood(q["question"], choice) for choice in q["choices"]]
        right += scores.index(max(scores)) == q["answer"]
    found = evaluate(out, EvaluationOptions(("tiny_choice",), tasks, device="cpu"))
    assert found["tasks"]["tiny_choice"]["acc"] == pytest.approx(right / 3)


def test_without_a_device_it_is_the_gpu_if_there_is_one_and_else_the_processor(
    exported: tuple[Node, Path], tasks: Path
) -> None:
    found = evaluate(exported[1], EvaluationOptions(("tiny_choice",), tasks, limit=1))
    assert found["samples"] == {"tiny_choice": 1}


def test_a_task_that_there_is_not_and_one_that_needs_the_network(exported: tuple[Node, Path], tasks: Path) -> None:
    with pytest.raises(ConfigError, match="has no task tiny_riddle"):
        evaluate(exported[1], EvaluationOptions(("tiny_choice", "tiny_riddle"), tasks, device="cpu"))
    with pytest.raises(ResourceError, match="the tasks could not be run"):
        evaluate(exported[1], EvaluationOptions(("arc_easy",), device="cpu", limit=1))
