"""Run z-lab's own DFlash loop (PyPI `dflash` 0.1.0, unchanged) greedily in float32, in an interpreter of its own.

    python zlab_driver.py TARGET DRAFT ids.json MAX_NEW_TOKENS out.json logits.safetensors WRITTEN

ids.json is a list of prompts' token ids. out.json gets, for each, the new tokens and z-lab's acceptance lengths (bonus
included, cut at a stop token and at the limit). The safetensors file gets the logits of the first round of prompt 0,
and the folder WRITTEN the drafter as z-lab's class writes it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import dflash.model as zlab
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

zlab._cuda_time = time.perf_counter  # its statistics synchronise with CUDA, which is not there


def main(
    target_dir: str, draft_dir: str, prompts: str, limit: str, out: str, logits: str, written: str
) -> None:
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    draft, info = zlab.DFlashDraftModel.from_pretrained(
        draft_dir, attn_implementation="sdpa", dtype=torch.float32, output_loading_info=True
    )
    problems = {k: sorted(map(str, v)) for k, v in info.items() if v}
    assert not problems, f"z-lab does not load this checkpoint whole: {problems}"
    draft = draft.eval()
    draft.save_pretrained(written)

    seen: list[torch.Tensor] = []
    original = draft.compute_logits

    def compute_logits(hidden, head):
        seen.append(original(hidden, head))
        return seen[-1]

    draft.compute_logits = compute_logits
    stop = target.generation_config.eos_token_id
    stop = [stop] if isinstance(stop, int) else stop
    answers = []
    for ids in json.loads(Path(prompts).read_text()):
        stats = zlab.dflash_generate(
            draft, target, torch.tensor([ids]), int(limit), stop, return_stats=True
        )
        answers.append(
            {
                "tokens": stats.output_ids[0, len(ids) :].tolist(),
                "committed": list(stats.acceptance_lengths),
            }
        )
    Path(out).write_text(json.dumps(answers))
    save_file({"logits": seen[0][0].contiguous()}, logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
