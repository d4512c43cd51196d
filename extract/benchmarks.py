"""Public benchmarks by name, as the DFlash and DDTree papers ask them: prompt format, sample and order.

    eval.prompts: [gsm8k, math500, mt-bench]

A benchmark is a JSONL file of all of its prompts in the data set's own order, one {"turns": [...]} a line. It is looked
for in the folder that PACELINE_BENCHMARKS names, then in the cache, then made from the Hugging Face hub and cached. So a
machine without network needs only the files: copy another one's cache. docs/benchmarks.md has the table for people.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from configs.load import UserError, first_line
from configs.provenance import FolderLock, atomic_write_text
from extract.locate import cache_folder

FOLDER = "PACELINE_BENCHMARKS"
SEED = 0
T = TypeVar("T")
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark's rows lie, how a row becomes user turns, and how many of `total` rows are asked."""

    dataset: str
    config: str | None
    split: str
    total: int
    count: int
    turns: Callable[[Columns], list[str]]
    files: tuple[str, ...] = ()  # JSON files to read as they are, where the data set is a script
    revision: str | None = None  # the hub's commit; nothing here could be pinned without network


def _math(column: str) -> Callable[[Columns], list[str]]:
    asks = "Please reason step by step, and put your final answer within \\boxed{}."
    return lambda row: [f"{row[column]}\n{asks}"]


def _humaneval(row: Columns) -> list[str]:
    asks = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{asks}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Columns) -> list[str]:
    role = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. "
        "You will NOT return anything except for the program"
    )
    code = row["starter_code"] or "# YOUR CODE HERE"
    asks = (
        "Use the following code structure"
        if row["starter_code"]
        else "Write your code in the following format"
    )
    sections = (
        role,
        f"### Question:\n{row['question_content']}",
        f"### Format: {asks}:\n```python\n{code}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(sections)]


def _swe_bench(row: Columns) -> list[str]:
    return [
        f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."
    ]


def _alpaca(row: Columns) -> list[str]:
    return [row["instruction"] + (f"\n\nInput:\n{row['input']}" if row["input"] else "")]


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "main", "test", 1319, 128, _math("question")),
    "math500": Benchmark("HuggingFaceH4/MATH-500", None, "test", 500, 128, _math("problem")),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", None, "train", 30, 30, _math("problem")),
    "aime25": Benchmark("MathArena/aime_2025", None, "train", 30, 30, _math("problem")),
    "humaneval": Benchmark("openai/openai_humaneval", None, "test", 164, 164, _humaneval),
    "mbpp": Benchmark(
        "google-research-datasets/mbpp", "sanitized", "test", 257, 128, lambda row: [row["prompt"]]
    ),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite", None, "test", 1055, 128, _livecodebench,
        files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))),
    ),
    "swe-bench-lite": Benchmark("princeton-nlp/SWE-bench_Lite", None, "test", 300, 128, _swe_bench),
    "mt-bench": Benchmark(
        "HuggingFaceH4/mt_bench_prompts", None, "train", 80, 80, lambda row: list(row["prompt"])
    ),
    "alpaca": Benchmark("tatsu-lab/alpaca", None, "train", 52002, 128, _alpaca),
}  # fmt: skip
BENCHMARKS["swe-bench"] = BENCHMARKS["swe-bench-lite"]  # what the papers' code calls it


def find(name: str) -> Path:
    """The JSONL file with all prompts of a benchmark, downloaded at first use.

    Raises UserError when it is nowhere and cannot be downloaded, or PACELINE_BENCHMARKS is not a folder.
    """
    folder = os.environ.get(FOLDER)
    if folder:
        given = Path(folder).expanduser()
        if not given.is_dir():
            raise UserError(
                f"{FOLDER}={folder} is not a folder; name the one that holds {name}.jsonl"
            )
        if (given / f"{name}.jsonl").is_file():
            return given / f"{name}.jsonl"
    cached = cache_folder() / "benchmarks" / f"{name}.jsonl"
    if not cached.exists():
        with FolderLock(cached.parent, name, wait=True):
            if not cached.exists():  # another process was faster
                atomic_write_text(cached, _download(name, cached))
    return cached


def sample(rows: Sequence[T], count: int) -> list[T]:
    """The rows that DDTree's code asks, in its order: what datasets' shuffle(seed=0).select(range(count)) gives.

    Shuffled even where all are asked, so that a smaller eval.max_prompts is not the first category of MT-Bench.
    """
    order = np.random.default_rng(SEED).permutation(len(rows))
    return [rows[i] for i in order[:count]]


def table() -> str:
    """A line per benchmark for `--help`: name, prompts, data set."""
    return "\n".join(
        f"  {name:<15} {b.count:>4} of {b.total:>5}  {b.dataset}" for name, b in BENCHMARKS.items()
    )


def _download(name: str, cached: Path) -> str:
    """The text of the JSONL file."""
    benchmark = BENCHMARKS[name]
    print(f"downloading {benchmark.dataset} to {cached} (once)", flush=True)
    try:
        turns = [benchmark.turns(row) for row in _read(benchmark)]
    except KeyError as error:
        why = f"its rows have no column {error}"
    except Exception as error:  # its own, its parsers' and its network's have no base in common
        why = first_line(error)
    else:
        rows = [{"id": f"{name}-{n}", "turns": texts} for n, texts in enumerate(turns, 1)]
        return "".join(json.dumps(row) + "\n" for row in rows)
    raise UserError(
        f"the benchmark {name} is not cached as {cached} and {benchmark.dataset} cannot be read ({why}); "
        f"set {FOLDER} to a folder that holds {name}.jsonl, or use the shipped sets eval/prompts/*.jsonl"
    )


def _read(benchmark: Benchmark) -> Iterable[Columns]:
    import datasets  # slow

    if benchmark.files:  # streamed: gigabytes of private tests come with LiveCodeBench's questions
        root = f"hf://datasets/{benchmark.dataset}@{benchmark.revision or 'main'}"
        urls = [f"{root}/{file}" for file in benchmark.files]
        found = datasets.load_dataset("json", data_files=urls, split="train", streaming=True)
    else:
        found = datasets.load_dataset(
            benchmark.dataset,
            benchmark.config,
            split=benchmark.split,
            revision=benchmark.revision,
        )
    return iter(found)
