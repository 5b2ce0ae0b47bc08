"""Recurrent layers, loops over the length, and what comes before and after them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.model_classes.case import Case, case, lengths, mask_of, masked_tokens
from tests.support.training_cases import (
    VOCABULARY,
    Batch,
    Recurrent,
    next_token_loss,
    pooled_loss,
    tokens,
)

WIDTH = 64

# ---------------------------------------------------------------------- speech


class Speech(nn.Module):
    """Two convolutions of stride 2 in time and frequency, then an LSTM in both directions."""

    def __init__(self, classes: int = 50, bands: int = 40) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.rnn = nn.LSTM(16 * bands // 4, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolutions(x[:, None])  # (n, 16, ⌈L/4⌉, 10)
        return self.head(self.rnn(y.transpose(1, 2).flatten(2))[0])


def frames_after(length: int) -> int:
    return -(-length // 4)


def speech() -> Case:
    """A class for every fourth frame."""

    def make_batch(n: int, length: int) -> Batch:
        y = torch.randint(0, 50, (n, frames_after(length)))
        return {"x": torch.randn(n, length, 40), "y": y}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return case(Speech(), loss_of, make_batch, 1000, min_size=32, multiple=4)


def speech_ctc() -> Case:
    def make_batch(n: int, length: int) -> Batch:
        frames = frames_after(length)
        longest = max(frames // 4, 1)
        return {
            "x": torch.randn(n, length, 40),
            "y": torch.randint(1, 50, (n, longest)),
            "frames": torch.full((n,), frames),
            "letters": lengths(n, longest),
        }

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        log_p = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_p, batch["y"], batch["frames"], batch["letters"], zero_infinity=True)

    return case(Speech(), loss_of, make_batch, 1000, min_size=32, multiple=4)


# ---------------------------------------------------------------------- layers of torch


def recurrent(kind: type[nn.RNNBase], max_size: int) -> Case:
    return case(Recurrent(kind), next_token_loss, tokens, max_size)


class Packed(Recurrent):
    """What the recurrent layer sees has no padding."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        length = x.shape[1]
        packed = pack_padded_sequence(self.embed(x), ends, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=length)
        return self.head(y)


def packed_recurrent() -> Case:
    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch["x"], batch["lengths"])
        target = batch["x"].masked_fill(~mask_of(batch), -100)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return case(Packed(nn.LSTM), loss_of, masked_tokens, 256)


# ---------------------------------------------------------------------- loops


class Loop(nn.Module):
    """A cell in a loop over the length; what it returns is stacked."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cell = cell(WIDTH, WIDTH)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        state: Any = None
        seen = []
        for at in range(x.shape[1]):
            state = self.cell(y[:, at], state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(seen, 1))


def loop(cell: type[nn.RNNCellBase], max_size: int) -> Case:
    return case(Loop(cell), next_token_loss, tokens, max_size)


class AdditiveAttention(nn.Module):
    """An LSTM reads; a cell writes word for word and attends to all that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.reader = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.of_memory, self.of_state = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score, self.head = nn.Linear(WIDTH, 1), nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, _ = self.reader(self.embed(source))
        keys, words = self.of_memory(memory), self.embed(target)
        state = memory.new_zeros(len(source), WIDTH)
        written = []
        for at in range(target.shape[1]):
            query = self.of_state(state)[:, None]
            weights = self.score(torch.tanh(keys + query)).softmax(1)  # (n, S, 1)
            context = (weights * memory).sum(1)
            state = self.cell(torch.cat([words[:, at], context], -1), state)
            written.append(self.head(torch.cat([state, context], -1)))
        return torch.stack(written, 1)


def additive_attention() -> Case:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        return {key: tokens(n, size[axis])["x"] for axis, key in enumerate("st")}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["s"], batch["t"]).flatten(0, 1), batch["t"].flatten())

    return case(AdditiveAttention(), loss_of, make_batch, (128, 48))


# ---------------------------------------------------------------------- many short samples


class Decayed(nn.Module):
    """Attention that decays with distance, by a mask `(h, L, L)` of the step, before an LSTM."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.all = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.slopes = nn.Parameter(torch.rand(heads))
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, heads = x.shape[1], len(self.slopes)
        positions = torch.arange(length)
        distance = (positions[:, None] - positions[None, :]).abs().float()
        decay = -self.slopes[:, None, None] * distance
        y = self.embed(x)
        query, key, value = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.all(y).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) + decay
        y = y + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return self.head(self.rnn(y)[0][:, -1])


def many_short() -> Case:
    def make_batch(n: int, length: int) -> Batch:
        return tokens(n, length) | {"y": torch.randint(0, 10, (n,))}

    return case(Decayed(), pooled_loss, make_batch, 64)


RECURRENT = {
    "speech": speech,
    "speech, CTC": speech_ctc,
    "LSTM": partial(recurrent, nn.LSTM, 256),
    "GRU": partial(recurrent, nn.GRU, 32),
    "LSTM, packed": packed_recurrent,
    "loop of LSTM cells": partial(loop, nn.LSTMCell, 256),
    "loop of GRU cells": partial(loop, nn.GRUCell, 96),
    "additive attention": additive_attention,
    "many short samples": many_short,
}
