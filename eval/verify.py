"""Verification is a transaction: `verify` scores a draft tree and changes nothing, `commit` makes a path the past.

One forward of the target scores all nodes. Node i stands at position past + depth(i) and attends to the past and to its
ancestors only, so its logits are those of a plain forward over its root path. Node 0 (the last accepted token, not yet
in the cache) is always on the path.

Full-attention targets: keys and values of the nodes are appended for the forward; `commit` gathers the accepted rows and
drops the rest. A target with any other kind of layer is refused by name, never run wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from configs.load import UserError
from eval.tree import Tree
from extract.cache import GrowingLayer, cache_argument, new_cache
from extract.target import Target, record_taps


class Verifier:
    """The target's past and the transaction on it. One sequence; `taps` as in extraction."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target, self.taps = target, tuple(taps)
        self.cache = new_cache(target.config)
        others = sorted(
            {type(x).__name__ for x in self.cache.layers if not isinstance(x, GrowingLayer)}
        )
        if others or not self.cache.layers:
            raise UserError(
                f"{target.label} has layers whose state is kept as {', '.join(others) or 'an unknown cache'}; "
                "only full-attention targets can be verified losslessly so far"
            )
        self.past = 0
        self.pending = 0  # nodes of an open transaction

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The prompt becomes the past. Returns (logits [V] after its last token, features [T, F])."""
        assert self.past == 0, "prefill comes first"
        ids = torch.tensor([list(prompt)], device=self.target.device)
        logits, features = self._forward(ids, None, last_only=True)
        self.past = len(prompt)
        return logits[-1], features

    @torch.inference_mode()
    def verify(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Score the nodes: (logits [n, V], features [n, F]). The past stays what it was."""
        self.rollback()
        device, n = self.target.device, len(tree.tokens)
        mask = torch.ones(n, self.past + n, dtype=torch.bool, device=device)
        mask[:, self.past :] = tree.ancestor_mask()
        # additive, because `eager` adds what it is given and `sdpa` takes either form
        blocked = torch.finfo(self.target.dtype).min
        additive = torch.zeros(mask.shape, dtype=self.target.dtype, device=device).masked_fill_(
            ~mask, blocked
        )
        out = self._forward(
            tree.tokens[None].to(device),
            additive[None, None],
            positions=self.past + tree.depths[None].to(device),
        )
        self.pending = n
        return out

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Make these nodes of the last verified tree, root first, the past; the other nodes are forgotten."""
        assert self.pending and path[0] == 0, "commit follows verify, and the root is on every path"
        rows = self.past + torch.tensor(list(path), device=self.target.device)
        for layer in self.cache.layers:
            assert isinstance(layer, GrowingLayer)
            layer.keep(self.past, rows)
        self.past += len(path)
        self.pending = 0

    def rollback(self) -> None:
        """Forget an open transaction."""
        if self.pending:
            for layer in self.cache.layers:
                assert isinstance(layer, DynamicLayer)
                layer.crop(-self.pending)
            self.pending = 0

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        positions: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        target = self.target
        with record_taps(target.layers, self.taps) as recorded:
            hidden = target.decoder(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                **cache_argument(target.decoder, self.cache),
            ).last_hidden_state[0]
        return target.logits(hidden[-1:] if last_only else hidden), recorded.features(
            target.device
        )[0]
