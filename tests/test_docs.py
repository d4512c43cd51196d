"""What the documentation says is so: examples run, links lead somewhere, commands parse, the file tree is the tree."""

from __future__ import annotations

import argparse
import doctest
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from pydantic import BaseModel

import eval.compare
import eval.main
import extract.main
import launch.main
import train.export
import train.main
from configs.load import load_config
from configs.schema import Config
from tests.test_extract_shards import SAMPLES, store

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

COMMANDS = {
    "extract/main.py": extract.main.parser,
    "train/main.py": train.main.parser,
    "train/main.py export": train.export.parser,
    "train/main.py push": train.export.parser,
    "eval/main.py": eval.main.parser,
    "eval/main.py compare": eval.compare.parser,
    "launch/main.py": launch.main.parser,
}
# What a page calls the reader's own config, and the recipe that stands for it here.
PLACEHOLDERS = {"C": "configs/qwen3-8b.yaml", "configs/mine.yaml": "configs/qwen3-8b.yaml"}


# --- what a page holds ------------------------------------------------------------------------------------------------


def code_and_prose(page: Path) -> tuple[list[str], str]:
    """The lines of the page's code blocks, continued ones joined, and everything else."""
    code, prose, fenced = [], [], False
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            code.append(line.strip())
        else:
            prose.append(line)
    return code, "\n".join(prose)


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`]+)`", code_and_prose(page)[1])


def commands(page: Path) -> Iterator[str]:
    """Everything on the page that a reader may type into a shell here, without its environment."""
    for text in [*code_and_prose(page)[0], *spans(page)]:
        text = re.sub(r"^(?:[A-Z_]+=\S* )+", "", text.replace("\n", " "))
        if re.match(
            r"(python (extract|train|eval|launch|bench)/|accelerate launch .*main\.py|make [a-z])",
            text,
        ):
            yield text


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", code_and_prose(page)[1], re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return frozenset(title.replace(" ", "-") for title in plain)


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("extract.shards", ["ShardReader"]),
        ("train.drafter", ["DFlashDrafter"]),
        ("eval.tree", ["build_tree"]),
        ("eval.verify", ["Verifier"]),
        ("eval.replay", ["replay"]),
    ],
)
def test_examples_in_docstrings_run(module: str, names: list[str], tmp_path: Path) -> None:
    code = importlib.import_module(module)
    tests = doctest.DocTestFinder().find(code, extraglobs={"states": tmp_path})
    store(tmp_path, SAMPLES)
    assert [t.name.removeprefix(f"{module}.") for t in tests if t.examples] == names
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert not runner.summarize().failed


@by_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", code_and_prose(page)[1]):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(there), f"{page.name}: no heading for {link}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES[2:]:
        assert f"]({page.name})" in index or page.name == "README.md", page.name


def parse(parser: argparse.ArgumentParser, words: list[str], command: str) -> argparse.Namespace:
    try:
        return parser.parse_args(words)
    except SystemExit:
        pytest.fail(f"it does not parse: {command}")


def check(command: str) -> None:
    """Parse a command as it would be, and load the config that it names with its overrides."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets, command
        return
    if words[0] == "accelerate":
        launched = parse(launch_command_parser(), words[2:], command)
        assert launched.config_file is None or (ROOT / launched.config_file).exists(), command
        words = ["python", launched.training_script, *launched.training_script_args]
    script, rest = words[1], words[2:]
    assert (ROOT / script).exists(), command
    if script.startswith("bench/"):
        source = (ROOT / script).read_text()
        assert all(f'"{word}"' in source for word in rest if word.startswith("--")), command
        return
    verb = f"{script} {rest[0]}" if rest else script
    parser = COMMANDS.get(verb, COMMANDS[script])()
    if verb in COMMANDS and verb.endswith("compare"):
        rest = rest[1:]
    if "[" in command:  # a synopsis
        for option in re.findall(r"--[a-z-]+", command):
            known = [parser, *subparsers(parser)]
            assert any(option in p.format_usage() for p in known), f"{option} in {command}"
        return
    args = parse(parser, rest, command)
    if config := getattr(args, "config", None):
        load_config(ROOT / PLACEHOLDERS.get(config, config), args.overrides)


def subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        sub
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for sub in action.choices.values()
    ]


@by_page
def test_commands_parse_and_name_configs_that_load(page: Path) -> None:
    for command in commands(page):
        check(command)


def test_the_pages_hold_the_commands_that_they_are_about() -> None:
    """Else the test above looks at nothing."""
    found = [command for page in PAGES for command in commands(page)]
    for script in ("extract/main.py", "train/main.py", "eval/main.py", "launch/main.py", "make "):
        assert sum(script in command for command in found) >= 5, script


@by_page
def test_settings_that_a_page_names_exist(page: Path) -> None:
    sections = {n: f.annotation for n, f in Config.model_fields.items()}
    for span in spans(page):
        name = re.match(r"([a-z]+)\.([a-z_]+)(?=$|[:= .])", span)
        section = sections.get(name[1]) if name else None
        if not (name and isinstance(section, type) and issubclass(section, BaseModel)):
            continue
        module = ROOT / name[1] / f"{name[2]}.py"
        known = {*section.model_fields, "py", "sh"}
        assert name[2] in known or module.exists(), span


def helps() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for make in dict.fromkeys(COMMANDS.values()):
        for parser in (top := make(), *subparsers(top)):
            yield parser.prog, parser


@pytest.mark.parametrize(
    ("name", "parser"), list(helps()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_help_fits_one_screen_and_has_an_example_that_parses(
    name: str, parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = parser.format_help().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    text = " ".join((parser.epilog or "").split())
    examples = re.findall(
        r"(?:python|accelerate launch) \S+main\.py.*?(?=\. |$| python | eval\.prompts)", text
    )
    assert examples, f"{name} --help shows no example"
    for example in examples:
        check(example.replace("RUN/", "runs/mine/"))


def test_the_file_tree_in_the_readme_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = text.partition("## The code")[2].partition("\n## ")[0]
    rooms = ("configs", "extract", "train", "eval", "launch")
    starts = [code.index(f"\n    {room}/ ") for room in rooms] + [code.index("\n    tests/")]
    for room, start, end in zip(rooms, starts, starts[1:], strict=False):
        named = set(re.findall(r"\b\w+\.py\b", code[start:end]))
        there = {path.name for path in (ROOT / room).glob("*.py")} - {"__init__.py"}
        assert named == there, f"{room}/: {sorted(named ^ there)}"


def test_cheap_commands_of_the_pages_run(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", str(ROOT / "configs/qwen3-8b.yaml")]
    assert not launch.main.main(["run", *config, "--dry-run"])
    assert capsys.readouterr().out.count("=== ") == 4
    with pytest.raises(SystemExit) as ended:
        extract.main.main([*config, "--print-config"])
    assert not ended.value.code and "block_size: 16" in capsys.readouterr().out


def test_the_tables_of_the_scaling_page_are_what_the_script_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench/scaling.py"])
    importlib.import_module("bench.scaling").main()
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(printed) > 15
    for line in printed:
        assert line in page.splitlines(), line
