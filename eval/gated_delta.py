"""Gated DeltaNet layers under a draft tree: scored without touching the recurrent state, which `commit` then advances.

A Gated-DeltaNet layer (Qwen3-Next, Qwen3.5, Qwen3.6) keeps a matrix per head that every token changes. Run over a draft
tree as it stands, it would let each node read its siblings, and no rejected token could be taken back. Here the delta
rule runs along the tree (design.md 5; for a chain it is the UT transform of Yang et al. 2024, "Gated Delta Networks"), so
that every node sees the past and its own ancestors:

    c     cumulative log decay along a node's root path
    D_ij  exp(c_i - c_j) where j is i or its ancestor, else 0
    u     (I + strict_lower((beta k) k^T * D))^-1  beta (v - e^c (k S0))       what each node writes
    o     e^c (q S0) + ((q k^T) * D) u                                         what each node reads
    S     e^(c_l) S0 + sum over the path of e^(c_l - c_j) k_j u_j^T            the state after a path that ends in l

The causal convolution before it gathers its inputs along parents and, beyond the root, from the last inputs of the past.
A chain is the tree whose parents are i - 1; the prompt is a chain that is committed whole.

Shapes: n nodes, C convolution channels, K its kernel, H value heads, d_k and d_v their widths. One sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

# How the layer's own projections are laid out; everything behind them is the same in all of them.
Projected = tuple[Tensor, Tensor, Tensor, Tensor]  # qkv [n, C], z [n, H, d_v], b [n, H], a [n, H]


def _project_qwen3_next(m: Any, x: Tensor) -> Projected:
    q, k, v, z, b, a = m.fix_query_key_value_ordering(m.in_proj_qkvz(x), m.in_proj_ba(x))
    return torch.cat([t[0].flatten(1) for t in (q, k, v)], dim=-1), z[0], b[0], a[0]


def _project_qwen3_5(m: Any, x: Tensor) -> Projected:
    z = m.in_proj_z(x)[0].unflatten(-1, (-1, m.head_v_dim))
    return m.in_proj_qkv(x)[0], z, m.in_proj_b(x)[0], m.in_proj_a(x)[0]


PROJECTIONS: dict[str, Callable[[Any, Tensor], Projected]] = {
    "Qwen3NextGatedDeltaNet": _project_qwen3_next,
    "Qwen3_5GatedDeltaNet": _project_qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _project_qwen3_5,
}


@dataclass(frozen=True)
class Shape:
    """A tree as this layer needs it; parents come before children."""

    parents: Tensor  # int64 [n], -1 for the root
    ancestors: Tensor  # bool [n, n], True where j is i or an ancestor of i
    kernel: int  # K

    @cached_property
    def summing(self) -> Tensor:
        """float64 [n, n]: what is multiplied with it is summed along root paths."""
        return self.ancestors.double().T

    @cached_property
    def taps(self) -> Tensor:
        """[n, K]: rows of [last K-1 inputs of the past ; nodes] that each node's convolution reads, oldest first."""
        past, n = self.kernel - 1, len(self.parents)
        rows = torch.arange(past + n, device=self.parents.device)
        before = torch.cat([rows[:past] - 1, self.parents + past]).clamp(min=0)
        taps = [rows[past:]]
        for _ in range(past):
            taps.append(before[taps[-1]])
        return torch.stack(taps[::-1], dim=1)


@dataclass
class Pending:
    """What a commit needs of the nodes: convolution inputs, keys, writes, cumulative log decay."""

    inputs: Tensor  # [K - 1 + n, C], the past's last inputs first
    keys: Tensor  # [H, n, d_k]
    writes: Tensor  # [H, n, d_v]
    decay: Tensor  # float64 [H, n]


class GatedDelta:
    """One layer's recurrent past: the last K-1 inputs of its convolution and its matrix per head."""

    def __init__(self, module: nn.Module) -> None:
        m: Any = module
        self.module = m
        self.project = PROJECTIONS[type(module).__name__]
        weight: Tensor = m.conv1d.weight  # [C, 1, K]
        self.dtype = torch.promote_types(weight.dtype, torch.float32)  # of the recurrence
        self.window = weight.new_zeros(m.conv_kernel_size - 1, weight.shape[0])
        self.state = weight.new_zeros(m.num_v_heads, m.head_k_dim, m.head_v_dim, dtype=self.dtype)
        self.pending: Pending | None = None

    def forward(self, shape: Shape, hidden: Tensor) -> Tensor:
        """The layer's output for the nodes of a tree, [1, n, hidden] -> the same. The past stays what it was."""
        m, n = self.module, hidden.shape[1]
        qkv, z, b, a = self.project(m, hidden)
        inputs = torch.cat([self.window, qkv])
        mixed = self._convolve(inputs, shape.taps).to(self.dtype)
        q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
        repeat = m.num_v_heads // m.num_k_heads
        q, k = (_unit(self._heads(x, m.head_k_dim)).repeat_interleave(repeat, 0) for x in (q, k))
        v = self._heads(v, m.head_v_dim)  # [H, n, d_v]
        q = q * m.head_k_dim**-0.5
        beta = b.to(self.dtype).sigmoid().T[..., None]  # [H, n, 1]
        log_decay = -m.A_log.to(self.dtype).exp() * softplus(a.to(self.dtype) + m.dt_bias)  # [n, H]

        # Sums in float64: a fast head's sum runs to the thousands, and the differences are what counts.
        c = log_decay.double().T @ shape.summing  # [H, n]
        between = (c[:, :, None] - c[:, None, :]).masked_fill_(~shape.ancestors, -torch.inf)
        D = between.exp_().to(self.dtype)
        from_past = c.exp().to(self.dtype)[..., None]  # [H, n, 1]
        system = ((beta * k) @ k.mT * D).tril(-1)
        u = torch.linalg.solve_triangular(
            system, beta * (v - from_past * (k @ self.state)), upper=False, unitriangular=True
        )
        out = from_past * (q @ self.state) + (q @ k.mT * D) @ u  # [H, n, d_v]
        self.pending = Pending(inputs, k, u, c)

        out = out.transpose(0, 1).reshape(-1, m.head_v_dim).to(hidden.dtype)
        out = m.norm(out, z.reshape(-1, m.head_v_dim)).reshape(1, n, -1)
        projected: Tensor = m.out_proj(out)
        return projected

    def commit(self, path: Sequence[int]) -> None:
        """Make these nodes of the last forward, root first, the past."""
        assert self.pending is not None
        p, past = self.pending, len(self.window)
        rows = torch.tensor(list(path), device=self.window.device)
        self.window = torch.cat([self.window, p.inputs[past + rows]])[len(rows) :]
        c = p.decay[:, rows]
        left = (c[:, -1:] - c).exp().to(self.dtype)[..., None]
        decayed = self.state * c[:, -1].exp().to(self.dtype)[:, None, None]
        self.state = decayed + (p.keys[:, rows] * left).mT @ p.writes[:, rows]
        self.pending = None

    def _convolve(self, inputs: Tensor, taps: Tensor) -> Tensor:
        """[K - 1 + n, C] -> [n, C], summed in float32, rounded to the model's precision as the layer's own is."""
        conv = self.module.conv1d
        out = torch.einsum(
            "nkc,ck->nc", inputs[taps].to(self.dtype), conv.weight[:, 0].to(self.dtype)
        )
        if conv.bias is not None:
            out = out + conv.bias
        activated: Tensor = ACT2FN[self.module.activation](out.to(inputs.dtype))
        return activated

    @staticmethod
    def _heads(x: Tensor, width: int) -> Tensor:
        """[n, heads * width] -> [heads, n, width]"""
        return x.unflatten(-1, (-1, width)).transpose(0, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
