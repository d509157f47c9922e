"""The Llama family's forward pass, as mathematics on the flat batch. Knows no names of weights and no files.

T tokens of the step   D hidden size   H query heads   K key/value heads   A head size   F feed-forward size
V vocabulary   S positions that give logits   E = A / 2 rotated pairs
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.dispatch import Ops
from services.worker.attention import StepAttention
from services.worker.batch import Batch
from services.worker.cache import KVCache, KvLayout
from services.worker.layers import Layer, Weights
from services.worker.models.config import ModelConfig
from services.worker.models.rotary import frequencies


class Decoder:
    """One decoder: tokens to hidden states, hidden states to logits."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.config = config
        self.dtype = weights.embedding_VD.dtype
        self.device = weights.embedding_VD.device
        self.weight_bytes = weights.nbytes
        self.kv_layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype)
        self._weights = weights
        self._ops = ops
        inv_freq_E, self._rope_scale = frequencies(config.rope, config.head_dim)
        self._inv_freq_E = inv_freq_E.to(self.device)

    def one_layer(self) -> Decoder:
        """The same model with the one layer that sees furthest: it takes as much memory for a step as the whole."""
        widest = max(
            range(self.config.num_layers), key=lambda index: self.config.windows[index] or self.config.max_model_len
        )
        config = replace(self.config, windows=(self.config.windows[widest],))
        return Decoder(config, replace(self._weights, layers=(self._weights.layers[widest],)), self._ops)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """The final hidden states [T, D], normed; writes the keys and values of the batch into the cache."""
        ops, eps, layers = self._ops, self.config.rms_norm_eps, self._weights.layers
        cos_TE, sin_TE = ops.rope_cos_sin(batch.positions_T, self._inv_freq_E, self._rope_scale, self.dtype)
        attention = StepAttention(ops, batch, cache, self.config.windows, self.config.head_dim**-0.5)
        residual_TD = ops.embedding(batch.input_ids_T, self._weights.embedding_VD)
        x_TD = ops.rms_norm(residual_TD, layers[0].attention_norm_D, eps)
        next_norms = [layer.attention_norm_D for layer in layers[1:]] + [self._weights.final_norm_D]
        for index, (layer, next_norm_D) in enumerate(zip(layers, next_norms, strict=True)):
            q_THA, k_TKA, v_TKA = self._queries_keys_values(layer, x_TD, cos_TE, sin_TE)
            x_TD = layer.output(attention(index, q_THA, k_TKA, v_TKA).flatten(1))
            x_TD, residual_TD = ops.add_rms_norm(x_TD, residual_TD, layer.mlp_norm_D, eps)
            x_TD = layer.down(ops.silu_mul(layer.gate_up(x_TD)))
            x_TD, residual_TD = ops.add_rms_norm(x_TD, residual_TD, next_norm_D, eps)
        return x_TD

    @torch.inference_mode()
    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """float32 logits [S, V] of final hidden states."""
        return self._weights.head(hidden_SD).float()

    def _queries_keys_values(
        self, layer: Layer, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Projected, normed where the model does so, and turned by position."""
        config, ops = self.config, self._ops
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv_TNA = torch.unflatten(layer.qkv(x_TD), 1, (heads + 2 * kv_heads, config.head_dim))
        qk_TNA, v_TKA = torch.split(qkv_TNA, [heads + kv_heads, kv_heads], dim=1)
        if layer.q_norm_A is not None and layer.k_norm_A is not None:
            q_THA = ops.rms_norm(qk_TNA[:, :heads], layer.q_norm_A, config.rms_norm_eps)
            k_TKA = ops.rms_norm(qk_TNA[:, heads:], layer.k_norm_A, config.rms_norm_eps)
            qk_TNA = torch.cat((q_THA, k_TKA), dim=1)
        turned_TNA = ops.rope(qk_TNA, cos_TE, sin_TE)
        return turned_TNA[:, :heads], turned_TNA[:, heads:], v_TKA
