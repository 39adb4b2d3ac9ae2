"""What the model writes when its loss is measured: how it goes on with the beginning of a validation sample. It is
always the same one, and drawn with the same random numbers, so that what changes from round to round is the model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.comm.config.run import RunConfig
from atoll.node.data.detokenise import Detokeniser, NoText, detokeniser
from atoll.node.participant.batches import RunTokens
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer_channel import Passage

PROMPT_TOKENS = 32
TEMPERATURE = 0.8


class PassageWriter:
    """Writes a passage of a run's `data.passage_tokens` tokens. Every rank calls each method at the same time."""

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        run: RunConfig,
        data: RunTokens,
        ranks: RankGroup,
        device: torch.device,
        one_length: bool,
        tell: Callable[[str], None],
    ) -> None:
        """`logits`: (1, T, V) of the token after each of (1, T), by a model in which none looks ahead;
        `one_length`: T is always the run's, since a compiled model is compiled again for each length; `tell` takes
        the sentence why nothing is written, if so."""
        self._logits, self._run, self._data, self._device = logits, run, data, device
        self._one_length = one_length
        self._text: Detokeniser | None = None  # the first rank's, which reads for all
        if run.data.passage_tokens and ranks.rank == 0:
            try:
                self._text = detokeniser(run, data.source)
            except NoText as error:
                tell(f"this node writes no passages (data.passage_tokens): {error}")
        self._writes = bool(ranks.broadcast(b"yes" if self._text is not None else b""))  # all ranks, or none

    @torch.no_grad()
    def write(self) -> Passage | None:
        """The passage, on the first rank; None on the others, where the run asks for none, and where tokens are
        no text that this node can read."""
        if not self._writes:
            return None
        seq_len, draws = self._run.model.seq_len, torch.Generator().manual_seed(self._run.seed)
        tokens: list[int] = self._data.validation([0])["input_ids"][0, : min(PROMPT_TOKENS, seq_len // 2)].tolist()
        begun = len(tokens)
        for _ in range(self._run.data.passage_tokens):
            tokens.append(self._next(tokens[-seq_len:], draws))
        text = self._text
        return None if text is None else Passage(text(tokens[:begun]), text(tokens[begun:]))

    def _next(self, context: list[int], draws: torch.Generator) -> int:
        last = len(context) - 1
        if self._one_length:
            context = context + [0] * (self._run.model.seq_len - len(context))
        logits = self._logits(torch.tensor([context], device=self._device))[0, last].float().cpu()
        likely = torch.softmax(logits[: self._run.model.vocab_size] / TEMPERATURE, dim=0)
        return int(torch.multinomial(torch.nan_to_num(likely, nan=1.0), 1, generator=draws))
