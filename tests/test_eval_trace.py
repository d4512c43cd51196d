"""The round viewer: what is recorded is what the decode did, and the page in a browser shows what is recorded."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.load import UserError, load_config
from configs.schema import Config, TargetConfig
from eval.decode import Decoded, Propose, decode, propose_chain, propose_tree
from eval.live import Question
from eval.trace import Asked, Pieces, Recorder, page, piece, trace
from eval.tree import Tree
from extract.choose import GREEDY, Sampler
from extract.head import TargetHead, head_of
from extract.target import Target, load_target
from tests.conftest import apt_install, tiny_drafter, tiny_tokenizer, write_config
from train.drafter import DFlashDrafter

BLOCK = 4
PROMPT = [40, 7, 99, 12, 150]
HOSTILE = ["</script><script>throw Error('ran')</script>", "<!--", "]]>", "\"'`\\${x}", "\x00\x1b\x7f", " \n\t\r", "",
           "\u2028\u200b\u202e\ufeff", "e\u0301", "\u0301", "שלום", "😀", "&lt;b&gt;<b id=evil>"]  # fmt: skip


@dataclass(frozen=True)
class World:
    config: Config
    target: Target
    drafter: DFlashDrafter
    head: TargetHead


@pytest.fixture(scope="module")
def world(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    target = load_target(
        TargetConfig(path=str(tiny_target), dtype="float32", device="cpu"), dtype="float32"
    )
    drafter = tiny_drafter(target, BLOCK)
    config = load_config(write_config(tmp_path_factory.mktemp("trace") / "c.yaml", tiny_target))
    return World(config, target, drafter.eval().requires_grad_(False), head_of(target))


@dataclass
class Spy:
    """A proposal that keeps what it saw and said."""

    propose: Propose
    logits: list[Tensor] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)

    def __call__(self, logits: Tensor, root: int) -> Tree:
        self.logits.append(logits)
        self.trees.append(self.propose(logits, root))
        return self.trees[-1]


def record(
    world: World, propose: Propose, sampler: Sampler = GREEDY
) -> tuple[Decoded, Spy, Recorder, Pieces]:
    seen, pieces = Spy(propose), Pieces(world.target.tokenizer)
    recorder = Recorder(pieces, sampler, PROMPT)
    decoded = decode(
        world.target, world.drafter, world.head, PROMPT, seen,
        max_new_tokens=24, sampler=sampler, watch=recorder,
    )  # fmt: skip
    return decoded, seen, recorder, pieces


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(repetition_penalty=1.3)], ids=str)
@pytest.mark.parametrize("propose", [propose_chain, propose_tree(200)], ids=["chain", "tree"])
def test_the_record_is_what_the_decode_did(
    world: World, propose: Propose, sampler: Sampler
) -> None:
    decoded, seen, recorder, pieces = record(world, propose, sampler)
    rounds = recorder.rounds
    assert [r["committed"] for r in rounds] == decoded.committed
    assert [min(len(r["path"]) - 1, r["committed"]) for r in rounds] == decoded.accepted
    said = [place for r in rounds for place in r["chosen"][: r["committed"]]]
    assert said == pieces.places(decoded.tokens[1:])
    for got, tree in zip(rounds, seen.trees, strict=True):
        assert got["tokens"] == pieces.places(tree.tokens.tolist())
        assert got["parents"] == tree.parents.tolist()
        visited = [got["tokens"][node] for node in got["path"][1:]]
        assert visited == got["chosen"][:-1], "a child is on the path because it was chosen"
        if tree.log_weights.isfinite().all():  # a chain has none
            weights = [1.0]
            for node in range(1, len(got["q"])):
                weights.append(weights[got["parents"][node]] * got["q"][node])
            assert weights == pytest.approx(tree.log_weights.exp().tolist(), rel=0.03)


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(repetition_penalty=1.3)], ids=str)
def test_distributions_are_those_of_drafter_and_target(world: World, sampler: Sampler) -> None:
    """The target's from a plain forward over the text, the drafter's from the logits that were proposed from."""
    decoded, seen, recorder, pieces = record(world, propose_tree(200), sampler)
    assert max(decoded.accepted) > 0, (
        "nothing accepted, so prefixes longer than the root are not tested"
    )
    text = PROMPT + decoded.tokens
    plain = world.target.model(torch.tensor([text])).logits[0]
    at = len(PROMPT)  # of the root
    for got, logits in zip(recorder.rounds, seen.logits, strict=True):
        for k in range(got["committed"]):
            scores = sampler.scores(plain[at + k][None], torch.tensor([text[: at + k + 1]]))
            row = scores[0].softmax(-1)
            assert got["p"][k] == pytest.approx(float(row[text[at + k + 1]]), rel=0.01)
            best = row.topk(4)
            assert got["target"][k][1] == pytest.approx(best.values.tolist(), rel=0.01)
            assert got["target"][k][0] == pieces.places(best.indices.tolist())
            if k < BLOCK - 1:
                q = logits[k].softmax(-1)
                mine = q[text[at + k + 1]]
                assert got["wanted_q"][k] == pytest.approx(float(mine), rel=0.01)
                assert got["wanted_rank"][k] == 1 + int((q > mine).sum())
        for (tokens, shares), row in zip(got["slots"], logits.softmax(-1), strict=True):
            assert tokens == pieces.places(row.topk(6).indices.tolist())
            assert shares == pytest.approx(row.topk(6).values.tolist(), rel=0.01)
        at += got["committed"]


def test_watching_changes_nothing(world: World) -> None:
    alone = decode(
        world.target, world.drafter, world.head, PROMPT, propose_tree(50), max_new_tokens=24
    )
    watched, *_ = record(world, propose_tree(50))
    assert (alone.tokens, alone.committed) == (watched.tokens, watched.committed)


def test_pieces_are_the_text_of_their_tokens() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("the quick fox", " a\n\tb", "<|im_end|>", "</script>"):
        ids = tokenizer.encode(text)
        assert "".join(piece(tokenizer, i) for i in ids) == text
    assert [piece(tokenizer, i) for i in tokenizer.encode("é")] == ["\\xc3", "\\xa9"]
    assert piece(tokenizer, len(tokenizer) + 4) == f"<unused {len(tokenizer) + 4}>"


def test_a_sentencepiece_token_keeps_its_space() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("x", -3.0)], 0))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    assert [piece(tokenizer, i) for i in range(4)] == ["<unk>", " the", " ", "x"]


class Scripts(HTMLParser):
    """The contents of script elements, as a browser would take them apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def test_any_text_survives_the_page() -> None:
    record = {"pieces": HOSTILE, "prompts": []}
    text = page(record)
    assert "@RECORD@" not in text
    data, code = Scripts(text).found
    assert json.loads(data[1]) == record
    assert "use strict" in code[1]
    assert "default-src 'none'" in text, "the browser itself must refuse the network"
    assert not re.search(r"""\b(src|href)=|url\(|@import""", text)


def asked(count: int) -> list[Asked]:
    return [Asked("held", i, Question(f"q{i}", [40 + i, *PROMPT[1:]], [])) for i in range(count)]


def test_a_trace_needs_a_budget(world: World) -> None:
    config = world.config.model_copy(
        update={"eval": world.config.eval.model_copy(update={"budgets": ()})}
    )
    with pytest.raises(UserError, match=r"eval\.budgets, which is empty"):
        trace(config, world.target, world.drafter, world.head, asked(1))


# Plays the user, and leaves what it saw where --dump-dom shows it.
PROBE = """
<script>
const seen = {errors: [], steps: [], boxes: {}};
window.addEventListener("error", event => seen.errors.push(event.message));
const text = selector => document.querySelector(selector)?.textContent ?? null;
const key = name => document.body.dispatchEvent(
  new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}));
const count = selector => document.querySelectorAll(selector).length;
const look = () => ({where: text("#where"), status: text("#status"),
  accepted: count("#plot .node.yes") - 1, own: text("#plot .node.own text"),
  nodes: count("#plot .node") - 1, tables: count("table"), hash: location.hash,
  taus: ["chain", "tree"].map(n => Number(text(`#${n} .tau b`))),
  now: ["chain", "tree"].map(n => count(`#ribbon .now[data-run=${n}]`)),
  theme: getComputedStyle(document.documentElement).colorScheme});
const step = name => { key(name); seen.steps.push(look()); };
seen.start = look();
step("Home");
while (document.querySelector("#round").value !== document.querySelector("#round").max) step("ArrowRight");
seen.answers = ["chain", "tree"].map(n =>
  [...document.querySelectorAll(`#ribbon [data-run=${n}]`)].map(e => e.textContent));
seen.kinds = ["chain", "tree"].map(n => ["yes", "own", "prefill"].map(k => count(`#ribbon .${k}[data-run=${n}]`)));
key("ArrowLeft"); seen.back = look();
key("a"); seen.aligned = look(); key("a");
key("t"); seen.light = look(); key("t");
document.querySelector("#all").click(); seen.all = look(); document.querySelector("#fit").click();
const folded = document.querySelector("#plot .more");
if (folded) folded.dispatchEvent(new MouseEvent("click", {bubbles: true}));
seen.unfolded = look();
document.querySelector("#ribbon [data-run=tree][data-round='2']").click(); seen.clicked = look();
key("ArrowDown"); seen.other = look();
key(" "); seen.playing = text("#play"); key(" "); seen.paused = text("#play");
key("?"); seen.help = document.querySelector("dialog").open; document.querySelector("dialog").close();
for (const id of ["chain", "tree", "graph", "ribbon", "prompt", "play", "where", "plot"]) {
  const box = document.getElementById(id).getBoundingClientRect();
  seen.boxes[id] = [box.left, box.top, box.right, box.bottom];
}
seen.spilt = [...document.querySelectorAll("header, .panel, .chip")]
  .filter(e => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1).map(e => e.id || e.outerHTML);
seen.page = [innerWidth, innerHeight, document.documentElement.scrollWidth, document.documentElement.scrollHeight];
seen.evil = count("#evil"); seen.scripts = count("script");
seen.unnamed =
  [...document.querySelectorAll("button, select, input")].filter(e => !(e.ariaLabel || e.textContent.trim())).length;
document.body.insertAdjacentHTML("beforeend", "<pre id=probe></pre>");
document.querySelector("#probe").textContent = JSON.stringify(seen);
</script></body>"""


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def browse(file: Path, hash_: str, size: tuple[int, int], profile: Path) -> tuple[Any, str]:
    """What the probe saw, and what the console said."""
    chromium = find_chromium()
    if chromium is None:
        apt_install("chromium")
        chromium = find_chromium()
    assert chromium is not None
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
         f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=2000", "--enable-logging=stderr",
         "--dump-dom", f"{file.as_uri()}#{hash_}"],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), "\n".join(console)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080)], ids=str)
def test_a_browser_replays_the_run(world: World, tmp_path: Path, size: tuple[int, int]) -> None:
    options = world.config.eval.model_copy(update={"budgets": (1000,)})
    config = world.config.model_copy(update={"eval": options})
    record = trace(config, world.target, world.drafter, world.head, asked(2))
    record |= {"checkpoint": "step-1", "command": "c", "time": "t"}
    taken = record["prompts"][1][
        "prompt"
    ]  # hostile texts where the second prompt is shown, and in its tree
    taken += range(len(record["pieces"]), len(record["pieces"]) + len(HOSTILE))
    record["pieces"] += HOSTILE
    record["prompts"][1]["tree"]["rounds"][0]["tokens"][1 : 1 + len(HOSTILE)] = taken[
        -len(HOSTILE) :
    ]
    file = tmp_path / "trace.html"
    file.write_text(page(record).replace("</body>", PROBE), encoding="utf-8")
    seen, console = browse(file, "prompt=1&round=2&theme=dark", size, tmp_path / "profile")
    assert not console and not seen["errors"], console
    assert (seen["evil"], seen["scripts"], seen["unnamed"]) == (0, 3, 0)

    runs = [record["prompts"][0][name] for name in ("chain", "tree")]
    last = max(len(run["rounds"]) for run in runs)
    assert last > 2
    assert seen["start"]["where"] == f"round 2 of {last}"
    assert [step["where"] for step in seen["steps"]] == [
        f"round {i + 1} of {last}" for i in range(last)
    ]
    for i, step in enumerate(seen["steps"]):
        assert f"round={i + 1}&" in step["hash"] and step["tables"] == 2
        for name, run, tau, now in zip(
            ("chain", "tree"), runs, step["taus"], step["now"], strict=True
        ):
            shown = [r["committed"] for r in run["rounds"][: i + 1]]
            assert tau == pytest.approx(sum(shown) / len(shown), abs=0.0051)
            assert f"{name} +{shown[-1]}, tau" in step["status"]
            assert now == (shown[-1] if i < len(run["rounds"]) else 0)
        got = runs[1]["rounds"][min(i, len(runs[1]["rounds"]) - 1)]
        assert step["accepted"] == len(got["path"]) - 1
        assert step["nodes"] >= len(got["path"])
    for run, answer, kinds in zip(runs, seen["answers"], seen["kinds"], strict=True):
        assert len(answer) == len(run["tokens"])
        for shown, place in zip(answer, run["tokens"], strict=True):
            text = record["pieces"][place]
            if text.isprintable():
                assert shown == text.replace(" ", "·")
        accepted = sum(min(len(r["path"]) - 1, r["committed"]) for r in run["rounds"])
        assert kinds == [accepted, len(run["tokens"]) - 1 - accepted, 1]

    assert seen["back"]["where"] == f"round {last - 1} of {last}"
    assert seen["aligned"]["where"].endswith(f"of {len(runs[1]['rounds'])}")
    assert (seen["start"]["theme"], seen["light"]["theme"]) == ("dark", "light")
    assert seen["all"]["nodes"] == 1001  # and the root
    assert seen["back"]["nodes"] < seen["unfolded"]["nodes"] < 1001
    assert seen["clicked"]["where"] == f"round 2 of {last}"
    assert seen["other"]["hash"].startswith("#prompt=2&round=1")
    assert ("Pause" in seen["playing"], "Play" in seen["paused"], seen["help"]) == (True,) * 3

    width, height, scroll_width, scroll_height = seen["page"]
    assert width == size[0] and scroll_width <= width and scroll_height <= height
    for left, top, right, bottom in seen["boxes"].values():
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    panels = [
        seen["boxes"][name]
        for name in ("chain", "tree", "graph", "ribbon", "prompt", "play", "where")
    ]
    for a, b in combinations(panels, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], "panels overlap"
    assert seen["spilt"] == []
    assert seen["boxes"]["plot"][3] - seen["boxes"]["plot"][1] >= 200
