"""Take part in a run with a training loop of your own: a small network, on samples that are made in memory.

atoll coordinator start examples/plain_loop.yaml --state-dir plain/coordinator
atoll invite --state-dir plain/coordinator --uses 2                  prints the URL
atoll node join URL --state-dir plain/n1 -- python examples/plain_loop.py
atoll node join URL --state-dir plain/n2 -- python examples/plain_loop.py      here, or on another machine
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.node.participant import participate

VOCABULARY, LENGTH, SAMPLES = 64, 32, 1 << 20  # LENGTH is the run's model.seq_len


class Progressions:
    """Sample i is an arithmetic progression modulo `VOCABULARY`, the same on every node: (LENGTH + 1,) int64."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        start, stride = torch.randint(VOCABULARY, (2,), generator=torch.Generator().manual_seed(index))
        return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.recurrence = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, sequences: Tensor) -> Tensor:
        """The mean loss, nats a token, of predicting each next token of (B, LENGTH + 1)."""
        hidden, _ = self.recurrence(self.embedding(sequences[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), sequences[:, 1:].flatten())


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    held_out = torch.stack([Progressions()[SAMPLES + i] for i in range(256)]).to(device)

    @torch.no_grad()
    def evaluate() -> float:
        return float(model.eval()(held_out))

    with participate(model, optimizer, evaluate=evaluate) as run:
        for batch in run.batches(Progressions()):
            loss = model(batch.to(device))
            loss.backward()
            run.step(loss)


if __name__ == "__main__":
    main()
