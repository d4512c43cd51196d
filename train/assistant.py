"""A drafter as transformers' `generate` takes one (transformers 5.24 or newer, dense targets, one sequence at a time).

    assistant = load_assistant(Path("RUN/checkpoints/step-000330"), model)
    model.generate(ids, assistant_model=assistant, speculation_type="dflash", do_sample=False)

`generate` keeps the cache and the rounds; a call gives the states of the tokens that have become the past and the
embeddings of the next block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from configs.load import UserError
from train.drafter import SLIDING, DFlashDrafter, Mask
from train.layout import load_drafter


class Assistant(nn.Module):
    """What DFlashTokenCandidateGenerator calls. R = 1 row, n new context tokens, B slots."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        super().__init__()
        self.drafter, shape = drafter, drafter.shape
        self.config: Any = drafter.config
        self.config.block_size = shape.block_size
        self.config.mask_token_id = shape.mask_token_id
        self.config.target_layer_ids = list(shape.target_layer_ids)

    @property
    def device(self) -> torch.device:
        return self.drafter.fc.weight.device

    @torch.no_grad()
    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        cache: Any,
    ) -> BaseModelOutput:
        """noise_embeds [1, B, H], context_hidden_states [1, n, F], position_ids [1, n + B] -> last_hidden_state [1, B, H]


        `cache` holds the context's keys and values, and B rows behind them that `generate` cuts off before each call.
        """
        if len(noise_embeds) != 1 or (attention_mask is not None and not attention_mask.all()):
            raise ValueError("one sequence at a time, without padding")
        size, dtype = noise_embeds.shape[1], self.drafter.fc.weight.dtype
        slots, past = position_ids[:, -size:], []
        new = self.drafter.context(context_hidden_states.to(dtype), position_ids[:, :-size])
        for layer, pair in enumerate(new):
            # the slots' own keys are made inside the layers; here they only take up the rows that are cut off again
            keys, values = cache.update(
                *(nn.functional.pad(x, (0, 0, 0, size)) for x in pair), layer
            )
            past.append((keys[:, :, :-size], values[:, :, :-size]))
        masks = {
            kind: self._mask(kind, keys.shape[2], size, slots.device)
            for kind, (keys, _) in zip(self.config.layer_types, past, strict=True)
        }
        hidden = self.drafter.slots(noise_embeds.to(dtype), slots, past, masks)
        return BaseModelOutput(last_hidden_state=hidden)

    def _mask(self, kind: str, length: int, size: int, device: torch.device) -> Mask:
        """The rows that are left lie right before the block, whether the cache dropped older ones or not."""
        causal = self.drafter.shape.causal(kind)
        if kind != SLIDING and not causal:
            return None
        slot, row = torch.arange(size, device=device), torch.arange(length, device=device)
        distance = length + slot[:, None] - row
        near = distance < self.config.sliding_window if kind == SLIDING else distance > 0
        own = torch.ones(size, size, dtype=torch.bool, device=device)
        return torch.cat([near, own.tril() if causal else own], dim=1)[None, None]


def load_assistant(folder: Path, target: Any) -> Assistant:
    """A drafter for a loaded transformers model. UserError where `generate` would not run it as it was trained."""
    try:
        drafter = load_drafter(folder, target.dtype)
    except ValueError as error:
        raise UserError(str(error)) from None
    shape, text = drafter.shape, target.config.get_text_config()
    if shape.sample_from_anchor:
        raise UserError(
            f"{folder} drafts from slot 0 as well (sample_from_anchor), and generate starts at slot 1; "
            "use eval/main.py --mode live"
        )
    found = (text.num_hidden_layers, text.hidden_size)
    wanted = (shape.num_target_layers or text.num_hidden_layers, drafter.config.hidden_size)
    if found != wanted:
        raise UserError(
            f"{folder} drafts for a target of {wanted[0]} layers, {wanted[1]} wide; this one has {found[0]} and is "
            f"{found[1]} wide"
        )
    if getattr(target, "_is_stateful", False):
        raise UserError(
            f"{type(target).__name__} keeps a recurrent state, which generate cannot take back; "
            "use eval/main.py --mode live"
        )
    if max(shape.target_layer_ids) == text.num_hidden_layers - 1:
        raise UserError(
            f"{folder} taps the last block before the final norm, and generate gives its state after that norm"
        )
    table = target.get_input_embeddings()
    ids = torch.arange(8, device=table.weight.device)
    scaled = table.weight[ids] * shape.input_embedding_scale
    if not torch.allclose(table(ids), scaled, rtol=2e-2, atol=1e-4):
        raise UserError(
            f"{folder} scales the embedding by {shape.input_embedding_scale:g} (input_embedding_scale), and this target "
            "by another factor"
        )
    return Assistant(drafter).to(target.device).eval()
