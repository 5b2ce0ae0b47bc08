"""Steps on text, sound and other sequences, one ragged axis or two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.support.training_cases import Batch, Recurrent, Training, Transformer, lengths, training
from torchbudget import PackCollate, PadCollate

WORDS, WIDTH = 400, 48


def ids(n: int, length: int) -> torch.Tensor:
    return torch.randint(1, WORDS, (n, length))


def words(n: int, length: int) -> Batch:
    return {"ids": ids(n, length), "label": torch.randint(5, (n,))}


# ---------------------------------------------------------------------- transformers


class Encoder(nn.Module):
    """As in torch's tutorial: learned positions, `nn.TransformerEncoder`, a mask of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(512, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        return self.head(self.body(x, src_key_padding_mask=hidden)[:, 0])


def encoder() -> Training:
    def make(n: int, length: int) -> Batch:
        return words(n, length) | {"lengths": lengths(n, length)}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        hidden = torch.arange(batch["ids"].shape[1]) >= batch["lengths"][:, None]
        return F.cross_entropy(model(batch["ids"], hidden), batch["label"])

    return training(Encoder(), loss, make, 512)


def shifted(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def decoder_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return shifted(model(batch["ids"]), batch["ids"])


def checkpointed() -> Training:
    model = Transformer(4, checkpointed=True, causal=True)
    return training(model, decoder_loss, words, 1024, min_size=2, autocast=True)


def chunked_loss() -> Training:
    """The head and the loss run on 256 positions of the flattened batch at a time."""

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        hidden = model.hidden(batch["ids"]).flatten(0, 1)
        target = batch["ids"].flatten()
        total = hidden.new_zeros(())
        for rows, right in zip(hidden.split(256), target.split(256), strict=True):
            part = checkpoint(
                lambda a, b: F.cross_entropy(model.head(a), b, reduction="sum"),
                rows, right, use_reentrant=False,
            )  # fmt: skip
            total = total + part
        return total / len(target)

    return training(Transformer(causal=True), loss, words, 768)


def micro_batches() -> Training:
    """Gradients of at most 8 samples each are summed within the step, then clipped."""
    model = Transformer(causal=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> None:
        for part in batch["ids"].split(8):
            (shifted(model(part), part) * len(part) / len(batch["ids"])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Training(model, optimizer, step, words, 256, min_size=2)


def counted_tokens() -> Training:
    """The loss is divided by a Python int of the mask, and logged as a float each step."""
    model, log = Transformer(causal=True), []
    optimizer = torch.optim.Adam(model.parameters())

    def make(n: int, length: int) -> Batch:
        return {"ids": ids(n, length), "lengths": lengths(n, length)}

    def step(batch: Batch) -> None:
        mask = torch.arange(batch["ids"].shape[1])[None] < batch["lengths"][:, None]
        each = F.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        loss = (each * mask).sum() / int(mask.sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log[:] = [loss.item()]

    return Training(model, optimizer, step, make, 512)


def translator() -> Training:
    """`nn.Transformer` on source and target, with a causal mask and one of each padding."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            self.body = nn.Transformer(WIDTH, 4, 1, 2, 96, batch_first=True)

        def forward(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(t.shape[1])
            y = self.body(self.embed(s), self.embed(t), tgt_mask=causal, tgt_is_causal=True,
                          src_key_padding_mask=s == 0)  # fmt: skip
            return self.head(y)

    def make(n: int, size: tuple[int, int]) -> Batch:
        return {"s": ids(n, size[0]), "t": ids(n, size[1] + 1)}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch["s"], batch["t"][:, :-1])
        return F.cross_entropy(logits.mT, batch["t"][:, 1:], label_smoothing=0.1)

    return training(Translator(), loss, make, (256, 128))


class Relative(nn.Module):
    """Transformer-XL's relative positions: the shift pads, reshapes and cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv, self.place = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two = (nn.Parameter(torch.zeros(4, 1, WIDTH // 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        n, length, width = x.shape
        q, k, v = (y.view(n, length, 4, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        distance = torch.arange(length - 1, -1, -1.0)
        angles = distance[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        place = self.place(torch.cat([angles.sin(), angles.cos()], -1))
        by_place = (q + self.two) @ place.view(length, 4, -1).permute(1, 2, 0)
        by_place = F.pad(by_place, (1, 0)).view(n, 4, length + 1, length)[:, :, 1:]
        scores = ((q + self.one) @ k.mT + by_place) / math.sqrt(width // 4)
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        y = scores.masked_fill(hidden, -1e9).softmax(-1) @ v
        return self.head(x + y.transpose(1, 2).reshape(n, length, width))


def relative_positions() -> Training:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten())

    return training(Relative(), loss, words, 512)


class Latents(nn.Module):
    """Sixteen learned vectors attend to the sequence, twice; reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.latents = nn.Parameter(torch.randn(16, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16 * WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        z = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            z = z + checkpoint(lambda a, b: self.attention(a, b, b)[0], z, x, use_reentrant=True)
        return self.head(z.flatten(1))


def labelled_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["label"])


def latents() -> Training:
    return training(Latents(), labelled_loss, words, 2048, torch.optim.RMSprop)


class Experts(nn.Module):
    """Each expert takes a capacity of 1.25 · tokens / experts, by one-hot matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.gate = nn.Linear(WIDTH, 4)
        self.inner = nn.Parameter(torch.randn(4, WIDTH, 96) / 7)
        self.outer = nn.Parameter(torch.randn(4, 96, WIDTH) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x).flatten(0, 1)
        capacity = math.ceil(1.25 * y.shape[0] / 4)
        weight, chosen = self.gate(y).softmax(-1).max(-1)
        expert = F.one_hot(chosen, 4)
        place = (expert.cumsum(0) * expert).sum(-1) - 1
        kept = place < capacity
        slot = F.one_hot(place.clamp(max=capacity - 1), capacity) * kept[:, None]
        sent = (expert[:, :, None] * slot[:, None]).to(y.dtype)
        out = torch.einsum("tec,td->ecd", sent, y)
        out = (out @ self.inner).relu() @ self.outer
        y = y + torch.einsum("tec,ecd->td", sent * weight[:, None, None], out)
        return self.head(y).unflatten(0, x.shape)


def capacity_experts() -> Training:
    return training(Experts(), decoder_loss, words, 128, min_size=2)


class Routed(Experts):
    """Each expert takes the tokens that chose it: no trace can tell how many."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x).flatten(0, 1)
        weight, chosen = self.gate(y).softmax(-1).max(-1)
        out = torch.zeros_like(y)
        for k in range(4):
            mine = (chosen == k).nonzero()[:, 0]
            each = (y[mine] @ self.inner[k]).relu() @ self.outer[k]
            out = out.index_add(0, mine, each * weight[mine, None])
        return self.head(y + out).unflatten(0, x.shape)


def routed_experts() -> Training:
    return training(Routed(), decoder_loss, words, 128, min_size=2)


# ---------------------------------------------------------------------- batches of the library


def mask_of_padded() -> Training:
    """`PadCollate`'s batch, whose `mask` hides the padding."""
    collate = PadCollate()

    def make(n: int, length: int) -> Any:
        ends = lengths(n, length).tolist()
        return collate([{"ids": ids(1, end)[0], "label": torch.tensor(1)} for end in ends])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["ids"], ~batch.mask), batch["label"])

    return training(Encoder(), loss, make, 512)


def packed_rows() -> Training:
    """`PackCollate`'s batch: all tokens in a row, means of the samples by their ends."""
    collate = PackCollate()
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 192), nn.GELU(), nn.Linear(192, WORDS)
    )

    def make(n: int, length: int) -> Any:
        return collate([{"ids": row} for row in ids(n, length)])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["ids"])
        of = torch.repeat_interleave(
            torch.arange(batch.num_samples), batch.lengths, output_size=len(logits)
        )
        mean = logits.new_zeros(batch.num_samples, WORDS).index_add(0, of, logits)
        mean = mean / batch.lengths[:, None]
        return F.cross_entropy(logits, batch["ids"]) + mean.square().mean()

    return training(model, loss, make, 1024)


# ---------------------------------------------------------------------- loops, recurrence, sound


def tagger() -> Training:
    """A conditional random field: the forward algorithm walks over the length."""

    class Tagger(nn.Module):
        def __init__(self, tags: int = 12) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, tags)
            self.move = nn.Parameter(torch.randn(tags, tags))

        def forward(self, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
            scores = self.head(self.embed(x))
            alpha = scores[:, 0]
            for t in range(1, x.size(1)):
                alpha = torch.logsumexp(alpha[:, :, None] + self.move, 1) + scores[:, t]
            path = scores.gather(2, tags[..., None]).sum((1, 2))
            path = path + self.move[tags[:, :-1], tags[:, 1:]].sum(1)
            return (alpha.logsumexp(1) - path).mean()

    def make(n: int, length: int) -> Batch:
        return {"ids": ids(n, length), "tags": torch.randint(12, (n, length))}

    return training(Tagger(), lambda model, b: model(b["ids"], b["tags"]), make, 96, min_size=2)


def recurrent(kind: Any, layers: int, longest: int) -> Training:
    """Two directions, then a word for each position."""
    dropout = 0.2 if layers > 1 else 0.0
    model = Recurrent(kind, layers, 40, bidirectional=True, dropout=dropout)
    return training(model, decoder_loss, words, longest, min_size=2)


def ctc() -> Training:
    """Strided convolutions over frames and the CTC loss on their logits."""
    model = nn.Sequential(
        nn.Conv1d(40, 64, 11, stride=2, padding=5),
        nn.BatchNorm1d(64),
        nn.Hardtanh(0, 20),
        nn.Conv1d(64, 64, 11, padding="same", dilation=2),
        nn.ReLU(),
        nn.Conv1d(64, 30, 1),
    )

    def make(n: int, length: int) -> Batch:
        letters = max(length // 8, 1)
        return {
            "frames": torch.randn(n, 40, length),
            "letters": torch.randint(1, 30, (n, letters)),
            "ends": lengths(n, letters),
        }

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        y = model(batch["frames"]).permute(2, 0, 1).log_softmax(-1)
        steps = torch.full((y.shape[1],), y.shape[0])
        return F.ctc_loss(y, batch["letters"], steps, batch["ends"], zero_infinity=True)

    return training(model, loss, make, 1600, min_size=16, max_n=128)


class Wave(nn.Module):
    """A spectrogram within the step, then convolutions and pooling that rounds up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64), persistent=False)
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 64, 32, window=self.window, return_complex=True).abs()
        return self.body(spectrum.clamp(min=1e-5).log()[:, None])


def spectrogram() -> Training:
    def make(n: int, length: int) -> Batch:
        return {"ids": torch.randn(n, length), "label": torch.randint(5, (n,))}

    return training(Wave(), labelled_loss, make, 16_000, min_size=160, max_n=64)


def dilated() -> Training:
    """Causal convolutions of growing dilation with gates, padded on the left by hand."""

    class Dilated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(1, 24, 1), nn.Conv1d(24, 64, 1)
            self.gates = nn.ModuleList(nn.Conv1d(24, 48, 2, dilation=2**k) for k in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for k, gate in enumerate(self.gates):
                one, two = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
                x = x + one.tanh() * two.sigmoid()
            return self.last(x)

    def make(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, 1, length)}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch["x"]
        return F.cross_entropy(model(x), ((x[:, 0].clamp(-2, 2) + 2) * 15).long())

    return training(Dilated(), loss, make, 8000, torch.optim.NAdam, min_size=50, max_n=64)


def windows() -> Training:
    """Attention within windows of 32, to which the sequence is padded, and top half pooling."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
            self.score, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            x = self.embed(F.pad(x, (0, (-length) % 32)))
            q, k, v = self.qkv(x).unflatten(1, (-1, 32)).chunk(3, -1)
            x = x + ((q @ k.mT).softmax(-1) @ v).flatten(1, 2)
            best = self.score(x)[..., 0].topk((length + 1) // 2, dim=1).indices
            return self.head(x.gather(1, best[..., None].expand(-1, -1, WIDTH)).amax(1))

    return training(Windows(), labelled_loss, words, 1000)


SEQUENCES: dict[str, Callable[[], Training]] = {
    "encoder, padding masked": encoder,
    "decoder, checkpoints, autocast": checkpointed,
    "decoder, chunked loss": chunked_loss,
    "decoder, micro-batches": micro_batches,
    "decoder, tokens counted": counted_tokens,
    "translator": translator,
    "relative positions": relative_positions,
    "latents": latents,
    "experts of a capacity": capacity_experts,
    "experts, routed": routed_experts,
    "encoder, PaddedBatch.mask": mask_of_padded,
    "PackedBatch": packed_rows,
    "conditional random field": tagger,
    "LSTM": lambda: recurrent(nn.LSTM, 2, 96),
    "GRU": lambda: recurrent(nn.GRU, 1, 48),
    "speech, CTC": ctc,
    "spectrogram": spectrogram,
    "dilated convolutions": dilated,
    "windows": windows,
}
