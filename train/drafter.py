"""The DFlash drafter: a small block-diffusion decoder that reads the target's hidden states.

Shapes: R rows, L context tokens, S slots (blocks of B laid side by side), H hidden, F = taps * H.
Names and arithmetic are those of the released checkpoints (z-lab DFlash), so that serving engines load ours unchanged:

    c_t = hidden_norm(fc(feature_t))                                     context, shared by all layers
    layer: K, V from [context ; slots], Q from the slots only, then o_proj and a gated MLP, both residual
    out = norm(x)                                                        the target's own head makes logits of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding, rotate_half

FULL, SLIDING = "full_attention", "sliding_attention"
Rope = tuple[Tensor, Tensor]  # cos, sin, each [R, n, head_dim]
Mask = (
    Tensor | BlockMask | None
)  # [R, 1, S, L+S], True: sees; or the same for FlexAttention; None sees everything


@dataclass(frozen=True)
class DraftShape:
    """The DFlash part of a checkpoint's config.json."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None  # None: the checkpoint does not say
    causal_sliding: bool = False  # inside the block, in sliding layers
    causal_full: bool = False  # the same in full layers
    # Slot k predicts the token k + 1 after the anchor, not k, so that slot 0 drafts as well.
    sample_from_anchor: bool = False
    # How the drafter uses the target's tables: their rows times a factor, its own logits times another, then capped.
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @property
    def first(self) -> int:
        """The first slot that predicts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts, D; a round commits D + 1 of them at most."""
        return self.block_size - self.first

    def causal(self, kind: str) -> bool:
        """Whether a slot in a layer of this kind sees nothing of its block beyond itself."""
        return self.causal_sliding if kind == SLIDING else self.causal_full


class RMSNorm(nn.Module):
    """Qwen3's, with a result in the input's dtype: a float32 weight would make the whole layer's traffic float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[R, n, H] -> rotated keys and values, each [R, kv_heads, n, head_dim]."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return _rotate(k, rope), v

    def forward(self, x: Tensor, rope: Rope, context: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """x [R, S, H], context keys and values [R, kv_heads, L, head_dim]."""
        q = self.q_norm(self.q_proj(x).view(*x.shape[:2], self.heads, self.head_dim)).transpose(
            1, 2
        )
        k, v = self.keys_values(x, rope)
        out = attend(
            _rotate(q, rope),
            torch.cat([context[0], k], dim=2),
            torch.cat([context[1], v], dim=2),
            mask,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention, [R, heads, S, head_dim]: SDPA, or FlexAttention (which skips what no slot sees) given its mask."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        flex = compiled(flex_attention) if q.is_cuda else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


@cache
def compiled(function: Callable[..., Any]) -> Any:
    """Compiled for the shapes it meets. Made at first use: the compiler alone takes most of a second to import."""
    return torch.compile(function, dynamic=False)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = (part[:, None] for part in rope)  # every head alike
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class DraftLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, context: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashDrafter(nn.Module):
    """See the module's head. `config` is a Qwen3Config, `shape` what DFlash adds to it.

    One block of B = 4 after a text of L = 10 tokens, for a target of width 16 that is tapped twice (`drafter_config`
    makes the config from a target's):

    >>> config = Qwen3Config(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      num_key_value_heads=1, head_dim=8, vocab_size=50)
    >>> shape = DraftShape(block_size=4, mask_token_id=49, target_layer_ids=(1, 3), num_target_layers=6)
    >>> drafter = DFlashDrafter(config, shape)
    >>> features = torch.randn(1, 10, 2 * 16)                           # [R, L, F], the target's states
    >>> context = drafter.context(features, torch.arange(10)[None])     # keys and values, layer by layer
    >>> [(k.shape, v.shape) for k, v in context]                        # each [R, kv_heads, L, head_dim]
    [(torch.Size([1, 1, 10, 8]), torch.Size([1, 1, 10, 8]))]
    >>> embeddings = torch.randn(1, 4, 16)        # [R, S, H], by the target's table: token 10, then three mask tokens
    >>> hidden = drafter.slots(embeddings, torch.arange(10, 14)[None], context, {FULL: None})
    >>> hidden.shape                              # [R, S, H]; the target's head makes logits of slots 1..3
    torch.Size([1, 4, 16])
    """

    def __init__(self, config: Qwen3Config, shape: DraftShape) -> None:
        super().__init__()
        self.config: Any = config
        self.shape = shape
        hidden = config.hidden_size
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(shape.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)  # no parameters and no persistent buffers
        self.autocast: torch.dtype | None = None  # training precision; weights stay float32
        self.origin: dict[str, Any] = {}  # what made it; goes into config.json

    def reset_parameters(self, seed: int) -> None:
        """Normal with the config's initializer_range, norms at one; the same weights on every rank."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            if p.dim() == 1:
                nn.init.ones_(p)
            else:
                nn.init.normal_(p, std=self.config.initializer_range, generator=generator)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of context tokens, layer by layer.

        features [R, L, F] and positions [R, L] -> per layer (keys, values), each [R, kv_heads, L, head_dim].
        They depend on nothing but the token's own feature and position, so decoding appends to them.
        """
        c = self.hidden_norm(self.fc(features))
        rope = self.rotary(c, positions)
        layers: Any = self.layers
        return [layer.self_attn.keys_values(c, rope) for layer in layers]

    def slots(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: Sequence[tuple[Tensor, Tensor]],
        masks: dict[str, Mask],
    ) -> Tensor:
        """Final hidden states of the slots, ready for the target's head.

        embeddings [R, S, H] of the slots' tokens (anchor, then mask tokens), positions [R, S], context as from
        `context`, masks by layer type.
        """
        x, rope = embeddings, self.rotary(embeddings, positions)
        for layer, kind, kv in zip(self.layers, self.config.layer_types, context, strict=True):
            x = layer(x, rope, kv, masks[kind])
        out: Tensor = self.norm(x)
        factor = self.shape.output_multiplier
        return out * factor if factor != 1.0 else out

    def forward(
        self,
        features: Tensor,
        context_positions: Tensor,
        embeddings: Tensor,
        slot_positions: Tensor,
        masks: dict[str, Mask],
    ) -> Tensor:
        """Context and slots in one pass, as in training: [R, S, H]."""
        with torch.autocast(
            features.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            context = self.context(features, context_positions)
            return self.slots(embeddings, slot_positions, context, masks)


def drafter_config(target: Any, **overrides: Any) -> Qwen3Config:
    """A drafter config with the target's widths and rope; `overrides` are Qwen3Config fields, None is ignored."""
    rope = dict(target.rope_parameters)
    if not isinstance(rope.get("rope_theta"), (int, float)) or "mrope_section" in rope:
        # per-layer-type or multimodal rope: the drafter rotates plainly with the target's base
        theta = rope.get("rope_theta") or rope.get(FULL, {}).get("rope_theta", 10_000.0)
        rope = {"rope_type": "default", "rope_theta": theta}
    rope.pop("partial_rotary_factor", None)  # a drafter rotates whole heads; vLLM would follow it
    heads = target.num_attention_heads
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": getattr(target, "intermediate_size", None) or 3 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_cache": True,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
    }
    fields.update({k: v for k, v in overrides.items() if v is not None})
    return Qwen3Config(**fields)
