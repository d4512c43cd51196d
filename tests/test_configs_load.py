"""The experiment file: what is read, what is refused and in which words."""

import argparse
import errno
import json
import subprocess
import sys
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from configs.load import (
    REPOSITORY,
    UserError,
    add_arguments,
    config_from_args,
    dump_config,
    load_config,
    main_guard,
    resolve_input,
)
from configs.schema import Config

MINIMAL = "run_dir: runs/x\ntarget: {path: model}\ndata: {prompts: [a.jsonl]}\n"
fuzz = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=120
)


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "x.yaml"


def load(file: Path, text: str, *overrides: str) -> Config:
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides)


def mistakes(file: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the refusal, without the file's name."""
    with pytest.raises(UserError) as caught:
        load(file, text, *overrides)
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"{file} has {len(lines)} mistake{'s' if len(lines) > 1 else ''}:"
    return lines


# What is read


def test_a_minimal_file_gets_the_defaults(file: Path) -> None:
    config = load(file, MINIMAL)
    assert config.target.path == "model"
    assert config.data.prompts == ("a.jsonl",)
    assert config.train.learning_rate == 6e-4


@pytest.mark.parametrize(
    ("written", "value"),
    [("6e-4", 6e-4), ("1e5", 1e5), ("2E+3", 2e3), ("1.5e-3", 1.5e-3), (".5", 0.5), ("3", 3.0)],
)
def test_a_float_field_takes_every_way_to_write_a_number(
    file: Path, written: str, value: float
) -> None:
    rate = load(file, f"{MINIMAL}train: {{learning_rate: {written}}}").train.learning_rate
    assert rate == value
    assert isinstance(rate, float)


def test_a_list_fills_a_tuple_and_digits_may_be_grouped(file: Path) -> None:
    text = f"{MINIMAL}train: {{betas: [0, 0.5], anchors: 1_024}}\neval:\n  budgets:\n  - 4\n  - 8\n"
    config = load(file, text)
    assert config.train.betas == (0.0, 0.5)
    assert config.train.anchors == 1024
    assert config.eval.budgets == (4, 8)


# YAML 1.1 reads these as a boolean, 8, 90, 16, a date, a merge key and a value key.
@pytest.mark.parametrize(
    "word",
    ["no", "on", "Yes", "010", "1:30", "0x10", "2026-01-01", "<<", "=", "${HOME}", "$HOME", "None"],
)
def test_a_word_that_resembles_something_else_stays_text(file: Path, word: str) -> None:
    assert load(file, f"{MINIMAL}tracking:\n  name: {word}\n").tracking.name == word


def test_byte_order_mark_and_windows_line_ends(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(file).run_dir == "runs/x"


# What is refused


def test_all_mistakes_are_reported_at_once(file: Path) -> None:
    text = """\
run_dir: runs/x
seed: "7"
target:
  path: a
  package: b
data:
  max_samples: None
  regenerate: yes
  batch_size: true
train:
  epochs: 0
  learnig_rate: 6e-4
  learning_rate: fast
  block_size: 4
  optimizer: sgd
  optimizer: sgd
drafter: null
evil: {}
"""
    assert mistakes(file, text, "train.max_steps=2.5", "run_dir.x=1") == [
        "train.optimizer: given 2 times, on lines 15 and 16",
        "--set run_dir.x=1: run_dir is not a section",
        'seed: must be a whole number, was given the text "7"',
        "target needs exactly one of path (folder or hub id) and package (PyPI package); "
        "got path='a', package='b'",
        "data.prompts: missing",
        'data.max_samples: must be a whole number, was given the text "None" '
        "(null leaves a key unset)",
        'data.regenerate: must be true or false, was given the text "yes"',
        "data.batch_size: must be a whole number, was given true",
        "drafter: must be a section of keys, was given null",
        "train.epochs: must be greater than 0, was given 0",
        "train.max_steps: must be a whole number, was given 2.5 (from --set)",
        "train.optimizer: must be 'adamw' or 'muon', was given the text \"sgd\"",
        'train.learning_rate: must be a valid number, was given the text "fast"',
        "train.learnig_rate: unknown key; did you mean train.learning_rate?",
        "train.block_size: unknown key; did you mean drafter.block_size?",
        "evil: unknown key; did you mean eval?",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("data.temperature: 1", "write a section and put the key into it"),
        ("learning_rate: 1", "did you mean train.learning_rate?"),
        ("train: {max_new_tokens: 1}", "did you mean data.max_new_tokens or eval.max_new_tokens?"),
        ("train: {stores_last_hidden: true}", "did you mean extract.store_last_hidden?"),
        ("tracking: {zzz: 1}", "known are wandb, project, entity, name"),
    ],
)
def test_an_unknown_key_is_told_where_it_belongs(file: Path, text: str, line: str) -> None:
    (mistake,) = mistakes(file, f"{MINIMAL}{text}\n")
    assert mistake.split(": ", 1)[1] == f"unknown key; {line}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {max_grad_norm: .inf}", "train.max_grad_norm: must be a finite number"),
        ("train: {weight_decay: .nan}", "train.weight_decay: must be a finite number"),
        ("train: {weight_decay: -1}", "train.weight_decay: must be greater than or equal to 0"),
        ("train: {betas: [0.9]}", "train.betas[1]: missing"),
        ("train: {betas: 0.9}", "train.betas: must be a list"),
        ("eval: {budgets: [4, x]}", "eval.budgets[1]: must be a whole number"),
        ("eval: {budgets: [8, 4]}", "eval.budgets must be increasing"),
        (
            "eval: {top_p: 0.9}",
            "eval.top_p=0.9 has no effect with eval.temperature=0, which is greedy",
        ),
        ("eval: {prompts: [a/held.jsonl], best_by: hold}", "eval.best_by=hold is none of the sets"),
        ("eval: {top_k: 5, repetition_penalty: 1.2}", "eval.top_k=5 has no effect"),
        ("eval: {temperature: 1, top_p: 1}", "eval.top_p: must be less than 1"),
        ("seed: 010", 'seed: must be a whole number, was given the text "010"'),
        (f"seed: {'9' * 5000}", "seed: must be a whole number"),
        ("tracking: {name: 3}", "tracking.name: must be a valid string, was given 3"),
        (
            "train: {weighting: dpace, decay_gamma: 7}",
            "train.decay_gamma=7.0 has no effect with train.weighting=dpace",
        ),
        ("train: {distillation: 0.5}", "train.distillation is 0.5 but extract.store_last_hidden"),
    ],
)
def test_a_wrong_value_is_told_what_is_wanted(file: Path, text: str, line: str) -> None:
    (mistake,) = mistakes(file, f"{MINIMAL}{text}\n")
    assert mistake.startswith(line)


def test_duplicate_keys_are_found_at_every_depth(file: Path) -> None:
    text = f"{MINIMAL}seed: 1\nseed: 2\neval:\n  prompts: [{{a: 1, a: 2}}]\nseed: 3\n"
    assert mistakes(file, text, "train={epochs: 1, epochs: 2}")[:3] == [
        "eval.prompts[0].a: given 2 times, on lines 7 and 7",
        "seed: given 3 times, on lines 4 and 5 and 8",
        "train.epochs: given 2 times, on lines 1 and 1",
    ]


BOMB = "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "must hold sections of keys, not null"),
        ("- a\n", 'must hold sections of keys, not ["a"]'),
        ("run_dir\n", 'must hold sections of keys, not the text "run_dir"'),
        ("seed: 1\nrun_dir: [a\n", "line 3: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n\tb: 2\n", "line 2: found character '\\t' that cannot start any token"),
        (BOMB, "line 2: aliases, tags (*name, !name) and deep nesting are not supported"),
        ("a: !!python/object:os.system x\n", "line 1: aliases, tags"),
        ("a: !!int 3\n", "line 1: aliases, tags"),
        ("a: " + "[" * 5000, "line 1: aliases, tags"),
        ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
        ("? [a]\n: 1\n", "line 1: a key must be a word"),
        ('a: "\\UFFFFFFFF"\n', "cannot read the config file"),
        ('a: "\\ud800"\n', "cannot read the config file"),
        ('"\\ud800": 1\n', "cannot read the config file"),
        ("a: \x01\n", "special characters are not allowed"),
        (b"a: \xff\n", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_file_that_is_not_usable_yaml_is_refused_in_one_sentence(
    file: Path, content: str | bytes, reason: str
) -> None:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load_config(file)
    message = str(caught.value)
    assert reason in message
    assert str(file) in message
    assert "\n" not in message


def test_a_path_that_is_no_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths: list[tuple[Path | str, str]] = [
        (tmp_path / "none.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "x.yaml", "Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        ("a\0b", "null"),
    ]
    for path, reason in paths:
        with pytest.raises(UserError, match=f"^cannot read the config file .*: .*{reason}.*$"):
            load_config(path)


# --set


def test_overrides_are_applied_on_top_and_the_last_one_wins(file: Path) -> None:
    text = f"{MINIMAL}train: {{epochs: 2, max_steps: 5}}\n"
    sets = ["train.epochs=3", "train.max_steps=", "train.epochs=4", "train.learning_rate=1e-3"]
    sets += ["data.prompts=[b, c:train]", "drafter.block_size=8", "tracking.name=a=b"]
    config = load(file, text, *sets, "extract={shard_tokens: 7}")
    assert config.train.epochs == 4
    assert config.train.max_steps is None
    assert config.train.learning_rate == 1e-3
    assert config.data.prompts == ("b", "c:train")
    assert config.drafter.block_size == 8
    assert config.tracking.name == "a=b"
    assert config.extract.shard_tokens == 7


def test_an_override_mends_the_file_and_reaches_into_an_empty_section(file: Path) -> None:
    text = f"{MINIMAL}seed: x\ntrain:\n"
    assert load(file, text, "seed=3", "train.epochs=1").seed == 3


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("epochs", "--set epochs: write it as --set section.key=value"),
        ("=3", "--set =3: write it as --set section.key=value"),
        ("train..epochs=3", "--set train..epochs=3: write it as --set section.key=value"),
        ("data.prompts.0=b", "--set data.prompts.0=b: prompts is not a section"),
        ("seed=[", "--set seed=[: line 1: expected the node content, but found '<stream end>'"),
        ("train.epoch=3", "train.epoch: unknown key; did you mean train.epochs? (from --set)"),
        ("seed=no", 'seed: must be a whole number, was given the text "no" (from --set)'),
    ],
)
def test_a_wrong_override_is_a_mistake_like_others(file: Path, override: str, line: str) -> None:
    assert mistakes(file, MINIMAL, override) == [line]


# Properties


TRAPS = ["1e5", "yes", "null", "~", "010", "1:30", "- a", "a: b", "#", "\n", " x ", "'", '"', "<<"]
TRAPS += ["=", "a\x85b", "\u2028", "\ufeff", "\x7f", "a\n b\n\n", "\t", "\U0001f600", "a " * 99]
WORDS = st.text(min_size=1, max_size=12) | st.sampled_from(TRAPS)
DATA = st.fixed_dictionaries(
    {"prompts": st.lists(WORDS, min_size=1, max_size=3)},
    optional={"regenerate": st.booleans(), "max_samples": st.none() | st.integers(1, 2**40)},
)
RAW: dict[str, st.SearchStrategy[Any]] = {
    "drafter": st.fixed_dictionaries(
        {},
        optional={
            "target_layer_ids": st.none() | st.sets(st.integers(0, 99), min_size=1).map(sorted),
            "init_from": st.none() | WORDS,
        },
    ),
    "train": st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(0, 1e300, exclude_min=True),
            "weight_decay": st.floats(0, 1e300) | st.integers(0, 9),
            "optimizer": st.sampled_from(["adamw", "muon"]),
            "muon_adamw_learning_rate": st.floats(1e-9, 1),
        },
    ),
    "tracking": st.fixed_dictionaries({}, optional={"name": st.none() | WORDS, "project": WORDS}),
}


@settings(fuzz, max_examples=50)
@given(st.fixed_dictionaries({"run_dir": WORDS, "data": DATA}, optional=RAW), WORDS)
@example({"run_dir": "r", "data": {"prompts": TRAPS}}, "m")
def test_a_dumped_config_is_read_back_equal(file: Path, raw: dict[str, Any], path: str) -> None:
    try:
        config = Config.model_validate_json(json.dumps({**raw, "target": {"path": path}}))
    except ValidationError:  # an option without effect
        assume(False)
    text = dump_config(config)
    assert load(file, text) == config
    assert dump_config(load_config(file)) == text


def test_a_dump_shows_defaults_and_leaves_out_those_without_effect(file: Path) -> None:
    shown = yaml.safe_load(dump_config(load(file, MINIMAL, "drafter.target_layer_ids=[1, 5, 9]")))
    assert shown["train"]["epochs"] == 6
    assert shown["drafter"]["block_size"] == 16
    assert list(shown) == list(Config.model_fields)
    assert "muon_momentum" not in shown["train"]  # refused under adamw
    assert "num_taps" not in shown["drafter"]  # refused beside three explicit ids
    muon = yaml.safe_load(dump_config(load(file, MINIMAL, "train.optimizer=muon")))
    assert muon["train"]["muon_momentum"] == 0.95


KEYS = [
    (section, name)
    for section, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    for name in info.annotation.model_fields
]


@fuzz
@given(st.sampled_from(KEYS), st.data())
def test_a_mistyped_key_is_always_refused_with_the_right_key_named(
    file: Path, key: tuple[str, str], data: st.DataObject
) -> None:
    section, name = key
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(["", *"abcxyz_"]))
    typo = name[:at] + letter + name[at + 1 :]
    assume(typo and typo not in {n for _, n in KEYS})
    lines = mistakes(file, f"{MINIMAL}", f"{section}.{typo}=1")
    (line,) = [line for line in lines if line.startswith(f"{section}.{typo}: unknown key")]
    # top_x is as near to top_k as to top_p
    near = partial(SequenceMatcher, None, typo)
    others = [n for s, n in KEYS if s == section and near(n).ratio() >= near(name).ratio()]
    assert any(n in line for n in (name, *others))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            WORDS | st.sampled_from([*Config.model_fields, "path"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
SYNTAX = st.text(st.sampled_from(list("ab1.:-[]{}&*!|>'\"%@`#?,\\ \n\t~=<e")), max_size=60)


@fuzz
@given(
    st.one_of(
        st.text(max_size=60),
        SYNTAX,
        SYNTAX.map(lambda text: MINIMAL + text),
        NESTED.map(lambda value: yaml.dump(value, Dumper=yaml.SafeDumper, allow_unicode=True)),
        st.dictionaries(st.sampled_from([*Config.model_fields]), NESTED).map(yaml.safe_dump),
    ),
    st.lists(st.text(max_size=20) | SYNTAX.map(lambda text: f"train.epochs={text}"), max_size=2),
)
@example('a: "\\x00"', [])
@example(MINIMAL, ["tracking.name=\udcff", "\udcff=1"])  # argv that is not UTF-8
@example("a: 1" + "0" * 400, ["train.max_grad_norm=1" + "0" * 400])
def test_any_text_is_a_config_or_a_user_error(file: Path, text: str, overrides: list[str]) -> None:
    try:
        config = load(file, text, *overrides)
    except UserError:
        return
    assert isinstance(config, Config)


# Commands


def parse(*argv: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from_args(parser.parse_args(argv))


def test_the_command_line_and_print_config(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(MINIMAL)
    arguments = ["--config", str(file), "--set", "seed=1", "--set", "seed=2"]
    config = parse(*arguments)
    assert config.seed == 2
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit) as caught:
        parse(*arguments, "--print-config")
    assert caught.value.code == 0
    assert load(file, capsys.readouterr().out) == config
    assert parse("--config", str(file)).seed == 2  # the defaults were not shared
    with pytest.raises(SystemExit):
        parse()


AGAIN = "run the same command again"
FREE = f"free space and {AGAIN}"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no."), 2, "error: no."),
        (
            KeyboardInterrupt(),
            130,
            f"interrupted; {AGAIN} (with --resume where it trains) to continue",
        ),
        (OSError(errno.ENOSPC, "Full", "a/b"), 2, f"error: Full while writing a/b; {FREE}"),
        (OSError(errno.EDQUOT, "Quota"), 2, f"error: Quota; {FREE}"),
    ],
)
def test_main_guard_turns_what_a_user_can_mend_into_a_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str] | None) -> None:
        raise error

    assert main_guard(main) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_main_guard_passes_results_and_bugs_on() -> None:
    assert main_guard(lambda argv: None) == 0
    assert main_guard(lambda argv: 3) == 3

    def bug(argv: list[str] | None) -> None:
        raise PermissionError(errno.EACCES, "a bug until proven otherwise")

    with pytest.raises(PermissionError):
        main_guard(bug)


def test_inputs_are_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "configs" / "deep").mkdir(parents=True)
    (project / "sets").mkdir()
    (project / "sets" / "a.jsonl").touch()
    config_file = project / "configs" / "deep" / "x.yaml"
    monkeypatch.chdir(tmp_path)
    assert resolve_input("configs/schema.py", None) == REPOSITORY / "configs/schema.py"
    assert resolve_input("sets/a.jsonl", None) is None
    assert resolve_input("sets/a.jsonl", config_file) == project / "sets/a.jsonl"
    assert resolve_input("configs/schema.py", config_file) == REPOSITORY / "configs/schema.py"
    monkeypatch.chdir(project)
    assert resolve_input("sets/a.jsonl", None) == Path("sets/a.jsonl")  # as it was given
    (project / "configs" / "schema.py").touch()
    assert resolve_input("configs/schema.py", None) == Path("configs/schema.py")  # nearest first
    assert resolve_input(str(config_file.parent), None) == config_file.parent
    for name in ["org/data-set:train", "x" * 5000, "a\0b"]:
        assert resolve_input(name, config_file) is None


def test_this_room_does_not_import_torch() -> None:
    code = "import sys, configs.load, configs.provenance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
