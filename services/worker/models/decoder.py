"""The Llama family's forward pass, as mathematics on the flat batch. Knows no names of weights and no files.

Written over the table of ops alone, so that it says the same of tensors and of the symbols of a program.

T tokens of the step   D hidden size   H query heads   K key/value heads   A head size   F feed-forward size
V vocabulary   S positions that give logits   E = A / 2 rotated pairs
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kernels.ops import Attention, Limits, Ops, Step, StepTensors, Warmed
from services.worker.batch import Batch
from services.worker.cache import KVCache, KvLayout
from services.worker.layers import Layer, Weights
from services.worker.models.config import ModelConfig
from services.worker.models.rotary import by_axis, frequencies
from services.worker.models.vision import VisionEncoder


class Decoder:
    """One decoder: tokens to hidden states, hidden states to logits."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops[Any], encoder: VisionEncoder | None = None
    ) -> None:
        self.config = config
        self.encoder = encoder  # of what it reads beside tokens
        self.dtype = weights.dtype
        self.device = weights.device
        self.weight_bytes = weights.nbytes + (encoder.weight_bytes if encoder is not None else 0)
        self.kv_layout = KvLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, ops.kv_dtype or self.dtype, ops.kv_block
        )
        self._weights = weights
        self.ops = ops
        # Not methods of this object: what holds itself is not freed when it is let go.
        mathematics = _Mathematics(config, weights, ops)
        self._forward = ops.compile(mathematics.hidden)
        self._likeliest = ops.compile(mathematics.likeliest)
        self._logits = ops.compile_rows(weights.head, config.hidden_size)
        self._likeliest_of = ops.compile_rows(mathematics.likeliest_of, config.hidden_size)

    def one_layer(self) -> Decoder:
        """The same model with the one layer that sees furthest: it takes as much memory for a step as the whole."""
        widest = max(
            range(self.config.num_layers), key=lambda index: self.config.windows[index] or self.config.max_model_len
        )
        config = replace(self.config, windows=(self.config.windows[widest],))
        return Decoder(config, replace(self._weights, layers=(self._weights.layers[widest],)), self.ops)

    @property
    def listing(self) -> str:
        """The program that a pass runs, to read; empty where there is none."""
        return self._forward.listing

    def warm(self, limits: Limits | None) -> Warmed:
        """See kernels.ops.Pass."""
        with torch.inference_mode():
            made = [each.warm(limits) for each in (self._forward, self._likeliest)]
        return Warmed(sum(each.graphs for each in made), sum(each.bytes for each in made))

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """The final hidden states [T, D], normed; writes the keys and values of the batch into the cache.

        What it gives, and what `logits` gives, may be overwritten by the next call.
        """
        return self._forward(_given(batch, cache))

    def pairs(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """The same as `likeliest`, as kernels.largest writes pairs, without waiting for the device."""
        return self._likeliest(_given(batch, cache))

    def likeliest(self, batch: Batch, cache: KVCache) -> tuple[list[int], list[float]]:
        """For every token of the batch the one with the largest logit behind it, and that logit.

        The same as `forward`, `logits` and an argmax, without anything in between that is kept.
        """
        return _unpaired(self.pairs(batch, cache))

    def likeliest_of(self, hidden_SD: torch.Tensor) -> tuple[list[int], list[float]]:
        """The same for final hidden states: that of `logits` and an argmax."""
        return _unpaired(self._likeliest_of(hidden_SD))

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """float32 logits [S, V] of final hidden states."""
        return self._logits(hidden_SD).float()


def _unpaired(pairs_N2: torch.Tensor) -> tuple[list[int], list[float]]:
    numbers_N2 = (pairs_N2 if pairs_N2.is_cpu else pairs_N2.cpu()).numpy()
    return numbers_N2.view(np.int32)[:, 0].tolist(), numbers_N2[:, 1].tolist()


def _given(batch: Batch, cache: KVCache) -> StepTensors:
    batch = batch.on(cache.tensor.device)
    rows = batch.rows(cache.block_size)
    return StepTensors(batch.input_ids_T, batch.positions_T, batch.slots_T, rows, cache.tensor, batch.media)


class _Mathematics:
    """The pass itself: symbols or tensors in, symbols or tensors out."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops[Any]) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        inv_freq_E, self._rope_scale = frequencies(config.rope, config.head_dim)
        self._inv_freq_E = inv_freq_E.to(weights.device)
        if config.rope.axes:
            self._inv_freq_3E = by_axis(inv_freq_E, config.rope.axes).to(weights.device)

    def hidden(self, step: Step[Any]) -> Any:
        """x_TD of the step's tokens."""
        ops, config, layers = self._ops, self._config, self._weights.layers
        eps = config.rms_norm_eps
        cos_TE, sin_TE = self._angles(step)
        residual_TD = ops.embedding(step.ids_T, self._weights.embedding)
        media_parts = config.vision.parts if config.vision is not None else 0
        if media_parts:
            residual_TD = ops.replace_rows(residual_TD, step.media, 0)
        x_TD = ops.rms_norm(residual_TD, layers[0].attention_norm_D, eps)
        next_norms = [layer.attention_norm_D for layer in layers[1:]] + [self._weights.final_norm_D]
        for index, (layer, next_norm_D) in enumerate(zip(layers, next_norms, strict=True)):
            qk_TNA, v_TKA = self._queries_keys_values(layer, x_TD)
            how = Attention(index, config.num_heads, config.windows[index], config.head_dim**-0.5)
            x_TD = step.attend(how, qk_TNA, v_TKA, cos_TE, sin_TE)
            x_TD, residual_TD = ops.add_rms_norm(layer.output(x_TD), residual_TD, layer.mlp_norm_D, eps)
            x_TD = layer.down(ops.silu_mul(layer.gate_up(x_TD)))
            if index + 1 < media_parts:
                x_TD = ops.add_rows(x_TD, step.media, index + 1)
            x_TD, residual_TD = ops.add_rms_norm(x_TD, residual_TD, next_norm_D, eps)
        return x_TD

    def _angles(self, step: Step[Any]) -> tuple[Any, Any]:
        """cos_TE and sin_TE of the tokens' positions, which have three axes where media have."""
        scale, dtype = self._rope_scale, self._weights.dtype
        if not self._config.rope.axes:
            return self._ops.rope_cos_sin(step.positions_T, self._inv_freq_E, scale, dtype)
        return self._ops.rope_axes_cos_sin(step.positions_3T, self._inv_freq_3E, scale, dtype)

    def likeliest(self, step: Step[Any]) -> Any:
        """The largest logit of each token, and whose it is."""
        return self.likeliest_of(self.hidden(step))

    def likeliest_of(self, x_SD: Any) -> Any:
        """The same of final hidden states."""
        return self._ops.largest(self._weights.head(x_SD))

    def _queries_keys_values(self, layer: Layer, x_TD: Any) -> tuple[Any, Any]:
        """Projected, queries and keys side by side, and normed where the model does so."""
        config, ops = self._config, self._ops
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        qk_TNA, v_TKA = ops.split_heads(layer.qkv(x_TD), (heads + kv_heads, kv_heads), size)
        if layer.q_norm_A is not None and layer.k_norm_A is not None:
            qk_TNA = ops.qk_norm(qk_TNA, layer.q_norm_A, layer.k_norm_A, heads, config.rms_norm_eps)
        return qk_TNA, v_TKA
