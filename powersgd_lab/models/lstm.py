"""A recurrent language model, the text model of the PowerSGD paper (3 layers of 650 units, tied, on WikiText-2).
Its large recurrent matrices are where low-rank gradients save most."""

import torch
from torch import nn

from powersgd_lab.settings import require


class LSTM(nn.Module):
    """Tokens (B, T) int64 to logits (B, T, vocabulary): embedding, `layers` LSTM layers of `units`, output layer.

    The embedding is as wide as a layer, so that with `tied` its matrix is the output layer's too (arXiv:1611.01462);
    the output bias is its own. Each sample starts from a zero state: samples come shuffled. `dropout` acts on the
    embedded tokens, between the layers and before the output. Raises ValueError for sizes below 1."""

    def __init__(self, layers: int, units: int, dropout: float, tied: bool, vocabulary: int) -> None:
        super().__init__()
        require(layers >= 1, "model.layers", layers, "at least 1")
        require(units >= 1, "model.units", units, "at least 1")
        require(0 <= dropout < 1, "model.dropout", dropout, "in [0, 1)")
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, units)
        # with one layer nn.LSTM has no place between layers for dropout, and warns
        self.recurrent = nn.LSTM(units, units, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        self.output = nn.Linear(units, vocabulary)
        # the scale of PyTorch's word_language_model example; nn.Embedding's own, 1, is too large for a tied output
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.dropout(self.embedding(tokens)))
        logits: torch.Tensor = self.output(self.dropout(hidden))
        return logits
