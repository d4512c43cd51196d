"""Chats in, token ids and masks out, under five kinds of template. No model, no network."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from configs.load import REPOSITORY, UserError
from extract.prompts import (
    Chat,
    MaskedSample,
    Renderer,
    Report,
    Row,
    UnmaskableChat,
    load_chats,
    mask_answers,
    merge_turns,
    user_turns,
)

TURN = "'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}{{ " + TURN + " }}{% endfor %}" + OPEN
BOS = "{{ bos_token }}" + CHATML
HEADER = "'<|start_header_id|>' + {} + '<|end_header_id|>\n\n'"
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ " + HEADER.format("m['role']") + " }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ " + HEADER.format("'assistant'") + " }}{% endif %}"
)
# Like Qwen3's: reasoning only after the last question, and there always a think block.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role != 'assistant' %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- else %}
        {%- set said = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- said + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ " + TURN + " }}{% endfor %}" + OPEN
)
TEMPLATES = {"chatml": CHATML, "bos": BOS, "llama3": LLAMA3, "qwen3": QWEN3, "strict": STRICT}

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>"]
FAMILY = "👨‍👩‍👧"  # emoji joined by ZWJ


# How Qwen and Llama 3 cut text before the merges: line ends stay together whatever follows.
LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def trained(gpt2: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    cuts = pre_tokenizers.Split(Regex(LINES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    steps = [to_bytes] if gpt2 else [cuts, to_bytes]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        "the answer is the question\n\n",
        "user assistant system\n",
        "日本語 emoji 👍 👍\n\n\n",
    ]
    tokenizer.train_from_iterator(texts * 20, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return str(tokenizer.to_str())


def make_tokenizer(
    template: str | None, *, adds_bos: bool = False, gpt2: bool = False, lower: bool = False
) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(trained(gpt2))
    if adds_bos:
        bos = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=bos)
    if lower:
        backend.normalizer = normalizers.Lowercase()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def make_renderer(
    name: str, *, adds_bos: bool = False, enable_thinking: bool | None = None
) -> Renderer:
    tokenizer = make_tokenizer(TEMPLATES[name], adds_bos=adds_bos)
    return Renderer(tokenizer, enable_thinking=enable_thinking)


def id_of(renderer: Renderer, token: str) -> int:
    # one token gives one id, and the stub says perhaps a list
    return int(renderer.tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]


def stops(renderer: Renderer) -> set[int]:
    return {id_of(renderer, "<|im_end|>"), id_of(renderer, "<|eot_id|>")}


def decode(renderer: Renderer, ids: Sequence[int]) -> str:
    return str(renderer.tokenizer.decode(list(ids)))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def chat_of(*messages: dict[str, Any]) -> Chat:
    return Chat("c", messages, "test")


def masked(renderer: Renderer, *messages: dict[str, Any]) -> list[Row]:
    return mask_answers(renderer, chat_of(*messages), stops(renderer))


def refusal(renderer: Renderer, *messages: dict[str, Any]) -> str:
    with pytest.raises(UnmaskableChat) as error:
        masked(renderer, *messages)
    return str(error.value.reason)


def supervised(renderer: Renderer, row: Row | MaskedSample) -> str:
    ids = [i for i, wanted in zip(row.input_ids, row.loss_mask, strict=True) if wanted]
    return decode(renderer, ids)


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


# --- files to chats


MESSAGES = [system("s"), user("q"), assistant("a")]
SHAREGPT = [("system", "s"), ("human", "q"), ("gpt", "a")]
SHAPES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": MESSAGES}, MESSAGES),
    ({"conversations": [{"from": f, "value": v} for f, v in SHAREGPT]}, MESSAGES),
    (
        {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]},
        MESSAGES[1:],
    ),
    ({"turns": ["one", "two"]}, [user("one"), user("two")]),
    ({"prompt": "p"}, [user("p")]),
    ({"question": "p"}, [user("p")]),
    ({"instruction": "do", "input": ""}, [user("do")]),
    ({"instruction": "do", "input": "this"}, [user("do\n\nthis")]),
    ({"messages": None, "prompt": "p"}, [user("p")]),
    ({"messages": [user("q")], "prompt": "other"}, [user("q")]),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
        [user("ab")],
    ),
    (
        {"messages": [user("q"), assistant("a", reasoning_content="r", tool_calls=None)]},
        [user("q"), assistant("a", reasoning_content="r")],
    ),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize(("row", "messages"), SHAPES)
def test_every_shape_from_every_kind_of_file(
    tmp_path: Path, suffix: str, row: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    name = write(tmp_path / f"set[1]{suffix}", [row])
    (chat,), report = load_chats([name])
    assert chat == Chat("set[1]-1", tuple(messages), name)
    assert report.as_dict() == {"loaded": 1, "kept": 1, "dropped": {}}


def test_parquet_rows_with_different_keys(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "messages": [user("one"), assistant("a", reasoning_content="r")]},
        {"id": None, "messages": [user("two"), assistant("b")]},
    ]
    chats, _ = load_chats([write(tmp_path / "x.parquet", rows)])
    assert [chat.id for chat in chats] == ["7", "x-2"]
    assert chats[0].messages == (user("one"), assistant("a", reasoning_content="r"))
    assert chats[1].messages == (user("two"), assistant("b"))


TOOL = {"role": "tool", "content": "42"}
IMAGE = {"role": "user", "content": [{"type": "image", "url": "x"}]}
DROPPED: list[tuple[str, Any]] = [
    ("empty", {"messages": []}),
    ("empty", {"messages": [system("only")]}),
    ("empty", {"messages": [user(" \n")]}),
    ("empty", {"turns": [""]}),
    ("empty", {"prompt": ""}),
    ("unknown role", {"messages": [user("q"), {"role": "critic", "content": "x"}]}),
    ("unknown role", {"messages": [{"role": None, "content": "x"}]}),
    ("unknown role", {"conversations": [{"from": "bing", "value": "x"}]}),
    ("null content", {"messages": [user("q"), {"role": "assistant", "content": None}]}),
    ("null content", {"messages": [{"role": "user"}]}),
    ("null content", {"turns": ["q", None]}),
    ("assistant-first", {"messages": [system("s"), assistant("a"), user("q")]}),
    ("assistant-first", {"messages": [assistant("a")]}),
    ("tool-first", {"messages": [TOOL, user("q")]}),
    ("non-text content", {"messages": [IMAGE]}),
    ("non-text content", {"messages": [{"role": "user", "content": ["q"]}]}),
    ("non-text content", {"messages": [{"role": "user", "content": [{"text": "caption"}]}]}),
    ("not Unicode text", {"messages": [user("q"), assistant("\ud83d")]}),
    ("not Unicode text", {"messages": [user("q"), assistant("a", reasoning_content="\ud83d")]}),
    ("malformed row", {"messages": "q"}),
    ("malformed row", {"messages": ["q"]}),
    ("malformed row", {"messages": [{"role": "user", "content": 5}]}),
    ("malformed row", {"prompt": 5}),
    ("malformed row", {"text": "q"}),
    ("malformed row", {"": ["q"]}),
    ("malformed row", ["q"]),
    ("malformed row", 5),
    ("malformed row", None),
]


def test_unusable_rows_are_dropped_by_name_and_counted(tmp_path: Path) -> None:
    rows = [row for _, row in DROPPED]
    name = write(tmp_path / "x.jsonl", [*rows, {"prompt": "fine", "id": "good"}])
    chats, report = load_chats([name])
    assert [chat.id for chat in chats] == ["good"]
    assert (report.loaded, report.kept) == (len(rows) + 1, 1)
    reason_of = {chat_id: reason for reason, ids in report.dropped.items() for chat_id in ids}
    for number, (reason, row) in enumerate(DROPPED, 1):
        assert reason_of.pop(f"x-{number}") == reason, row
    assert not reason_of


def test_dates_and_bytes_of_parquet_are_no_text(tmp_path: Path) -> None:
    odd = {"messages": [{"role": "user", "content": "q", "raw": b"x"}]}
    name = write(tmp_path / "x.parquet", [odd, {"messages": [user("fine")]}])
    assert load_chats([name])[1].dropped == {"not Unicode text": ["x-1"]}


def test_report_lines() -> None:
    report = Report(ids={f"a-{number}" for number in range(8)} | {"b"})
    for number in range(4):
        report.add("empty", f"a-{number}")
    report.add("too long", "b")
    report.add("also too long", "b")
    report.add("short answer", "a-5#1")  # a row; the chat has others
    assert report.lines() == [
        "9 chats read, 4 kept",
        "  dropped 4: empty (a-0, a-1, a-2, ...)",
        "  dropped 1: too long (b)",
        "  dropped 1: also too long (b)",
        "  dropped 1: short answer (a-5#1)",
    ]
    report.dropped["empty"].pop()
    assert report.lines()[1] == "  dropped 3: empty (a-0, a-1, a-2)"
    json.dumps(report.as_dict())


def test_ids_are_kept_as_text(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"p{i!r}"} for i in (0, "", "x-1", "\ud83d")]
    chats, _ = load_chats([write(tmp_path / "x.jsonl", rows)])
    assert [chat.id for chat in chats] == ["0", "", "x-1", "\\ud83d"]


def test_duplicates_ask_the_same_whatever_is_answered(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.jsonl",
        [
            {"id": "1", "messages": [user("caf\u00e9  au\nlait"), assistant("yes")]},
            {"id": "2", "messages": [system("s"), user("caf\u00e9 au lait")]},
            {"id": "3", "turns": ["caf\u00e9", "au lait"]},
            {"id": "4", "prompt": "Caf\u00e9 au lait"},
        ],
    )
    second = write(
        tmp_path / "b.jsonl",
        [
            {"id": "5", "messages": [user("cafe\u0301 au lait "), assistant("no")]},
            {"id": "6", "messages": [user("s"), user("caf\u00e9 au lait")]},
        ],
    )
    chats, report = load_chats([first, second])
    assert [chat.id for chat in chats] == ["1", "2", "3", "4", "6"]
    assert report.dropped == {"duplicate": ["5"]}


def test_two_rows_with_one_id(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"prompt": "x"}, {"id": "same", "prompt": "y"}])
    second = write(tmp_path / "b.json", [{"id": "same", "prompt": "z"}])
    with pytest.raises(UserError) as error:
        load_chats([first, second])
    assert f"row 1 of {second} and row 2 of {first}" in str(error.value)
    assert "'same'" in str(error.value)


def test_max_samples_counts_usable_chats_and_stops_reading(tmp_path: Path) -> None:
    first = tmp_path / "a.jsonl"
    first.write_text('{"prompt": "x"}\n{"prompt": ""}\n\n{"prompt": "y"}\nnot read\n')
    second = write(tmp_path / "b.jsonl", [{"prompt": "z"}])
    chats, report = load_chats([str(first), second], max_samples=2)
    assert [chat.id for chat in chats] == ["a-1", "a-4"]
    assert (report.loaded, report.kept) == (3, 2)
    chats, _ = load_chats([second, str(first)], max_samples=2)
    assert [chat.id for chat in chats] == ["b-1", "a-1"]


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "line\xe2\x80\xa8separator"}\r\n  \r\n{"prompt": "b"}'
    )
    chats, _ = load_chats([str(path)])
    assert [chat.messages[0]["content"] for chat in chats] == ["line\u2028separator", "b"]
    assert [chat.id for chat in chats] == ["x-1", "x-3"]


FILES: list[tuple[str, bytes | None, str]] = [
    ("x.jsonl", None, f"x.jsonl is not a file in {{cwd}} or in the checkout {REPOSITORY}"),
    ("x.parquet:train", None, "is not a file in"),
    ("/no/such/prompts", None, f"or in the checkout {REPOSITORY}"),
    ("../no-such-folder/prompts", None, f"or in the checkout {REPOSITORY}"),
    ("x.jsonl", b"", "x.jsonl has no usable chat: it is empty"),
    ("x.json", b"", "it is empty"),
    ("x.json", b"[]", "it is empty"),
    ("x.jsonl", b"\n \n", "it is empty"),
    ("x.jsonl", b'{"prompt": ""}\n{"prompt": ""}\n7\n', "chat: 2 x empty, 1 x malformed row; "),
    ("x.json", b'{"data": []}', "a row needs one of messages, conversations, turns, prompt"),
    ("x.jsonl", b'{"prompt": "x"}\n\n{"prompt": \n', "x.jsonl:3: not JSON: Expecting value"),
    ("x.json", b'[\n{"prompt": "x"},\n{oops}\n]', "x.json:3: not JSON: Expecting property name"),
    ("x.jsonl", b"[" * 100_000, "x.jsonl cannot be read"),
    ("x.jsonl", b'{"prompt": "\xff"}', "x.jsonl cannot be read: 'utf-8' codec"),
    ("x.txt", b"hello", "x.txt is of another kind; name a .jsonl, .json, .parquet file"),
    ("x.parquet", b"hello", "x.parquet cannot be read: Parquet file size is 5 bytes"),
    ("x.parquet", b"", "x.parquet cannot be read: Parquet file size is 0 bytes"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_chats([name])
    assert message.format(cwd=tmp_path) in str(error.value)
    assert "data set" not in str(error.value)  # nobody asked the hub
    assert "\n" not in str(error.value)


def test_every_source_is_looked_for_before_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("oops")
    with pytest.raises(UserError, match="is not a file"):
        load_chats([str(tmp_path / "bad.jsonl"), "missing.jsonl"])
    (tmp_path / "folder.jsonl").mkdir()
    for folder in (tmp_path, tmp_path / "folder.jsonl"):
        with pytest.raises(UserError, match=r"is a folder; name a \.jsonl"):
            load_chats([str(tmp_path / "bad.jsonl"), str(folder)])


def test_no_source_may_be_in_vain(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", [{"prompt": "x"}])
    copy = write(tmp_path / "b.jsonl", [{"prompt": "x"}, {"prompt": " x"}])
    with pytest.raises(UserError, match=r"b\.jsonl has no usable chat: 2 x duplicate; "):
        load_chats([good, copy])


def test_names_are_looked_for_here_and_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    there = tmp_path / "configs" / "x.yaml"
    write(tmp_path / "mine.jsonl", [{"prompt": "x"}])
    assert len(load_chats(["mine.jsonl"])[0]) == 1
    (chat,), _ = load_chats(["extract/prompt_sets/train.jsonl"], max_samples=1)
    assert chat.source == "extract/prompt_sets/train.jsonl"
    monkeypatch.chdir("/")
    assert len(load_chats(["mine.jsonl"], config_file=there)[0]) == 1


def test_hub_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, *, split: str) -> list[dict[str, str]]:
        asked.append((path, split))
        if path == "org/gone":
            raise ConnectionError("Couldn't reach it\nRetrying")
        return [{"question": f"{path} {split}"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    chats, _ = load_chats(["squad", "org/my.set_1:test", "squad:test"])
    assert [chat.id for chat in chats] == ["squad-1", "my.set_1-test-1", "squad-test-1"]
    assert asked == [("squad", "train"), ("org/my.set_1", "test"), ("squad", "test")]
    assert chats[1].source == "org/my.set_1:test"
    with pytest.raises(UserError) as error:
        load_chats(["org/gone"])
    here = f"org/gone is not a file in {Path.cwd()} or in the checkout {REPOSITORY}"
    assert str(error.value) == f"{here}, nor a data set: Couldn't reach it"


def test_import_is_light() -> None:
    heavy = "{'datasets', 'transformers', 'torch'}"
    code = f"import sys, extract.prompts; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


# --- the prompt


QUESTION = [user("the question"), assistant("the answer"), user(f"and {FAMILY} now?")]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_is_what_apply_chat_template_gives(name: str, adds_bos: bool) -> None:
    renderer = make_renderer(name, adds_bos=adds_bos)
    wanted = renderer.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ids = renderer.prompt_ids(QUESTION)
    assert ids == wanted
    assert decode(renderer, ids) == renderer.render(QUESTION, generation_prompt=True)


@pytest.mark.parametrize(("name", "count"), [("bos", 1), ("llama3", 1), ("chatml", 0)])
def test_b8_bos_is_where_the_template_writes_it_and_nowhere_else(name: str, count: int) -> None:
    renderer = make_renderer(name, adds_bos=True)
    bos = renderer.tokenizer.bos_token_id
    assert bos in renderer.tokenizer.encode("x")  # the trap is set
    (row,) = masked(renderer, *QUESTION[:2])
    assert list(row.prompt_ids) == renderer.prompt_ids(QUESTION[:1])
    for ids in (row.input_ids, row.prompt_ids):
        assert ids.count(bos) == count == ids[:1].count(bos)


def test_b9_no_template() -> None:
    for template in (None, {"tool_use": CHATML}):
        with pytest.raises(UserError, match=r"has no chat template.*target\.chat_template_file"):
            # what a type checker refuses is what the test is about
            Renderer(make_tokenizer(template), enable_thinking=None)  # type: ignore[arg-type]


def test_enable_thinking_without_effect() -> None:
    with pytest.raises(UserError, match=r"target\.enable_thinking is false.*remove it"):
        make_renderer("chatml", enable_thinking=False)


def test_b16_hash_tells_template_and_thinking_apart() -> None:
    hashes = [make_renderer(name).template_hash for name in TEMPLATES]
    hashes += [make_renderer("qwen3", enable_thinking=on).template_hash for on in (True, False)]
    assert len(set(hashes)) == len(hashes)
    assert make_renderer("qwen3", enable_thinking=False).template_hash == hashes[-1]


def test_thinking_reaches_the_template() -> None:
    ask = [user("q")]
    off, on, unset = (make_renderer("qwen3", enable_thinking=t) for t in (False, True, None))
    block = "<think>\n\n</think>\n\n"
    assert (
        off.render(ask, generation_prompt=True) == unset.render(ask, generation_prompt=True) + block
    )
    assert on.prompt_ids(ask) == unset.prompt_ids(ask)


def test_a_template_that_refuses_a_chat() -> None:
    renderer = make_renderer("strict")
    with pytest.raises(UnmaskableChat) as error:
        renderer.prompt_ids([system("s"), user("q")])
    assert error.value.reason == "template: roles must alternate"
    assert refusal(renderer, user("q"), user("q"), assistant("a")) == error.value.reason
    broken = Renderer(make_tokenizer("{{ messages[0].content + 1 }}"), enable_thinking=None)
    with pytest.raises(UnmaskableChat, match=r"^template: "):
        broken.prompt_ids([user("q")])


# --- the turns


def test_user_turns() -> None:
    chat = chat_of(
        *[system("s"), user("1"), user("2"), assistant("x"), system("now"), user("3")],
        *[assistant("y")],
    )
    preamble, turns = user_turns(chat)
    assert preamble == [system("s")]
    assert turns == [[user("1")], [user("2")], [system("now"), user("3")]]
    assert user_turns(chat_of(user("q"))) == ([], [[user("q")]])


def test_user_turns_refuses_what_it_cannot_ask_again() -> None:
    calls = assistant("", tool_calls=[{"function": {"name": "f", "arguments": {}}}])
    for messages in ([user("q"), TOOL], [user("q"), calls, user("r")]):
        with pytest.raises(UnmaskableChat, match=r"^tool messages$"):
            user_turns(chat_of(*messages))
    with pytest.raises(UnmaskableChat, match=r"^system message at the end$"):
        user_turns(chat_of(user("q"), assistant("a"), system("s")))


def test_split_turns() -> None:
    renderer = make_renderer("chatml")
    messages = (system("s"), user("1"), user("2"), assistant("a"), user("3"))
    first, second = renderer.split_turns(chat_of(*messages))
    assert (first.index, first.messages, first.answer) == (0, messages[:3], messages[3])
    assert (second.index, second.messages, second.answer) == (1, messages, None)
    assert second.prompt_ids == renderer.prompt_ids(messages)
    (only,) = renderer.split_turns(chat_of(*messages[:4]))
    assert only == first


# --- the mask


ANSWERS = [
    "the answer is 42.",
    "x",
    f"{FAMILY} says 日本語 👍",
    "🇩🇪 flag at both ends 🇯🇵",
    "e\u0301 combining accent e\u0301",
    "\u05e9\u05dc\u05d5\u05dd right to left \u0645\u0631\u062d\u0628\u0627",
    "two\n\nparagraphs\n```python\nprint('x')\n```",
    "  spaces around  ",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_b1_b10_supervised_text_is_the_answer_and_its_stop(name: str, answer: str) -> None:
    renderer = make_renderer(name, enable_thinking=False if name == "qwen3" else None)
    (row,) = masked(renderer, user("the question"), assistant(answer))
    stop = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    text = supervised(renderer, row)
    assert text.endswith(stop)
    assert text.removesuffix(stop).strip() == answer.strip()
    assert row.answer_ids[-1] in stops(renderer)
    assert len(row.input_ids) == len(row.loss_mask)
    assert (row.id, row.chat_id, row.turn, row.stop_reason) == ("c#0", "c", 0, "stop")


@pytest.mark.parametrize("thought", ["", "hm", "a longer\n\nthought about the question " * 5])
@pytest.mark.parametrize("in_field", [True, False])
def test_b2_b3_reasoning_is_supervised(thought: str, in_field: bool) -> None:
    renderer = make_renderer("qwen3", enable_thinking=True)
    if in_field:
        answer = assistant("the answer", reasoning_content=thought)
    else:
        answer = assistant(f"<think>\n{thought}\n</think>\n\nthe answer")
    (row,) = masked(renderer, user("q"), answer)
    wanted = f"<think>\n{thought}\n</think>\n\nthe answer<|im_end|>"
    assert supervised(renderer, row) == wanted
    # B3: one render of the whole, tokenised once, up to the stop token.
    whole = renderer.encode(renderer.render([user("q"), answer], generation_prompt=False))
    assert whole[: len(row.input_ids)] == list(row.input_ids)
    assert decode(renderer, whole[len(row.input_ids) :]) == "\n"


def test_b3_reasoning_that_the_template_leaves_out() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        answer = assistant("the answer", **{name: "hm"})
        reason = refusal(make_renderer("chatml"), user("q"), answer)
        assert reason == "rendered answer differs from the file's"


def test_b3_reasoning_that_the_template_changes() -> None:
    template = QWEN3.replace("set thought = m.reasoning_content or ''", "set thought = 'hm'")
    renderer = Renderer(make_tokenizer(template), enable_thinking=None)
    assert masked(renderer, user("q"), assistant("the answer", reasoning_content="hm"))
    reason = refusal(renderer, user("q"), assistant("the answer", reasoning_content="so"))
    assert reason == "rendered answer differs from the file's"


def test_reasoning_may_start_in_the_generation_prompt() -> None:
    template = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    renderer = Renderer(make_tokenizer(template), enable_thinking=None)
    (row,) = masked(renderer, user("q"), assistant("<think>\nhm\n</think>\n\nthe answer"))
    assert supervised(renderer, row) == "hm\n</think>\n\nthe answer<|im_end|>"
    changed = "template changes the prompt once it is answered"
    assert refusal(renderer, user("q"), assistant("the answer")) == changed


def test_b5_every_turn_has_the_prefix_it_was_generated_from() -> None:
    renderer = make_renderer("qwen3", enable_thinking=True)
    messages: list[dict[str, Any]] = []
    for k in range(3):
        messages += [user(f"question {k}"), assistant(f"said {k}", reasoning_content=f"hm {k}")]
    rows = masked(renderer, *messages)
    assert [row.turn for row in rows] == [0, 1, 2]
    for k, row in enumerate(rows):
        assert list(row.prompt_ids) == renderer.prompt_ids(messages[: 2 * k + 1])
        assert "hm" not in decode(renderer, row.prompt_ids)
        assert supervised(renderer, row) == f"<think>\nhm {k}\n</think>\n\nsaid {k}<|im_end|>"
    samples = merge_turns(rows)  # each turn rewrites the one before it
    assert [sample.input_ids for sample in samples] == [row.input_ids for row in rows]


def test_b6_an_inserted_think_block_is_context() -> None:
    renderer = make_renderer("qwen3", enable_thinking=False)
    for answer in (assistant("said"), assistant("said", reasoning_content="")):
        (row,) = masked(renderer, user("q"), answer)
        assert list(row.prompt_ids) == renderer.prompt_ids([user("q")])
        assert decode(renderer, row.prompt_ids).endswith("<think>\n\n</think>\n\n")
        assert supervised(renderer, row) == "said<|im_end|>"


def test_b6_a_think_block_that_nobody_wrote_is_refused() -> None:
    reason = refusal(make_renderer("qwen3"), user("q"), assistant("said"))
    assert reason == "template adds a think block (target.enable_thinking: false?)"


def test_reasoning_is_refused_where_thinking_is_off() -> None:
    renderer = make_renderer("qwen3", enable_thinking=False)
    reason = refusal(renderer, user("q"), assistant("said", reasoning_content="hm"))
    assert reason == "template changes the prompt once it is answered"


@pytest.mark.parametrize(
    ("reason", "answer"),
    [
        ("empty answer", ""),
        ("empty answer", " \n"),
        ("rendered answer differs from the file's", "one<|im_end|>two"),
        ("rendered answer differs from the file's", "<|im_end|>"),
    ],
)
def test_answers_that_cannot_be_learned_from(reason: str, answer: str) -> None:
    renderer = make_renderer("chatml")
    assert refusal(renderer, user("q"), assistant(answer)) == reason
    assert refusal(renderer, user("q"), assistant("fine"), user("r"), assistant(answer)) == reason


def test_reasoning_alone_is_an_answer() -> None:
    (row,) = masked(make_renderer("qwen3"), user("q"), assistant("", reasoning_content="hm"))
    assert supervised(make_renderer("qwen3"), row) == "<think>\nhm\n</think>\n\n<|im_end|>"


def test_no_stop_token() -> None:
    renderer = make_renderer("chatml")
    chat = chat_of(user("q"), assistant("a"))
    with pytest.raises(UnmaskableChat, match=r"^no stop token after the answer$"):
        mask_answers(renderer, chat, {id_of(renderer, "<|eot_id|>")})


def test_a_token_that_spans_prompt_and_answer() -> None:
    merged = "a token spans prompt and answer"
    renderer = make_renderer("chatml")
    assert refusal(renderer, user("q"), assistant("\n\nthe answer")) == merged
    # GPT-2's cuts make one token of the line ends at the prompt's end, and two before an answer.
    renderer = Renderer(make_tokenizer(LLAMA3, gpt2=True), enable_thinking=None)
    assert refusal(renderer, user("q"), assistant("the answer")) == merged


def test_b10_a_tokenizer_that_loses_text() -> None:
    renderer = Renderer(make_tokenizer(CHATML, lower=True), enable_thinking=None)
    assert masked(renderer, user("Q"), assistant("lower"))
    differs = "rendered answer differs from the file's"
    assert refusal(renderer, user("Q"), assistant("Upper")) == differs


def test_b10_unicode_forms_are_one_text() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # as Qwen's
    renderer = Renderer(tokenizer, enable_thinking=None)
    (row,) = masked(renderer, user("q"), assistant("cafe\u0301"))
    assert supervised(renderer, row) == "caf\u00e9<|im_end|>"


def test_unanswered_ends_are_left_out() -> None:
    renderer = make_renderer("chatml")
    assert len(masked(renderer, user("q"), assistant("a"), user("r"))) == 1
    assert refusal(renderer, user("q")) == "no answer in the file"


# --- FX-C: the twelve rows


def fx_c() -> list[dict[str, Any]]:
    three = [[user(f"q{k}"), assistant(f"the answer {k}")] for k in range(3)]
    rows = {
        "single": [user("q"), assistant("the answer")],
        "three-turns": [message for pair in three for message in pair],
        "thinking": [user("think"), assistant("so", reasoning_content="hm")],
        "emoji": [user("emoji"), assistant(f"{FAMILY} 日本語 👍")],
        "empty-assistant": [user("silence"), assistant("")],
        "user-last": [user("a"), assistant("b"), user("c")],
        "system-only": [system("s")],
        "no-assistant": [user("alone")],
        "over-long": [user("long"), assistant("the answer " * 1000)],
        "one-token": [user("short"), assistant("x")],
        "tool": [user("tool"), TOOL, assistant("done")],
        "duplicate": [user("q"), assistant("the answer")],
    }
    return [{"id": name, "messages": messages} for name, messages in rows.items()]


def reason_to_drop(use: Callable[[], object]) -> str | None:
    try:
        use()
    except UnmaskableChat as error:
        return str(error.reason)
    return None


@pytest.mark.parametrize(
    ("name", "thinking_row"),
    [
        ("chatml", "rendered answer differs from the file's"),  # never shows reasoning
        ("qwen3", "template changes the prompt once it is answered"),  # thinking is off here
    ],
)
def test_fx_c(tmp_path: Path, name: str, thinking_row: str) -> None:
    renderer = make_renderer(name, enable_thinking=False if name == "qwen3" else None)
    chats, report = load_chats([write(tmp_path / "fx.jsonl", fx_c())])
    rows: list[Row] = []
    for chat in chats:
        try:
            rows += mask_answers(renderer, chat, stops(renderer))
        except UnmaskableChat as error:
            report.add(error.reason, chat.id)
    assert report.dropped == {
        "empty": ["system-only"],
        "duplicate": ["duplicate"],
        thinking_row: ["thinking"],
        "empty answer": ["empty-assistant"],
        "no answer in the file": ["no-assistant"],
    }
    assert (report.loaded, report.kept) == (12, 7)
    assert {row.id: supervised(renderer, row).removesuffix("<|im_end|>") for row in rows} == {
        "single#0": "the answer",
        "three-turns#0": "the answer 0",
        "three-turns#1": "the answer 1",
        "three-turns#2": "the answer 2",
        "emoji#0": f"{FAMILY} 日本語 👍",
        "user-last#0": "b",
        "over-long#0": "the answer " * 1000,
        "one-token#0": "x",
        "tool#0": "done",
    }
    assert [len(row.answer_ids) for row in rows if row.chat_id == "one-token"] == [2]


def test_fx_c_regenerated(tmp_path: Path) -> None:
    chats, _ = load_chats([write(tmp_path / "fx.jsonl", fx_c())])
    (tool,) = [chat for chat in chats if chat.id == "tool"]
    assert reason_to_drop(lambda: user_turns(tool)) == "tool messages"
    turns = {chat.id: len(user_turns(chat)[1]) for chat in chats if chat is not tool}
    assert turns.pop("three-turns") == 3
    assert turns.pop("user-last") == 2
    assert len(turns) == 7
    assert set(turns.values()) == {1}


# --- properties


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDY = st.builds(str.__add__, st.sampled_from("aZ9é語"), TEXT)
few = settings(max_examples=60, deadline=None)


def conversation(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [m for question, answer in turns for m in (user(question), assistant(answer))]


@few
@given(
    st.sampled_from(["chatml", "bos", "llama3"]),
    st.lists(st.tuples(TEXT, WORDY), min_size=1, max_size=3),
)
def test_random_chats_round_trip(name: str, turns: list[tuple[str, str]]) -> None:
    renderer = make_renderer(name)
    messages = conversation(turns)
    rows = masked(renderer, *messages)
    assert len(rows) == len(turns)
    for k, row in enumerate(rows):
        assert list(row.prompt_ids) == renderer.prompt_ids(messages[: 2 * k + 1])
        whole = renderer.render(messages[: 2 * k + 2], generation_prompt=False)
        assert renderer.encode(whole)[: len(row.input_ids)] == list(row.input_ids)
        assert decode(renderer, row.answer_ids[:-1]).strip() == turns[k][1].strip()
        assert [i in stops(renderer) for i in row.answer_ids[-2:]] == [False, True]
    # These templates only ever append, so a chat is one sample whatever its length.
    (sample,) = merge_turns(rows)
    text = "".join(decode(renderer, row.answer_ids) for row in rows)
    assert supervised(renderer, sample) == text


@few
@given(st.sampled_from(["chatml", "llama3", "qwen3"]), TEXT, TEXT)
def test_random_answers_are_exact_or_refused(name: str, question: str, answer: str) -> None:
    renderer = make_renderer(name, enable_thinking=False if name == "qwen3" else None)
    reason = reason_to_drop(lambda: masked(renderer, user(question), assistant(answer)))
    if reason is None:
        (row,) = masked(renderer, user(question), assistant(answer))
        assert decode(renderer, row.answer_ids[:-1]).strip() == answer.strip()
    else:  # only space at the start can do that
        assert not answer[:1].strip()
        assert reason in ("empty answer", "a token spans prompt and answer")


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=3)


@st.composite
def any_rows(draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[Row]:
    """Rows that continue the row before them, or nearly, or not at all."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(IDS)
        if rows and draw(st.booleans()):
            prompt = list(rows[-1].input_ids) + prompt
        if rows and draw(st.integers(0, 3)) == 0:
            prompt = list(rows[-1].input_ids[:-1]) or prompt
        chat_id, turn = draw(st.sampled_from("ab")), len(rows)
        rows.append(Row.of(f"{chat_id}#{turn}", chat_id, turn, prompt, draw(IDS), "stop"))
    return rows


def slow_merge(rows: list[Row]) -> list[list[Row]]:
    groups = [[rows[0]]]
    for row in rows[1:]:
        before = groups[-1][-1].prompt_ids + groups[-1][-1].answer_ids
        continues = len(row.prompt_ids) >= len(before)
        for a, b in zip(row.prompt_ids, before, strict=False):
            continues = continues and a == b
        if continues and row.chat_id == groups[-1][-1].chat_id:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


@settings(max_examples=150, deadline=None)
@given(any_rows())
def test_merged_samples_hold_every_row_with_its_own_prefix(rows: list[Row]) -> None:
    samples = merge_turns(rows)
    groups = slow_merge(rows)
    assert [sample.id for sample in samples] == [group[-1].id for group in groups]
    for sample, group in zip(samples, groups, strict=True):
        wanted = [0] * len(sample.input_ids)
        for row in group:
            start, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.answer_ids)
            assert sample.input_ids[:end] == row.prompt_ids + row.answer_ids
            wanted[start:end] = [1] * (end - start)
        assert list(sample.loss_mask) == wanted
        assert sample.input_ids == group[-1].input_ids


def test_nothing_to_merge() -> None:
    assert merge_turns([]) == []


def test_merging_needs_the_same_chat() -> None:
    def second(chat: str) -> Row:
        return Row.of(f"{chat}#1", chat, 1, [1, 2, 3], [4], "stop")

    first = Row.of("a#0", "a", 0, [1], [2], "stop")
    assert merge_turns([first, second("a")]) == [MaskedSample.of("a#1", [1, 2, 3, 4], [0, 1, 0, 1])]
    assert len(merge_turns([first, second("b")])) == 2
