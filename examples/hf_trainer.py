"""Take part in a run with Hugging Face's `Trainer`: a tiny Llama, made from a config, on the run's own text.

pip install transformers accelerate
atoll coordinator start examples/hf_trainer.yaml --state-dir hf/coordinator
atoll invite --state-dir hf/coordinator --uses 2                  prints the URL
atoll node join URL --state-dir hf/n1 -- python examples/hf_trainer.py
atoll node join URL --state-dir hf/n2 -- python examples/hf_trainer.py      here, or on another machine

`RunTrainer` and `RunCallback` are what a script of yours needs; the rest is as in any script.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from atoll.node.participant import Participant, participate

ENDLESS = 1 << 40  # steps: the run says when it is over


class RunCallback(TrainerCallback):
    """Tells the run of each step that the Trainer's optimizer takes."""

    def __init__(self, run: Participant) -> None:
        self.run, self.loss = run, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.run.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.run.stepped(self.loss)
        self.loss = 0.0


class RunBatches(IterableDataset):
    """The run's batches, each in as many pieces as the Trainer accumulates gradients over, until the run ends."""

    def __init__(self, trainer: "RunTrainer") -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        pieces = self.trainer.args.gradient_accumulation_steps
        for batch in self.trainer.run.batches():  # or of a dataset of your own: run.batches(dataset)
            # The labels are the next tokens: the model must not shift them again.
            batch["shift_labels"] = batch["labels"]
            parts = {name: tensor.tensor_split(pieces) for name, tensor in batch.items()}
            for piece in zip(*parts.values(), strict=True):
                yield dict(zip(parts, piece, strict=True))
        self.trainer.control.should_training_stop = True


class RunTrainer(Trainer):
    """A Trainer whose steps, samples and learning rate are a run's."""

    def __init__(self, run: Participant, *rest: Any, **settings: Any) -> None:
        self.run, self.callback = run, RunCallback(run)
        super().__init__(*rest, **settings, callbacks=[self.callback])

    def get_train_dataloader(self) -> DataLoader:
        # Not prepared by accelerate, whose loaders fetch a batch before the step on the last one is taken.
        return DataLoader(RunBatches(self), batch_size=None)

    def training_step(self, *rest: Any, **settings: Any) -> Tensor:
        loss = super().training_step(*rest, **settings)  # of one piece, its share of the step's mean
        self.callback.loss += float(loss)
        return loss


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    with participate(model, optimizer) as run, tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=ENDLESS,
            max_grad_norm=run.config.inner.clip,
            gradient_accumulation_steps=2,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        RunTrainer(run, model, settings, optimizers=(optimizer, None)).train()


if __name__ == "__main__":
    main()
