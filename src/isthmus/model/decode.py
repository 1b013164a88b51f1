"""One sequence, token by token: the forward of model/llama.py with cached keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.config import ModelConfig
from isthmus.model.llama import (
    BoundaryFunctions,
    Params,
    cross,
    embed,
    feed_forward,
    head,
    layer_weights,
    linear,
    mix,
    queries_keys_values,
    rms_norm,
    rope_table,
)

FIRST_ROOM = 256  # tokens; doubled when full


class Decoder:
    """Logits of the next token. The cache keeps earlier tokens, so each is computed once.

    A boundary maps every position separately, so it works between cached layers as in training.
    """

    def __init__(
        self, params: Params, model: ModelConfig, boundary_fns: BoundaryFunctions | None = None
    ) -> None:
        self.params, self.model, self.boundary_fns = params, model, dict(boundary_fns or {})
        table = params["tok_embeddings.weight"]
        self.dtype, self.device = table.dtype, table.device
        self.length = 0
        self._make_room(min(FIRST_ROOM, model.context))

    def _make_room(self, room: int) -> None:
        """Allocate for this many tokens, not the whole context: a file may state any context."""
        model = self.model
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.cos, self.sin = rope_table(model, room, exact, self.device)
        shape = (model.layers, 1, model.num_kv_heads, room, model.head_size)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        if self.length:
            keys[:, :, :, : self.length] = self.keys[:, :, :, : self.length]
            values[:, :, :, : self.length] = self.values[:, :, :, : self.length]
        self.keys, self.values = keys, values

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens; return the logits (V,) after the last."""
        if not tokens or self.length + len(tokens) > self.model.context:
            raise ValueError(f"{self.length} + {len(tokens)} tokens do not fit {self.model.context}")
        if self.length and len(tokens) > 1:  # after the first block, tokens come one at a time
            for token in tokens[:-1]:
                self.feed([token])
            tokens = tokens[-1:]
        ids = torch.tensor([list(tokens)], device=self.device)  # (1, L)
        x = embed(self.params, ids, self.dtype)
        end = self.length + len(tokens)
        if end > len(self.cos):
            self._make_room(min(max(end, 2 * len(self.cos)), self.model.context))
        for i in range(self.model.layers):
            if i in self.boundary_fns:
                x = cross(x, ids, self.boundary_fns[i])
            x = self._layer(i, x, end)
        self.length = end
        return head(self.params, x[:, -1:], self.model)[0, 0]

    def _layer(self, i: int, x: Tensor, end: int) -> Tensor:
        weights, eps = layer_weights(self.params, i, self.model), self.model.norm_eps
        here = slice(self.length, end)
        normed = rms_norm(x, weights["attention_norm.weight"], eps)
        q, k, v = queries_keys_values(weights, normed, self.model, self.cos[here], self.sin[here])
        self.keys[i, :, :, here] = k
        self.values[i, :, :, here] = v
        mixed = mix(q, self.keys[i, :, :, :end], self.values[i, :, :, :end], is_causal=x.shape[1] > 1)
        x = x + linear(mixed.transpose(1, 2).flatten(2), weights["attention.wo.weight"])
        normed = rms_norm(x, weights["ffn_norm.weight"], eps)
        return x + feed_forward(weights, normed)
