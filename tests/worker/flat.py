"""Flat batches for tests: sequences with blocks scattered over the pool, fed to a model in whatever pieces."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from services.worker.batch import Batch
from services.worker.cache import KVCache
from services.worker.models.decoder import Decoder
from services.worker.step import CacheShape

BLOCK_SIZE = 16


class Sequences:
    """Token sequences that a model reads piece by piece; `logits[s]` grows by one row per token of sequence s.

    `prompts`: how many tokens of each are its prompt; the others count as generated. None: all do.
    """

    def __init__(
        self,
        model: Decoder,
        sequences: list[list[int]],
        *,
        spare_blocks: int = 2,
        seed: int = 0,
        prompts: list[int] | None = None,
    ) -> None:
        self.model = model
        self.sequences = sequences
        self.prompts = prompts or [0] * len(sequences)
        self.read = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]
        needed = [-(-len(sequence) // BLOCK_SIZE) for sequence in sequences]
        count = sum(needed) + spare_blocks
        shape = CacheShape(count, BLOCK_SIZE, len(sequences), model.config.max_model_len, 4096)
        self.cache = KVCache(model.kv_layout, shape, model.device)
        for layer in range(model.config.num_layers):
            for tensor in self.cache.layer(layer):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)  # bytes of -1 are a scale of NaN
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = [[order.pop() for _ in range(blocks)] for blocks in needed]

    def step(self, pieces: Iterable[tuple[int, int]], *, write: bool = True) -> None:
        """One forward pass over (sequence, how many of its next tokens)."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts, tables, prompts = [0], [], [], []
        pieces = list(pieces)
        for index, count in pieces:
            begin = self.read[index]
            self.read[index] = end = begin + count
            ids += self.sequences[index][begin:end]
            positions += range(begin, end)
            table = self.tables[index]
            slots += [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(begin, end)]
            starts.append(len(ids))
            contexts.append(end)
            prompts.append(max(0, min(end, self.prompts[index]) - begin))
            tables.append(table)
        width = max(map(len, tables))
        batch = Batch(
            input_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots if write else [-1] * len(slots)),
            row_starts=tuple(starts),
            context_lens=tuple(contexts),
            block_table_RB=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            logits_at_S=torch.arange(len(ids)),
            prompts=tuple(prompts),
        )
        self.batch = batch
        logits = self.model.logits(self.model.forward(batch, self.cache)[batch.logits_at_S]).clone()
        for row, (index, _) in enumerate(pieces):
            self.logits[index] += logits[starts[row] : starts[row + 1]].unbind()

    def all_logits(self, index: int) -> torch.Tensor:
        """Logits of every token read so far."""
        return torch.stack(self.logits[index])

    def left(self, index: int) -> int:
        """Tokens of a sequence that are not read yet."""
        return len(self.sequences[index]) - self.read[index]
