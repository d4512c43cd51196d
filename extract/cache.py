"""A key/value cache that is written in place.

transformers' `DynamicCache` copies the whole past at every step (a third of a decoding step at batch 64 on a CPU);
`StaticCache` attends over its full length. This one keeps spare room behind the past and hands out views.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Full attention: keys and values are views [B, heads, past, dim] into a buffer with spare room behind it."""

    _key_buffer: Tensor | None = None
    _value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            past = 0
        else:
            assert self.keys is not None
            past = self.keys.shape[-2]
        total = past + key_states.shape[-2]
        self._key_buffer = self._with_room(self._key_buffer, self.keys, key_states, past, total)
        self._value_buffer = self._with_room(
            self._value_buffer, self.values, value_states, past, total
        )
        self._key_buffer[:, :, past:total] = key_states
        self._value_buffer[:, :, past:total] = value_states
        self.keys, self.values = self._key_buffer[:, :, :total], self._value_buffer[:, :, :total]
        return self.keys, self.values

    @staticmethod
    def _with_room(
        buffer: Tensor | None, old: Tensor | None, new: Tensor, past: int, total: int
    ) -> Tensor:
        """The buffer itself, or a larger copy; also a copy when someone replaced the view (batch selection)."""
        if (
            buffer is not None
            and old is not None
            and old.data_ptr() == buffer.data_ptr()
            and buffer.shape[0] == new.shape[0]
            and buffer.shape[2] >= total
        ):
            return buffer
        batch, heads, _, dim = new.shape
        fresh = new.new_empty(batch, heads, max(total + 64, total * 3 // 2), dim)
        if past:
            assert old is not None
            fresh[:, :, :past] = old
        return fresh

    def keep(self, past: int, rows: Tensor) -> None:
        """Keep the first `past` positions and, behind them, `rows` (absolute positions, ascending, >= past)."""
        assert self.keys is not None and self.values is not None
        end = past + rows.numel()
        for name in ("keys", "values"):
            states = getattr(self, name)
            states[:, :, past:end] = states.index_select(2, rows)
            setattr(self, name, states[:, :, :end])


def new_cache(config: Any) -> DynamicCache:
    """A cache for this model config; layers that are not plain full attention stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def cache_argument(model: Any, cache: DynamicCache) -> dict[str, Any]:
    """The keyword by which this transformers release takes the cache: `cache`, in older ones `past_key_values`."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}
