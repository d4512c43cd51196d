"""Verification is a transaction: `verify` scores a draft tree and changes nothing, `commit` makes a path the past.

One forward of the target scores all nodes. Node i stands at position past + depth(i) and sees the past and its own
ancestors only, so its logits are those of a plain forward over its root path. Node 0 (the last accepted token, not yet in
the cache) is always on the path. The prompt goes through the same code: a chain, committed whole.

- Full attention: the nodes' keys and values are appended for the forward; `commit` gathers the accepted rows.
- Sliding attention: the same, and the mask keeps the window, measured in positions.
- Gated DeltaNet: eval.gated_delta in place of the layer's own forward.

A target with any other kind of layer is refused by name, never run wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from configs.load import UserError
from eval.gated_delta import PROJECTIONS, GatedDelta, Shape
from eval.tree import Tree, chain_tree
from extract.cache import GrowingLayer, cache_argument
from extract.target import Target, record_taps

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# Prompt tokens of one forward: the tree form of the delta rule costs their square.
CHUNK = 512


class Verifier:
    """The target's past and the transaction on it. One sequence; `taps` as in extraction.

    UserError for a target that cannot be verified losslessly. Here a random one, width 16, vocabulary 50:

    >>> from transformers import AutoModelForCausalLM, Qwen3Config
    >>> config = Qwen3Config(hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
    ...                      num_key_value_heads=1, head_dim=8, vocab_size=50)
    >>> target = Target(AutoModelForCausalLM.from_config(config), tokenizer=None, label="toy")
    >>> verifier = Verifier(target, taps=(1, 3))
    >>> logits, features = verifier.prefill([5, 6, 7])                 # [V], [T, F]
    >>> logits.shape, features.shape, verifier.past
    (torch.Size([50]), torch.Size([3, 32]), 3)
    >>> tree = chain_tree(torch.tensor([8, 9]), root_token=int(logits.argmax()))
    >>> logits, features = verifier.verify(tree)                       # [n, V], [n, F]: root and two drafts
    >>> logits.shape, features.shape, verifier.past                    # the past is what it was
    (torch.Size([3, 50]), torch.Size([3, 32]), 3)
    >>> verifier.commit([0, 1])                                        # the root and the first draft become the past
    >>> verifier.past
    5
    """

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target, self.taps = target, tuple(taps)
        self.kinds = layer_kinds(target)
        self.window: int = getattr(target.config, "sliding_window", None) or 0  # of sliding layers
        self.cache = DynamicCache(config=target.config)
        self.cache.layers = [
            layer if kind == LINEAR else GrowingLayer()
            for kind, layer in zip(self.kinds, self.cache.layers, strict=True)
        ]
        self.attention = [x for x in self.cache.layers if isinstance(x, GrowingLayer)]
        layers: Any = target.layers
        self.recurrent = [
            GatedDelta(layers[i].linear_attn) for i, kind in enumerate(self.kinds) if kind == LINEAR
        ]
        self.past = 0
        self.pending = 0  # nodes of an open transaction

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The prompt becomes the past. Returns (logits [V] after its last token, features [T, F])."""
        assert self.past == 0, "prefill comes first"
        ids = torch.tensor(list(prompt), device=self.target.device)
        features = []
        for chunk in ids.split(
            len(prompt) if rope_depends_on_length(self.target.config) else CHUNK
        ):
            hidden, part = self._forward(chain_tree(chunk[1:], int(chunk[0])))
            features.append(part)
            self.commit(range(len(chunk)))
        return self.target.logits(hidden[-1]), torch.cat(features)

    @torch.inference_mode()
    def verify(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Score the nodes: (logits [n, V], features [n, F]). The past stays what it was."""
        self.rollback()
        hidden, features = self._forward(tree)
        return self.target.logits(hidden), features

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Make these nodes of the last verified tree, root first, the past; the other nodes are forgotten."""
        assert self.pending and path[0] == 0, "commit follows verify, and the root is on every path"
        rows = self.past + torch.tensor(list(path))
        for layer in self.attention:
            if layer.keys is not None:  # some layers read another layer's keys and keep none
                layer.keep(self.past, rows.to(layer.keys.device))
        for recurrent in self.recurrent:
            recurrent.commit(path)
        self.past += len(path)
        self.pending = 0

    def rollback(self) -> None:
        """Forget an open transaction."""
        if self.pending:
            for layer in self.attention:
                if layer.keys is not None:
                    layer.crop(-self.pending)
            for recurrent in self.recurrent:
                recurrent.pending = None
            self.pending = 0

    def _forward(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Final hidden states [n, H] and features [n, F] of the nodes, which stay pending."""
        target, device = self.target, self.target.device
        ancestors = tree.ancestor_mask().to(device)
        depths = tree.depths.to(device)
        with (
            record_taps(target.layers, self.taps) as recorded,
            self._delta_rule_on(tree.parents.to(device), ancestors),
        ):
            out = target.decoder(
                input_ids=tree.tokens[None].to(device),
                attention_mask=self._masks(ancestors, depths),
                position_ids=self.past + depths[None],
                **cache_argument(target.decoder, self.cache),
            )
        self.pending = len(depths)
        return out.last_hidden_state[0], recorded.features(device)[0]

    def _masks(self, ancestors: Tensor, depths: Tensor) -> Tensor | dict[str, Tensor | None] | None:
        """What each kind of layer sees: a mask for all of them, or one by kind where the target mixes kinds."""
        masks: dict[str, Tensor | None] = {}
        for kind in dict.fromkeys(self.kinds):
            masks[kind] = None if kind == LINEAR else self._mask(ancestors, depths, kind)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, ancestors: Tensor, depths: Tensor, kind: str) -> Tensor:
        """[1, 1, n, past + n], additive: `eager` adds what it is given, and `sdpa` takes either form."""
        past = torch.arange(self.past, device=depths.device)
        sees = torch.cat(
            [past.new_ones(len(depths), self.past, dtype=torch.bool), ancestors], dim=1
        )
        if kind == SLIDING:
            at = self.past + depths
            sees &= at[:, None] - torch.cat([past, at])[None, :] < self.window
        blocked = torch.finfo(self.target.dtype).min
        additive = torch.zeros(sees.shape, dtype=self.target.dtype, device=depths.device)
        return additive.masked_fill_(~sees, blocked)[None, None]

    @contextmanager
    def _delta_rule_on(self, parents: Tensor, ancestors: Tensor) -> Iterator[None]:
        """Gated-DeltaNet layers run along the tree while this is open."""
        shapes: dict[torch.device, Shape] = {}  # what a shape works out serves all layers there
        replaced = []
        try:
            for recurrent in self.recurrent:
                module = recurrent.module
                at = recurrent.window.device
                if at not in shapes:
                    shapes[at] = Shape(parents.to(at), ancestors.to(at), module.conv_kernel_size)
                replaced.append((module, module.__dict__.get("forward")))
                module.forward = partial(_run, recurrent, shapes[at])
            yield
        finally:
            for module, own in replaced:
                if own is None:  # the class's
                    del module.forward
                else:  # an instance's: accelerate hooks its modules this way
                    module.forward = own


def _run(recurrent: GatedDelta, shape: Shape, hidden_states: Tensor, **_: Any) -> Tensor:
    """What the decoder layer calls: the cache and the masks that it passes are not the tree's."""
    return recurrent.forward(shape, hidden_states)


def rope_depends_on_length(config: Any) -> bool:
    """Whether the rotation of a token depends on how long the text is that is processed with it."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return any(one.get("rope_type") in ("longrope", "dynamic") for one in by_kind)


def layer_kinds(target: Target) -> tuple[str, ...]:
    """The kind of every layer. UserError names a kind that cannot be verified losslessly."""
    config, layers = target.config, list(target.layers)
    uniform = SLIDING if getattr(config, "sliding_window", None) else FULL
    kinds = tuple(getattr(config, "layer_types", None) or [uniform] * len(layers))
    foreign = {kind for kind in kinds if kind not in (FULL, SLIDING, LINEAR)}
    if SLIDING in kinds and not getattr(config, "sliding_window", None):
        foreign.add(f"{SLIDING} without a sliding_window")
    for kind, layer in zip(kinds, layers, strict=True):
        mixer = type(getattr(layer, "linear_attn" if kind == LINEAR else "self_attn", None))
        if mixer is type(None) or (kind == LINEAR and mixer.__name__ not in PROJECTIONS):
            foreign.add(f"{kind} in {type(layer).__name__}")
    if foreign:
        raise UserError(
            f"{target.label} has layers of the kind {', '.join(sorted(foreign))}; lossless verification knows "
            f"full and sliding attention and the Gated DeltaNet of {', '.join(PROJECTIONS)}"
        )
    if any(p.is_meta for layer in layers for p in layer.parameters()):
        raise UserError(
            f"{target.label} is partly offloaded; live decoding needs all of its layers in memory"
        )
    return kinds
