"""A small pre-norm decoder-only transformer, the language model that the default sweep trains.
It has no biases: they are vectors, which no low rank compresses, and the model trains as well without."""

import math

import torch
from torch import nn
from torch.nn.functional import gelu
from torch.nn.functional import scaled_dot_product_attention

from powersgd_lab.settings import require


class GPT(nn.Module):
    """Tokens (B, T) int64, T at most `context`, to logits (B, T, vocabulary).

    `width` is the stream's, shared among `heads`. Raises ValueError for sizes that cannot work, naming the key."""

    def __init__(self, layers: int, width: int, heads: int, dropout: float, vocabulary: int, context: int) -> None:
        super().__init__()
        require(layers >= 1, "model.layers", layers, "at least 1")
        require(width >= 1, "model.width", width, "at least 1")
        require(heads >= 1 and width % heads == 0, "model.heads", heads, f"a divisor of model.width={width}")
        require(0 <= dropout < 1, "model.dropout", dropout, "in [0, 1)")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        # Not tied to the token embedding: with characters that saves next to nothing, and the two want other scales.
        # (Tried, 200 steps on python_source at width 128: validation loss 2.42 so, 2.50 tied, 2.73 from a zero output.)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self._initialize(layers)

    def _initialize(self, layers: int) -> None:
        """Matrices keep the variance of what passes through them, at any width; the 2 `layers` branches that are added
        to the stream are scaled down so that the sum keeps it too (GPT-2, section 2.3)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
        with torch.no_grad():
            for block in self.blocks:
                assert isinstance(block, Block)
                block.attended.weight /= math.sqrt(2 * layers)
                block.narrow.weight /= math.sqrt(2 * layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        require(length <= self.context, "a sample's length", length, f"at most the model's context of {self.context}")
        positions = torch.arange(length, device=tokens.device)
        stream = self.blocks(self.dropout(self.tokens(tokens) + self.positions(positions)))
        logits: torch.Tensor = self.output(self.norm(stream))
        return logits


class Block(nn.Module):
    """Stream (B, T, width) to the same: to it are added causal self-attention, then, position by position, a GELU
    layer four times as wide; each reads the stream through a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.wide_norm = nn.LayerNorm(width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.dropout(self.attended(self._attend(self.attention_norm(stream))))
        perceptron: torch.Tensor = self.dropout(self.narrow(gelu(self.wide(self.wide_norm(stream)))))
        return stream + perceptron

    def _attend(self, stream: torch.Tensor) -> torch.Tensor:
        batch, length, width = stream.shape
        by_head = self.queries_keys_values(stream).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = by_head.unbind()
        dropout = self.dropout.p if self.training else 0.0
        heads = scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        joined: torch.Tensor = heads.transpose(1, 2).reshape(batch, length, width)
        return joined
