"""The doctor's checks of what is drafted: would the drafter do better under another convention, does decoding agree with
replay, and does it know more than what it was trained on?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from configs.load import UserError
from eval.decode import decode, propose_chain
from eval.live import parting_margin
from eval.patient import OK, SUSPECT, TOO_SHORT, TRAINING, Case, Finding, NotCheckable
from eval.replay import replay
from eval.selftest import near_tie, short_test
from eval.variants import clearly_better, hits, variant
from eval.verify import LINEAR, layer_kinds
from extract.choose import GREEDY
from extract.locate import load_model_config, locate, unpack_gguf
from extract.shards import Sample
from train.drafter import FULL, SLIDING, DFlashDrafter, drafter_config

DECODED = 2, 48  # answers that are decoded, and tokens of each
# Training's first-slot accuracy over the held-out one. The demo, whose last epochs still gain, has 0.53 / 0.30 in its
# worst set (docs/lab-log.md).
OVERFIT = 2.0
ROPE_THETAS = (1e4, 5e5, 1e6, 1e7)  # what configs fall back on, Llama 3's, Qwen3's, Qwen3.5's


def slots(case: Case) -> Finding:
    found = case.hits
    rates = {s: found.accuracy(s) for s in (-1, 0, 1)}
    measured = f"drafts right at the token before / itself / after: {rates[-1]:.3f} / {rates[0]:.3f} / {rates[1]:.3f}"
    best = max((-1, 1), key=lambda s: rates[s])
    if clearly_better(rates[best], rates[0], found.independent):
        from_anchor = case.drafter.shape.sample_from_anchor
        fix = "it was trained with other labels, or comes from a layout that counts slots otherwise; train again here"
        if best == (-1 if from_anchor else 1):
            fix = f"write sample_from_anchor={str(not from_anchor).lower()} into {case.folder}/config.json, and compare"
        return Finding(
            "slots",
            SUSPECT,
            measured,
            f"every slot drafts the token {best:+d} beside its own: {fix}",
        )
    return Finding("slots", OK, measured)


def sliding(case: Case) -> Finding:
    """Windows and causality inside the block: does the drafter do better otherwise than its config.json says?"""
    drafter, options = case.drafter, case.config.drafter
    kinds, shape = list(drafter.config.layer_types), drafter.shape
    others: dict[str, DFlashDrafter] = {}
    if SLIDING in kinds:
        others["no window"] = variant(drafter, layer_types=[FULL] * len(kinds))
        flip = {"causal_sliding": not shape.causal_sliding}
    else:
        flip = {"causal_full": not shape.causal_full}
    others["causal blocks" if next(iter(flip.values())) else "blocks in both directions"] = variant(
        drafter, shape=flip
    )
    if len(kinds) == options.num_layers and options.sliding_window:
        wanted = [SLIDING if i in options.sliding_layers else FULL for i in range(len(kinds))]
        if (wanted, options.sliding_window) != (kinds, drafter.config.sliding_window):
            for causal in {options.causal_sliding, False}:
                others[f"drafter.sliding_window={options.sliding_window}{' causal' * causal}"] = variant(
                    drafter, layer_types=wanted, sliding_window=options.sliding_window,
                    shape={"causal_sliding": causal, "causal_full": False},
                )  # fmt: skip
    found = {what: case.prefers(other) for what, other in others.items()}
    own = case.hits.accuracy()
    measured = f"accuracy {own:.3f} as config.json says, " + ", ".join(
        f"{a:.3f} with {what}" for what, (a, _) in found.items()
    )
    best = max(found, key=lambda what: found[what][0])
    if found[best][1]:
        return Finding(
            "sliding", SUSPECT, measured,
            f"it was trained with {best}: mend layer_types, sliding_window, use_sliding_window and is_causal of "
            f"{case.folder}/config.json",
        )  # fmt: skip
    return Finding("sliding", OK, measured)


def rope(case: Case) -> Finding:
    own = dict(case.drafter.config.rope_parameters)
    others = [{"rope_type": "default", "rope_theta": theta} for theta in ROPE_THETAS]
    said = "unknown"
    try:
        expected = drafter_config(
            load_model_config(case.config.target, unpack_gguf(locate(case.config.target)))
        )
        others.insert(0, dict(expected.rope_parameters or {}))
        said = brief(others[0])
    except UserError:
        pass  # the usual values are tried all the same
    found = {
        brief(other): case.prefers(variant(case.drafter, rope=other))
        for other in others
        if brief(other) != brief(own)
    }
    best = max(found, key=lambda what: found[what][0])
    measured = (
        f"{brief(own)}, the target's is {said}; accuracy {case.hits.accuracy():.3f}, at most {found[best][0]:.3f} "
        f"with another ({best})"
    )
    if found[best][1]:
        return Finding(
            "rope", SUSPECT, measured,
            f"it was trained with another rotation: write rope_parameters {best} into {case.folder}/config.json",
        )  # fmt: skip
    return Finding("rope", OK, measured)


def brief(rope: dict[str, Any]) -> str:
    """rope_parameters in a word or two."""
    rest = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
    kind = rope.get("rope_type", "default")
    return (
        f"theta {rope.get('rope_theta', 1e4):g}"
        + (f" {kind}" if kind != "default" else "")
        + (f" {rest}" if rest else "")
    )


@torch.inference_mode()
def recurrent(case: Case) -> Finding:
    """What live decoding leaves in the target's past: the short self-test, then real rounds beside replayed ones."""
    target = case.target
    try:
        hybrid = LINEAR in layer_kinds(target)
    except UserError as error:
        raise NotCheckable(str(error)) from None
    where = "recurrent state" if hybrid else "key-value cache"
    fix = "no tau of live decoding can be trusted; `eval/main.py --self-test` shows all checks, please report it"
    failed = [check for check in short_test(target, case.config) if not check.passed]
    live, replayed, worst = list[int](), list[int](), 0.0
    # Live reads the layers that replay reads: what is wrong with those is said by another check.
    reads = case.taps(next(iter(case.held_out)))
    drafter = variant(case.drafter)
    drafter.shape = replace(drafter.shape, target_layer_ids=reads)
    count, tokens = DECODED
    for sample in case.sound(*case.held_out)[:count]:
        first = sample.prompt_tokens
        prompt, answer = (
            sample.input_ids[:first].tolist(),
            sample.input_ids[first:][:tokens].tolist(),
        )
        said = decode(target, drafter, case.head, prompt, propose_chain, max_new_tokens=len(answer))
        live += said.committed
        replayed += replay(drafter, case.head, cut(sample, first + len(answer)), [])[None].committed
        if said.tokens != answer:
            worst = max(worst, parting_margin(target, GREEDY, prompt, said.tokens, answer))
    taus = [sum(x) / max(len(x), 1) for x in (live, replayed)]
    measured = f"tau of {count} answers live {taus[0]:.2f}, replayed {taus[1]:.2f}"
    if failed:
        return Finding(
            "recurrent", SUSPECT, f"{measured}; self-test: {'; '.join(map(str, failed))}",
            f"rejected tokens stay in the target's {where}: {fix}",
        )  # fmt: skip
    if worst > near_tie(target.dtype):
        return Finding(
            "recurrent", SUSPECT, f"{measured}; a live answer leaves the stored one at a margin of {worst:.2g} "
            f"logits (limit {near_tie(target.dtype)})",
            f"drafts leave a trace in the target's {where}, or the stored answers are not its own: {fix}",
        )  # fmt: skip
    if target.dtype == torch.float32 and live != replayed:
        return Finding(
            "recurrent", SUSPECT, measured,
            "the text is the same, so the drafter is fed other states live than the stored ones; extract again",
        )  # fmt: skip
    return Finding(
        "recurrent", OK, f"{measured}, the self-test finds no trace of drafts in the {where}"
    )


def cut(sample: Sample, length: int) -> Sample:
    """Its first tokens."""
    last = None if sample.last_hidden is None else sample.last_hidden[:length]
    return Sample(
        sample.id,
        sample.input_ids[:length],
        sample.loss_mask[:length],
        sample.hidden_states[:length],
        last,
    )


def overfit(case: Case) -> Finding:
    if TRAINING not in case.sets:
        raise NotCheckable("the training states are not there")
    seen = hits(case.drafter, case.head, case.sound(TRAINING))
    held_out = hits(case.drafter, case.head, case.sound(*case.held_out))
    if not (seen.blocks and held_out.blocks):
        raise NotCheckable(TOO_SHORT)
    a, b = seen.first_slot, held_out.first_slot
    measured = f"first draft right {a:.3f} in training, {b:.3f} held out"
    if a > OVERFIT * b and clearly_better(a, b, min(seen.blocks, held_out.blocks)):
        return Finding(
            "overfit", SUSPECT, measured,
            "it knows its training answers by heart: more prompts, fewer epochs, or held-out prompts of another kind or "
            "language than any that was trained on",
        )  # fmt: skip
    return Finding("overfit", OK, measured)
