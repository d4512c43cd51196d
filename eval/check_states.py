"""The doctor's checks of what was stored: are the states, the head, the prompts and the answers the target's own?"""

from __future__ import annotations

from pathlib import Path

import torch

from configs.load import UserError
from eval.patient import OK, SUSPECT, TRAINING, Case, Finding, NotCheckable
from eval.variants import distance
from extract.describe import LOW
from extract.greedy import from_target
from extract.head import head_of, load_head
from extract.locate import load_tokenizer, locate, unpack_gguf
from extract.probe import LIMITS
from extract.prompts import Renderer, UnmaskableChat, load_chats, user_turns
from extract.target import record_taps

FORWARDS = 4  # samples of a set that the target itself reads, of some hundred rows each
# A token's states differ by 0.05 at most in bfloat16 (extract.probe.LIMITS) and by 0.022 through float8
# (docs/lab-log.md); those of another token, text or target by most of their length.
FOREIGN = 5 * LIMITS[torch.bfloat16]
TABLES = 0.02  # distance of the head's rows: bfloat16 rounds a number by 0.004 of it at most
# Of the choices by stored and by own last states; rounding flips near-ties, 5 of 356 choices (docs/lab-log.md).
SAME_CHOICE = 0.9


def states(case: Case) -> Finding:
    kinds: dict[str, int] = {}
    for samples in case.bad_rows.values():
        for bad in samples.values():
            for what, count in bad.items():
                kinds[what] = kinds.get(what, 0) + count
    rows = sum(len(s.input_ids) for samples in case.read.values() for s in samples)
    measured = f"{sum(kinds.values())} of {rows:,} rows are bad"
    if not kinds:
        return Finding("states", OK, measured)
    where = ", ".join(name for name, bad in case.bad_rows.items() if bad)
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return Finding(
        "states", SUSPECT, f"{measured} ({what}; in {where})",
        "shards damaged after extraction, or written by something else; `extract/main.py --verify` names them: delete "
        "them, extract again, then train again if training read them",
    )  # fmt: skip


def target(case: Case) -> Finding:
    """Whether checkpoint, states and config speak of one target, by the fingerprints of its weights."""
    said = {name: reader.manifest.target.fingerprint for name, reader in case.sets.items()}
    if origin := case.drafter.origin.get("target"):
        said["checkpoint"] = origin["fingerprint"]
    try:
        said["config"] = case.target.fingerprint()
    except NotCheckable:
        if len(said) < 2:
            raise
    measured = ", ".join(f"{name} {value}" for name, value in said.items())
    if len(set(said.values())) == 1:
        return Finding("target", OK, f"{len(said)} sources, all {next(iter(said.values()))}")
    return Finding(
        "target", SUSPECT, measured,
        "weights of two targets; evaluate with the one that the checkpoint was trained for, or extract and train again",
    )  # fmt: skip


def taps(case: Case) -> Finding:
    reads = case.drafter.shape.target_layer_ids
    for name in case.sets:
        if case.taps(name) != reads:
            return Finding(
                "taps", SUSPECT, f"the checkpoint reads layers {list(reads)}, {name} hold {list(case.taps(name))}",
                "target_layer_ids of its config.json were changed, or follow another convention (id i is the residual "
                "stream after block i); give it the ids that it was trained on, and states of those",
            )  # fmt: skip
    measured = []
    for name in case.sets:
        found = tap_distances(case, name)
        own = found["at the taps"]
        measured.append(
            f"{name} {own:.1e} from the target's own {', '.join(f'{d:.2f} {w}' for w, d in found.items() if d != own)}"
        )
        nearest = min(found, key=lambda what: found[what])
        if found[nearest] < own:
            return Finding(
                "taps", SUSPECT, f"{name}: {own:.2g} at the taps, {found[nearest]:.2g} {nearest}",
                "the states were stored under another layer or token than their own; extract again with this release, "
                "and train again if these are training states",
            )  # fmt: skip
        if not own < FOREIGN:
            return Finding(
                "taps", SUSPECT, f"{name}: {own:.2g} from the target's own (limit {FOREIGN:.2g}), no neighbour is nearer",
                "the states are of another text or target; extract again",
            )  # fmt: skip
    return Finding("taps", OK, ", ".join(measured))


@torch.inference_mode()
def tap_distances(case: Case, name: str) -> dict[str, float]:
    """How far a set's stored states lie from the target's own at the taps, one layer and one token beside them."""
    target, taps = case.target, case.taps(name)
    depth = len(target.layers)
    layers = sorted({i + s for i in taps for s in (-1, 0, 1) if 0 <= i + s < depth})
    found: dict[str, list[float]] = {}
    for sample in case.sound(name)[:FORWARDS]:
        ids = sample.input_ids.long()[None].to(target.device)
        with record_taps(target.layers, layers) as recorded:
            target.decoder(input_ids=ids)
        stored = sample.hidden_states.unflatten(-1, (len(taps), -1)).to(target.device)
        for k, tap in enumerate(taps):
            ours = stored[:, k]
            for shift, what in ((0, "at the taps"), (-1, "a layer below"), (1, "a layer above")):
                if tap + shift in recorded.states:
                    theirs = recorded.states[tap + shift][0].to(target.device)
                    found.setdefault(what, []).append(distance(ours, theirs))
            theirs = recorded.states[tap][0].to(target.device)
            found.setdefault("a token before", []).append(distance(ours[1:], theirs[:-1]))
            found.setdefault("a token after", []).append(distance(ours[:-1], theirs[1:]))
    return {what: sum(values) / len(values) for what, values in found.items()}


@torch.inference_mode()
def head(case: Case) -> Finding:
    own, device = head_of(case.target), case.target.device
    measured = []
    for name, reader in case.sets.items():
        stored = load_head(reader.folder, device=device, dtype=own.weight.dtype)
        use = (stored.scale, stored.soft_cap), (own.scale, own.soft_cap)
        if use[0] != use[1]:
            return Finding(
                "head", SUSPECT, f"{name}: scale and soft cap {use[0]}, the target's {use[1]}",
                "the target's head is used in another way than the target uses it; extract again",
            )  # fmt: skip
        tables = (stored.embedding, own.embedding), (stored.weight, own.weight)
        off = max(1.0 if a.shape != b.shape else distance(a, b) for a, b in tables)
        measured.append(f"{name} {off:.1e} from the target's")
        if not off < TABLES:
            return Finding(
                "head", SUSPECT, f"{name}: rows {off:.2g} from the target's (limit {TABLES})",
                f"{reader.folder}/target_head.safetensors is not this target's embedding and head (tied or untied, other "
                "weights, other order); delete it and extract again",
            )  # fmt: skip
        if reader.manifest.last_hidden:
            agreed = tokens = 0
            for sample in case.sound(name)[:FORWARDS]:
                assert sample.last_hidden is not None
                ids = sample.input_ids.long()[None].to(device)
                theirs = case.target.logits(case.target.decoder(input_ids=ids).last_hidden_state[0])
                ours = stored.logits(sample.last_hidden.to(device))
                agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
                tokens += len(ours)
            measured.append(f"{agreed / tokens:.0%} of its last states choose as the target's")
            if agreed < SAME_CHOICE * tokens:
                return Finding(
                    "head", SUSPECT, f"{name}: {measured[-1]} (limit {SAME_CHOICE:.0%})",
                    "last_hidden was stored before the final norm, or of other tokens; extract again",
                )  # fmt: skip
    return Finding("head", OK, ", ".join(measured))


def prompts(case: Case) -> Finding:
    """Template, thinking mode and tokenizer of both manifests and the config, then the prompts' ids themselves."""
    config = case.config
    asks = {name: reader.manifest.enable_thinking for name, reader in case.sets.items()}
    asks["config"] = config.target.enable_thinking
    if "enable_thinking" in case.drafter.origin:
        asks["checkpoint"] = case.drafter.origin["enable_thinking"]
    fix = "make target.enable_thinking and the chat template the same for both and extract the other set again"
    if len(set(asks.values())) > 1:
        measured = ", ".join(f"{name} {value}" for name, value in asks.items())
        return Finding(
            "prompts",
            SUSPECT,
            f"enable_thinking: {measured}",
            f"training and evaluation ask differently; {fix}",
        )
    try:
        renderer = Renderer(
            load_tokenizer(config.target, unpack_gguf(locate(config.target))),
            enable_thinking=config.target.enable_thinking,
        )
    except UserError as error:
        raise NotCheckable(str(error)) from None
    same = asked = 0
    for name, reader in case.sets.items():
        try:
            chats, _ = load_chats(
                config.data.prompts
                if name == TRAINING
                else [n for n in config.eval.prompts if Path(n).stem == name]
            )
        except UserError:
            chats = []  # not on this machine; the manifests' templates are compared all the same
        of = {chat.id: chat for chat in chats}
        for sample in case.read[name] if reader.manifest.answers.source != "given" else ():
            chat_id, _, turn = sample.id.rpartition("#")
            if turn != "0" or chat_id not in of:  # later turns hold answers
                continue
            try:
                before, turns = user_turns(of[chat_id])
                wanted = renderer.prompt_ids([*before, *turns[0]])
            except UnmaskableChat:
                continue
            asked += 1
            same += sample.input_ids[: int(sample.loss_mask.argmax())].tolist() == wanted
        if same < asked:
            return Finding(
                "prompts", SUSPECT, f"{same} of {asked} stored prompts, {name} last, are what the config renders",
                f"the chat template or the prompts changed after extraction; {fix}",
            )  # fmt: skip
    templates = {name: reader.manifest.template_hash[:8] for name, reader in case.sets.items()}
    templates["config"] = renderer.template_hash[:8]
    if len(set(templates.values())) > 1:
        measured = ", ".join(f"{name} {value}" for name, value in templates.items())
        return Finding(
            "prompts",
            SUSPECT,
            f"chat template: {measured}",
            f"prompts are rendered differently; {fix}",
        )
    return Finding(
        "prompts", OK, f"{same} of {asked} stored prompts are what the config renders, one template"
    )


def answers(case: Case) -> Finding:
    """Somebody else's words: the share of supervised tokens that the target would say."""
    measured = []
    for name, reader in case.sets.items():
        made = reader.manifest.answers
        if not made.greedy and made.source != "given":
            continue  # sampled: the target's own, and seldom its first choice
        share = from_target(case.sound(name), case.target).value
        measured.append(f"{name} {share:.1%}")
        if share < LOW:
            return Finding(
                "answers", SUSPECT, f"{share:.0%} of the tokens of {name} are the target's choice (limit {LOW:.0%})",
                "somebody else's answers: set data.regenerate, or the server that gave them runs another model; extract "
                "and train again",
            )  # fmt: skip
    if not measured:
        raise NotCheckable("all answers were sampled")
    return Finding("answers", OK, f"the target's greedy choice: {', '.join(measured)}")
