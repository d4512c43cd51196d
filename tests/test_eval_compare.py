"""`eval/main.py compare A B`: paired by prompt, refused where a difference would not be the drafter's."""

import json
from pathlib import Path

import pytest

from configs.load import UserError
from eval import main as eval_main
from eval.compare import Pair, compare, find_results
from eval.metrics import Answer, Json, summarize
from eval.results import write_results

PROMPTS = range(12)


def row(accepted: dict[str, list[int]], dataset: str = "math", budget: int | None = None) -> Json:
    answers = [
        Answer(name, tuple(m + 1 for m in a), tuple(a), 1 + sum(a) + len(a), None, 9 * len(a))
        for name, a in accepted.items()
    ]
    return summarize(
        answers,
        dataset=dataset,
        decoder="ddtree" if budget else "dflash",
        budget=budget,
        temperature=0.0,
        block_size=4,
        lossless=None,
    ).as_dict()


def results(*rows: Json, step: int = 100, **changes: object) -> Json:
    return {
        "schema": 1,
        "mode": "live",
        "checkpoint": {"path": f"runs/x/checkpoints/step-{step:06d}", "step": step, "fingerprint": "ab"},
        "target": {"id": "Qwen3-8B", "fingerprint": "f00", "dtype": "float32"},
        "max_new_tokens": 64,
        "provenance": {},
        "rows": list(rows),
    } | changes  # fmt: skip


def uneven(better: int = 0) -> dict[str, list[int]]:
    """Prompt i has rounds that accept i % 4 drafts; every `better`-th round accepts 3."""
    return {
        f"p{i}": [3 if better and k % better == 0 else i % 4 for k in range(20)] for i in PROMPTS
    }


def only(a: Json, b: Json) -> Pair:
    (pair,) = compare(a, b)
    return pair


def test_a_drafter_that_is_a_little_better_everywhere_is_found() -> None:
    """Closed form: rounds accept 0, 1, 2, 3 (tau 2.5); every tenth accepting 3 adds 0.1 * 1.5."""
    a, b = results(row(uneven())), results(row(uneven(10)))
    pair = only(a, b)
    assert (pair.tau_a, pair.tau_b, pair.prompts, pair.left_out) == (2.5, 2.65, 12, 0)
    assert pair.difference == pytest.approx(0.15)
    assert 0.05 < pair.ci95[0] < 0.15 < pair.ci95[1] < 0.25
    assert pair.verdict == "B"
    assert a["rows"][0]["ci95"][1] > b["rows"][0]["ci95"][0]  # which their own intervals hide
    back = only(b, a)
    assert back.verdict == "A"
    assert back.ci95 == pytest.approx((-pair.ci95[1], -pair.ci95[0]))


def test_the_same_drafter_is_not_better_than_itself() -> None:
    pair = only(results(row(uneven())), results(row(uneven())))
    assert (pair.difference, pair.ci95, pair.verdict) == (0.0, (0.0, 0.0), "no clear difference")


def test_better_on_half_of_the_prompts_and_worse_on_the_others_is_no_clear_difference() -> None:
    one = {f"p{i}": [1 + i % 2] * 20 for i in PROMPTS}
    other = {f"p{i}": [2 - i % 2] * 20 for i in PROMPTS}
    pair = only(results(row(one)), results(row(other)))
    assert pair.ci95[0] < 0 < pair.ci95[1]
    assert pair.verdict == "no clear difference"


def test_only_prompts_of_both_count_and_the_others_are_counted() -> None:
    """Whatever A did on its own two prompts and on one that B answers at once, it does not count."""
    shared = uneven()
    extra = {"only-a": [3] * 50, "also-a": [3] * 50, "short": [3]}
    pair = only(results(row(shared | extra)), results(row(shared | {"short": []})))
    assert (pair.tau_a, pair.prompts, pair.left_out) == (2.5, 12, 3)


def test_too_few_prompts_give_no_verdict() -> None:
    few = {f"p{i}": [1] * 100 for i in range(7)}
    better = {f"p{i}": [2] * 100 for i in range(7)}
    assert only(results(row(few)), results(row(better))).verdict == "too few prompts or rounds"
    eight = {f"p{i}": [1] * 24 for i in range(8)}
    assert only(results(row(eight)), results(row(eight))).verdict == "too few prompts or rounds"


def test_decoders_and_data_sets_are_paired_each_with_its_own() -> None:
    a = results(row(uneven()), row(uneven(), budget=16), row(uneven(), "chat"))
    b = results(row(uneven(2), budget=16), row(uneven(), "chat"), row(uneven(), "chat", budget=8))
    pairs = compare(a, b)
    keys = [(p.dataset, p.decoder, p.budget, p.verdict) for p in pairs]
    assert keys == [
        ("math", "ddtree", 16, "B"),
        ("chat", "dflash", None, "no clear difference"),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "served"}, "the mode of A is live and that of B is served"),
        ({"max_new_tokens": 128}, "the longest answer of A is 64 and that of B is 128"),
        ({"sampling": {"top_p": 0.9}}, "the sampling of A is unset and that of B is .*0.9"),
        ({"max_new_tokens": None}, "the longest answer of A is 64 and that of B is unset"),
        (
            {"target": {"id": "Qwen3-8B", "fingerprint": "bad", "dtype": "float32"}},
            "the target fingerprint of A is f00 and that of B is bad",
        ),
        (
            {"target": {"id": "Qwen3-8B", "fingerprint": "f00", "dtype": "bfloat16"}},
            "the target dtype of A is float32 and that of B is bfloat16",
        ),
        ({"rows": [row(uneven(), "chat")]}, "A has math, DFlash chain and B has chat, DFlash"),
        ({"rows": [row({"q": [1] * 9})]}, "none of A's 12 prompts is among B's 1"),
        ({"rows": [row(uneven()) | {"per_prompt": None}]}, "B .* no sums per prompt"),
    ],
)
def test_what_is_not_comparable_is_refused(changes: Json, said: str) -> None:
    with pytest.raises(UserError, match=said):
        compare(results(row(uneven())), results(row(uneven())) | changes)


def test_the_same_target_elsewhere_is_the_same_target() -> None:
    moved = {"id": "copy-of-it", "fingerprint": "f00", "dtype": "float32"}
    assert only(results(row(uneven())), results(row(uneven()), target=moved)).prompts == 12


def test_replay_of_other_answers_is_refused() -> None:
    """Two extractions may give a prompt the same id and another text."""
    a = results(row(uneven()), mode="replay")
    b = results(row(uneven() | {"p3": [3] * 21}), mode="replay")
    assert only(a, a).prompts == 12
    with pytest.raises(UserError, match="answer to p3 has 81 tokens in A and 85 in B"):
        compare(a, b)


# Where A and B are found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with replay results at steps 100 and 200, and live ones at 200."""
    for step, better in ((100, 0), (200, 5)):
        folder = tmp_path / "run" / "evals" / f"step-{step:06d}"
        same_text = {  # one answer of 40 tokens, in longer or shorter rounds
            f"p{i}": [1] * 20 if better and i % 2 else [0] * 40 for i in PROMPTS
        }
        write_results(folder, results(row(same_text), step=step, mode="replay"))
        (tmp_path / "run" / "checkpoints" / folder.name).mkdir(parents=True)
    write_results(folder / "live", results(row(uneven()), step=200))
    return tmp_path / "run"


def test_a_run_a_checkpoint_a_folder_and_a_file_are_found(run: Path) -> None:
    def found(path: Path) -> tuple[str, int]:
        got = find_results(path)
        return got["mode"], got["checkpoint"]["step"]

    assert found(run) == ("replay", 200)
    assert found(run / "checkpoints" / "step-000100") == ("replay", 100)
    (run / "checkpoints").rename(run.parent / "disk")
    (run / "checkpoints").symlink_to(run.parent / "disk")
    (run / "checkpoints" / "best").symlink_to("step-000100")
    assert found(run / "checkpoints" / "best") == ("replay", 100)
    assert found(run / "evals" / "step-000100") == ("replay", 100)
    assert found(run / "evals" / "step-000200" / "live") == ("live", 200)
    assert found(run / "evals" / "step-000100" / "results.json") == ("replay", 100)


def test_where_there_are_no_results_says_what_to_do(run: Path) -> None:
    (run / "checkpoints" / "step-000300").mkdir()
    for path in (run / "checkpoints" / "step-000300", run.parent, run.parent / "nothing"):
        with pytest.raises(UserError, match="evaluate it"):
            find_results(path)


def test_the_command_prints_and_writes_the_comparison(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = str(run / "checkpoints" / "step-000100"), str(run)
    assert eval_main.main(["compare", a, b, "--output", str(tmp_path / "out")]) is None
    out = capsys.readouterr().out
    assert "A: runs/x/checkpoints/step-000100, step 100" in out
    line = next(line for line in out.splitlines() if line.startswith("math"))
    assert line.split()[:5] == ["math", "DFlash", "chain", "1.00", "1.33"]
    assert " B " in line
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "| math | DFlash chain | 1.00 | 1.33 | +0.33 [" in text
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (record["a"]["step"], record["b"]["step"]) == (100, 200)
    assert record["rows"][0]["verdict"] == "B"
    assert record["rows"][0]["difference"] == pytest.approx(1 / 3)


def test_a_text_that_is_not_the_targets_has_no_verdict_and_no_success(tmp_path: Path) -> None:
    good, wrong = row(uneven()), row(uneven(2)) | {"lossless": False}
    for name, it in (("a", good), ("b", wrong)):
        write_results(tmp_path / name, results(it))
    assert only(results(good), results(wrong)).verdict == "INVALID, not lossless"
    assert eval_main.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
