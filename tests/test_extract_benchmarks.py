"""Benchmarks by name: each format, where a set comes from, which prompts are asked. No network."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.load import UserError
from eval.published import Point, published
from extract.benchmarks import BENCHMARKS, sample
from extract.main import main, refuse_shared_sources
from extract.prompts import load_chats
from tests.conftest import write_config

ROOT = Path(__file__).resolve().parent.parent
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LCB_ROLE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\nAdd.\n\n### Format: "
)
LCB_END = "\n```\n\n### Answer: (use the provided format with backticks)"
# A row in each data set's own columns, and what is asked. Braces must survive.
FORMATS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("gsm8k", {"question": "How many {x}?", "answer": "#### 2"}, ["How many {x}?" + BOXED]),
    ("math500", {"problem": "$x_{1}$?", "solution": "1", "answer": "1"}, ["$x_{1}$?" + BOXED]),
    ("aime24", {"id": 60, "problem": "Find $n$.", "answer": "204"}, ["Find $n$." + BOXED]),
    ("aime25", {"problem_idx": 1, "problem": "A\n", "answer": 70}, ["A\n" + BOXED]),
    (
        "humaneval",
        {"task_id": "HumanEval/0", "prompt": 'def f():\n    """{}"""\n', "test": "", "entry_point": "f"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            '```python\ndef f():\n    """{}"""\n\n```'
        ],
    ),
    ("mbpp", {"task_id": 2, "prompt": "Write a function.", "code": "", "test_list": []}, ["Write a function."]),
    (
        "livecodebench",
        {"question_content": "Add.", "starter_code": "", "private_test_cases": "eJx"},
        [LCB_ROLE + "Write your code in the following format:\n```python\n# YOUR CODE HERE" + LCB_END],
    ),
    (
        "livecodebench",
        {"question_content": "Add.", "starter_code": "class Solution:\n    "},
        [LCB_ROLE + "Use the following code structure:\n```python\nclass Solution:\n    " + LCB_END],
    ),
    (
        "swe-bench-lite",
        {"problem_statement": "It {breaks}.\r\n", "patch": "", "repo": "a/b"},
        ["Problem Statement:\nIt {breaks}.\r\n\nPlease fix the issue described above."],
    ),
    ("mt-bench", {"prompt": ["Write.", "Again."], "category": "writing", "prompt_id": 81}, ["Write.", "Again."]),
    ("alpaca", {"instruction": "Sum up.", "input": "", "output": "x"}, ["Sum up."]),
    ("alpaca", {"instruction": "Sum up.", "input": "1 2", "output": "3"}, ["Sum up.\n\nInput:\n1 2"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and cache, no local folder; returns where the cache's files go."""
    monkeypatch.delenv("PACELINE_BENCHMARKS", raising=False)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "paceline" / "benchmarks"


def hub(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[Any]:
    """Let the hub answer with these rows; returns the list that the questions to it go to."""
    asked: list[Any] = []

    def load_dataset(*names: str | None, **options: Any) -> datasets.Dataset:
        asked.append((*names, options))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def folder(path: Path, name: str, texts: list[str]) -> Path:
    path.mkdir(exist_ok=True)
    lines = [json.dumps({"turns": [text]}) + "\n" for text in texts]
    (path / f"{name}.jsonl").write_text("".join(lines))
    return path


@pytest.mark.parametrize(("name", "row", "turns"), FORMATS)
def test_format(
    name: str, row: dict[str, Any], turns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, [row])
    (chat,), _ = load_chats([name])
    assert [m["content"] for m in chat.messages] == turns
    assert {m["role"] for m in chat.messages} == {"user"}


def test_every_benchmark_has_a_format_test() -> None:
    assert {name for name, _, _ in FORMATS} == set(BENCHMARKS) - {"swe-bench"}
    assert BENCHMARKS["swe-bench"] == BENCHMARKS["swe-bench-lite"]


def test_what_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, [{"question": "x", "question_content": "x", "starter_code": ""}])
    load_chats(["gsm8k"])
    load_chats(["livecodebench"])
    gsm8k, (kind, lcb) = asked
    assert gsm8k == ("openai/gsm8k", "main", {"split": "test", "revision": None})
    assert kind == "json" and lcb["streaming"]
    files = [f"test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)]
    root = "hf://datasets/livecodebench/code_generation_lite@main/"
    assert lcb["data_files"] == [root + file for file in files]


@pytest.mark.parametrize(("total", "count"), [(1319, 128), (80, 80), (5, 128), (0, 3)])
def test_the_sample_is_that_of_ddtree(total: int, count: int) -> None:
    """Its code: dataset.shuffle(seed=0).select(range(count))."""
    theirs = datasets.Dataset.from_dict({"i": list(range(total))}).shuffle(seed=0)
    assert sample(range(total), count) == theirs["i"][:count]


def test_the_sample_stays_the_same_for_ever() -> None:
    assert sample(range(10), 6) == [4, 6, 2, 7, 3, 5]


def test_hub_then_cache_give_the_same_chats(
    monkeypatch: pytest.MonkeyPatch, nothing_here: Path
) -> None:
    asked = hub(monkeypatch, [{"question": f"What is {i}?"} for i in range(1319)])
    first, _ = load_chats(["gsm8k"])
    assert len(first) == 128
    # the id is the row's place in the data set, not in the sample
    for chat in first:
        row = int(chat.id.removeprefix("gsm8k-")) - 1
        assert chat.messages[0]["content"].startswith(f"What is {row}?\n")
    again, _ = load_chats(["gsm8k"])
    assert again == first and len(asked) == 1
    few, _ = load_chats(["gsm8k"], max_samples=7)
    assert few == first[:7]

    lines = (nothing_here / "gsm8k.jsonl").read_text().splitlines()
    assert len(lines) == 1319
    assert json.loads(lines[16]) == {"id": "gsm8k-17", "turns": ["What is 16?" + BOXED]}
    assert {p.name for p in nothing_here.iterdir()} == {"gsm8k.jsonl", ".lock-gsm8k"}
    # a copy of the cache is a local folder
    monkeypatch.setenv("PACELINE_BENCHMARKS", str(nothing_here))
    monkeypatch.setenv("PACELINE_CACHE", "/nowhere")
    assert load_chats(["gsm8k"])[0] == first


def test_the_local_folder_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_here: Path
) -> None:
    asked = hub(monkeypatch, [{"question": "hub", "problem": "hub"}])
    nothing_here.mkdir(parents=True)
    folder(nothing_here, "gsm8k", ["cached"])
    assert load_chats(["gsm8k"])[0][0].messages[0]["content"] == "cached"
    monkeypatch.setenv("PACELINE_BENCHMARKS", str(folder(tmp_path / "mine", "gsm8k", ["local"])))
    (chat,), _ = load_chats(["gsm8k"])
    assert (chat.id, chat.messages[0]["content"]) == ("gsm8k-1", "local")
    assert not asked
    # what the folder lacks comes from the hub as before
    assert load_chats(["math500"])[0][0].messages[0]["content"] == "hub" + BOXED
    monkeypatch.setenv("PACELINE_BENCHMARKS", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"^PACELINE_BENCHMARKS=\S*gone is not a folder; "):
        load_chats(["gsm8k"])


def test_a_local_folder_may_hold_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi."}]
    (tmp_path / "mbpp.jsonl").write_text(json.dumps({"id": "a", "messages": messages}))
    monkeypatch.setenv("PACELINE_BENCHMARKS", str(tmp_path))
    (chat,), _ = load_chats(["mbpp"])
    assert (chat.id, [*chat.messages]) == ("a", messages)


def test_a_mistake_in_a_local_file_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mbpp.jsonl").write_text('{"turns": ["x"]}\noops\n')
    monkeypatch.setenv("PACELINE_BENCHMARKS", str(tmp_path))
    with pytest.raises(UserError, match=rf"^{tmp_path}/mbpp\.jsonl:2: not JSON"):
        load_chats(["mbpp"])


def test_only_the_bare_name_is_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, [{"question": "from the hub"}])
    for name in ("gsm8k:test", "openai/gsm8k", "GSM8K"):
        assert load_chats([name])[0][0].messages[0]["content"] == "from the hub"
    assert [(path, options["split"]) for path, options in asked] == [
        ("gsm8k", "test"), ("openai/gsm8k", "train"), ("GSM8K", "train")
    ]  # fmt: skip
    folder(tmp_path, "gsm8k", ["a file"])
    assert load_chats(["gsm8k.jsonl"])[0][0].messages[0]["content"] == "a file"
    (tmp_path / "mt-bench").mkdir()  # somebody's checkout of it is not a file
    hub(monkeypatch, [{"prompt": ["x", "y"]}])
    assert len(load_chats(["mt-bench"])[0][0].messages) == 2


@pytest.mark.parametrize(
    ("failure", "why"),
    [(ConnectionError("Couldn't reach it\nRetrying"), "Couldn't reach it"), (OSError(), "OSError")],
)
def test_offline(
    failure: Exception, why: str, monkeypatch: pytest.MonkeyPatch, nothing_here: Path
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(UserError) as error:
        load_chats(["aime25"])
    assert str(error.value) == (
        f"the benchmark aime25 is not cached as {nothing_here}/aime25.jsonl and MathArena/aime_2025 cannot be read "
        f"({why}); set PACELINE_BENCHMARKS to a folder that holds aime25.jsonl, or use the shipped sets "
        "eval/prompts/*.jsonl"
    )
    assert not (nothing_here / "aime25.jsonl").exists()


def test_the_real_library_offline() -> None:
    """HF_HUB_OFFLINE is set by conftest; datasets raises whatever it raises."""
    with pytest.raises(UserError, match=r"HuggingFaceH4/aime_2024 cannot be read \(.+\); set PACE"):
        load_chats(["aime24"])


def test_a_changed_data_set_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, nothing_here: Path
) -> None:
    hub(monkeypatch, [{"query": "x"}])
    with pytest.raises(UserError, match=r"its rows have no column 'question'"):
        load_chats(["gsm8k"])
    assert not (nothing_here / "gsm8k.jsonl").exists()


def test_a_set_is_not_trained_on_and_held_out(tmp_path: Path) -> None:
    folder(tmp_path, "mine", ["x"])
    for trained, held in [
        ("gsm8k", "gsm8k"),
        ("openai/gsm8k:test", "gsm8k"),
        ("swe-bench", "swe-bench-lite"),
        ("mine.jsonl", str(tmp_path / "mine.jsonl")),
        ("org/set", "org/set:train"),
    ]:
        with pytest.raises(UserError) as error:
            refuse_shared_sources(["other", trained], ["another", held])
        assert str(error.value) == (
            f"{held} of eval.prompts is also trained on, as {trained} of data.prompts; take it out of one of them"
        )
    refuse_shared_sources(["openai/gsm8k:train", "tatsu-lab/other"], ["gsm8k", "alpaca"])
    with pytest.raises(UserError, match=r"^mine and \./mine\.jsonl of eval.* both be called mine"):
        refuse_shared_sources(["x"], ["mine", "./mine.jsonl"])
    with pytest.raises(UserError, match=r"^gsm8k and gsm8k of eval"):
        refuse_shared_sources(["x"], ["gsm8k", "gsm8k"])


def test_the_command_takes_names(
    tmp_path: Path,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = folder(tmp_path / "mine", "gsm8k", ["One?", "Two?"])
    (mine / "mt-bench.jsonl").write_text('{"turns": ["Hi.", "Again."]}\n')
    monkeypatch.setenv("PACELINE_BENCHMARKS", str(mine))
    sets = {"prompts": ["gsm8k", "mt-bench"]}
    file = str(write_config(tmp_path / "c.yaml", tiny_target, eval=sets))
    assert main(["--config", file, "--dry-run"]) is None
    assert "held out: gsm8k 2, mt-bench 1" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    # said before the target is looked for
    file = str(
        write_config(tmp_path / "c.yaml", tmp_path / "gone", data={"prompts": ["gsm8k"]}, eval=sets)
    )
    with pytest.raises(UserError, match=r"gsm8k of eval\.prompts is also trained on"):
        main(["--config", file])


def test_help_and_documentation_know_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, benchmark in BENCHMARKS.items():
        assert (
            f"{name:<15} {benchmark.count:>4} of {benchmark.total:>5}  {benchmark.dataset}"
            in printed
        )
        if name == "swe-bench":
            continue  # the same set; a sentence below the table says so
        (line,) = [row for row in document.splitlines() if row.startswith(f"| `{name}`")]
        assert f"| {benchmark.dataset}" in line
        assert f"| {benchmark.count} of {benchmark.total} |" in line
        for point in published("Qwen3-8B", name):
            assert f"{point.tau:.2f}" in document


def test_published_numbers() -> None:
    points = published("Qwen/Qwen3-8B", "math500")
    assert points[0] == Point("dflash", None, 7.87, "DFlash paper")
    trees = {p.budget: p.tau for p in points if p.decoder == "ddtree"}
    assert list(trees) == [16, 32, 64, 128, 256, 512, 1024]
    assert (trees[16], trees[1024]) == (8.61, 10.98)
    assert published("qwen3_8b", "MATH-500") == points
    assert [p.tau for p in published("Qwen3.5-27B", "mt-bench")] == [5.5]
    for other in ("Qwen3-8B-Base", "Qwen3-80B", "Qwen3.5-8B", ""):
        assert published(other, "math500") == []
    assert published("Qwen3-8B", "chat") == []
