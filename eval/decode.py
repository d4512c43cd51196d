"""The live loop: draft, verify, commit, until the answer ends.

One loop for every decoder; they differ in the tree they propose. It knows nothing about layer types, and what it
returns is what plain decoding would have written. Greedy: token for token. Sampled: the tree is fixed before the first
draw, and each token is one draw from the target's distribution after the text before it. So the answers are distributed
as those of plain sampling, and with the same generator they are the same, as far as rounding lets them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.tree import Tree, build_tree, chain_tree
from eval.verify import Verifier
from extract.cache import GrowingLayer
from extract.choose import GREEDY, Sampler
from extract.head import TargetHead
from extract.target import Target
from train.drafter import FULL, DFlashDrafter, Mask

# Logits of the D drafting slots, [D, V], and the root token -> the tree to verify.
Propose = Callable[[Tensor, int], Tree]


def propose_chain(logits: Tensor, root: int) -> Tree:
    """DFlash: the most likely token of every slot."""
    return chain_tree(logits.argmax(-1), root)


def propose_tree(budget: int, *, keep_chain: bool = False) -> Propose:
    """DDTree with this many nodes."""
    return lambda logits, root: build_tree(logits, root, budget, keep_chain=keep_chain)


class Drafting:
    """The drafter's side of a decode: the keys and values of the committed context, and drafts on top of it."""

    def __init__(self, drafter: DFlashDrafter, head: TargetHead) -> None:
        self.drafter, self.head = drafter, head.used_by(drafter.shape)
        self.layers = [GrowingLayer() for _ in drafter.layers]
        self.length = 0

    @torch.inference_mode()
    def append(self, features: Tensor) -> None:
        """features [n, F] of the tokens that have just become the past, in order."""
        positions = torch.arange(self.length, self.length + len(features), device=features.device)[
            None
        ]
        dtype = self.drafter.fc.weight.dtype
        for layer, (k, v) in zip(
            self.layers, self.drafter.context(features[None].to(dtype), positions), strict=True
        ):
            layer.update(k, v)
        self.length += len(features)

    @torch.inference_mode()
    def draft(self, root: int) -> Tensor:
        """Logits [D, V] of the tokens after `root`, which stands right behind the context."""
        drafter, shape = self.drafter, self.drafter.shape
        device = drafter.fc.weight.device
        ids = torch.full((1, shape.block_size), shape.mask_token_id, device=device)
        ids[0, 0] = root
        positions = torch.arange(self.length, self.length + shape.block_size, device=device)[None]
        masks: dict[str, Mask] = {
            kind: self._mask(kind, device) for kind in set(drafter.config.layer_types)
        }
        context: Any = [(x.keys, x.values) for x in self.layers]  # there since the prompt's append
        embeddings = self.head.embed(ids).to(drafter.fc.weight.dtype)
        hidden = drafter.slots(embeddings, positions, context, masks)
        return self.head.logits(hidden[0, shape.first :])

    def _mask(self, kind: str, device: torch.device) -> Tensor | None:
        causal = self.drafter.shape.causal(kind)
        if kind == FULL and not causal:
            return None
        size = self.drafter.shape.block_size
        slot = torch.arange(size, device=device)
        distance = (self.length + slot)[:, None] - torch.arange(self.length, device=device)[None, :]
        near = distance >= 0 if kind == FULL else distance < self.drafter.config.sliding_window
        own = torch.ones(size, size, dtype=torch.bool, device=device)
        return torch.cat([near, own.tril() if causal else own], dim=1)[None, None]


@dataclass
class Decoded:
    """An answer and how it came about. `committed` and `accepted` as in eval.metrics.Answer."""

    tokens: list[int]
    committed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("draft", "build", "verify", "commit"), 0.0)
    )


class Round(NamedTuple):
    """A round as it went, for whoever watches. The tensors are the decode's own: copy what is to stay, change nothing."""

    draft: Tensor  # [D, V], the drafter's logits of the slots that draft, temperature applied
    tree: Tree
    logits: Tensor  # [n, V], the target's after each node
    path: list[int]  # the nodes that the target's choices visit, root first
    chosen: list[int]  # those choices, one after each node of the path; the last is the bonus token
    committed: int  # how many of them the answer takes: all, unless it ends here


def decode(
    target: Target,
    drafter: DFlashDrafter,
    head: TargetHead,
    prompt: Sequence[int],
    propose: Propose,
    *,
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    generator: torch.Generator | None = None,
    watch: Callable[[Round], None] | None = None,
) -> Decoded:
    """Answer one prompt. The first token comes from the prefill and belongs to no round.

    `generator` lies on the target's device; None is torch's global one. `watch` sees every round, outside the times.
    """
    stop = target.stop_ids
    verifier = Verifier(target, drafter.shape.target_layer_ids)
    drafting = Drafting(drafter, head)
    logits, features = verifier.prefill(prompt)
    drafting.append(features)
    prefix = torch.tensor([list(prompt)], device=logits.device)
    out = Decoded(tokens=[int(sampler.choose(logits[None], prefix, [generator]))])
    while out.tokens[-1] not in stop and len(out.tokens) < max_new_tokens:
        started = clock(target.device)
        draft = drafting.draft(out.tokens[-1])
        drafted = clock(target.device)
        draft = draft if sampler.greedy else draft / sampler.temperature
        tree = propose(draft, out.tokens[-1])
        built = clock(target.device)
        node_logits, node_features = verifier.verify(tree)
        path, new = walk(tree, node_logits, sampler, [*prompt, *out.tokens], generator)
        verified = clock(target.device)
        verifier.commit(path)
        drafting.append(node_features[path])
        committed = clock(target.device)

        # The answer ends at the first stop token and at the limit, wherever in the block they fall.
        end = next((i + 1 for i, token in enumerate(new) if token in stop), len(new))
        end = min(end, max_new_tokens - len(out.tokens))
        out.tokens += new[:end]
        out.committed.append(end)
        out.accepted.append(min(len(path) - 1, end))
        out.drafted += len(tree.tokens) - 1
        for name, span in zip(
            out.seconds,
            (drafted - started, built - drafted, verified - built, committed - verified),
            strict=True,
        ):
            out.seconds[name] += span
        if watch is not None:
            watch(Round(draft, tree, node_logits, path, new, end))
    return out


def clock(device: torch.device) -> float:
    """Seconds, once everything asked of the device is done: a phase is charged with its own work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def walk(
    tree: Tree,
    logits: Tensor,
    sampler: Sampler,
    text: Sequence[int],
    generator: torch.Generator | None,
) -> tuple[list[int], list[int]]:
    """The nodes that the target's own choices visit, root first, and those choices, one after each node.

    logits [n, V] of the nodes; text: prompt and answer so far, the root's token last. A visited node takes one draw with
    its own prefix, and nothing is drawn for the others. The last choice is no child: the bonus token.
    """
    if sampler.plain:  # no draws and no prefixes: one argmax serves all nodes
        wanted = logits.argmax(-1)
        path = tree.walk(wanted.to(tree.tokens.device))
        return path, wanted[path].tolist()
    children = tree.children()
    path, chosen = [0], list[int]()
    prefix = torch.tensor([list(text)], device=logits.device)
    while True:
        token = sampler.choose(logits[path[-1]][None], prefix, [generator])
        chosen.append(int(token))
        child = children[path[-1]].get(chosen[-1])
        if child is None:
            return path, chosen
        path.append(child)
        prefix = torch.cat([prefix, token[None]], dim=1)
