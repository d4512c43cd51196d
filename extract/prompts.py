"""Chats to token ids: read prompt files, render with the target's template, mask the answers.

The rules, for every template:
- A chat is rendered as a whole and tokenised once; BOS is where the template writes it.
- One row per assistant turn, after the prompt that the target is given at that turn: a template that strips the
  reasoning of earlier turns strips it here too.
- What the generation prompt holds (an empty think block, say) is context; what follows it, up to and with the first
  stop token, is supervised.
- An answer whose supervised tokens do not decode to the file's text is refused, never repaired.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jinja2 import TemplateError

from configs.load import REPOSITORY, UserError, first_line, resolve_input
from extract.benchmarks import BENCHMARKS, find, sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Ids: TypeAlias = "array[int]"  # four bytes a token; in a list one takes ten times that

FILE_KINDS = (".jsonl", ".json", ".parquet")
SHAPES = ("messages", "conversations", "turns", "prompt", "question", "instruction")
TEXT_SHAPES = SHAPES[3:]
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MALFORMED = "malformed row"


class UnmaskableChat(Exception):  # noqa: N818  (it is the chat that is wrong)
    """A chat that cannot be used. `reason` is a short name to count it by."""

    reason = property(str)


@dataclass(frozen=True)
class Chat:
    """A chat as its file has it, in OpenAI's shape; every content is a text."""

    id: str
    messages: tuple[Message, ...]
    source: str


@dataclass
class Report:
    """The ids of the chats that were read, and those dropped, by reason. Later stages add theirs."""

    ids: set[str] = field(default_factory=set)
    dropped: dict[str, list[str]] = field(default_factory=dict)

    @property
    def loaded(self) -> int:
        return len(self.ids)

    @property
    def kept(self) -> int:  # a row's id in `dropped` leaves its chat counted
        return len(self.ids.difference(*self.dropped.values()))

    def add(self, reason: str, chat_id: str) -> None:
        self.dropped.setdefault(reason, []).append(chat_id)

    def lines(self) -> list[str]:
        lines = [f"{self.loaded} chats read, {self.kept} kept"]
        for reason, ids in sorted(self.dropped.items(), key=lambda item: -len(item[1])):
            more = ", ..." * (len(ids) > 3)
            lines.append(f"  dropped {len(ids)}: {reason} ({', '.join(ids[:3])}{more})")
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded, "kept": self.kept, "dropped": self.dropped}


def load_chats(
    names: Sequence[str], *, max_samples: int | None = None, config_file: Path | None = None
) -> tuple[list[Chat], Report]:
    """Read chats from files (JSONL, JSON list, Parquet), benchmarks, and hub data sets (NAME:SPLIT, or train).

    A row holds "messages" (OpenAI), "conversations" (ShareGPT), "turns" (the user's texts), or one text in "prompt",
    "question" or "instruction" (+ "input"); the first that it has counts. "id" is optional. Unusable rows are dropped
    and reported; reading ends with the max_samples-th chat. Raises UserError for a source that is missing, a folder,
    unreadable or without a usable chat, and for two rows with the same id.
    """
    sources = [(name, *_open(name, config_file)) for name in names]
    chats, report = list[Chat](), Report()
    places, asked = dict[str, str](), set[bytes]()
    for name, stem, rows in sources:
        kept_before, reasons = len(chats), Counter[str]()
        for number, row in rows:
            given = row.get("id") if isinstance(row, dict) else None
            chat_id = f"{stem}-{number}" if given is None else str(given)
            chat_id = chat_id.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair
            place = f"row {number} of {name}"
            if (other := places.setdefault(chat_id, place)) is not place:
                raise UserError(f"{place} and {other} have the same id {chat_id!r}; change one")
            report.ids.add(chat_id)
            try:
                messages = _messages(row)
                question = _question(messages)
                if question in asked:
                    raise UnmaskableChat("duplicate")
            except UnmaskableChat as error:
                report.add(error.reason, chat_id)
                reasons[error.reason] += 1
                continue
            asked.add(question)
            chats.append(Chat(chat_id, messages, name))
            if len(chats) == max_samples:
                return chats, report
        if len(chats) == kept_before:
            why = (
                ", ".join(f"{n} x {reason}" for reason, n in reasons.most_common()) or "it is empty"
            )
            wanted = ", ".join(SHAPES)
            raise UserError(f"{name} has no usable chat: {why}; a row needs one of {wanted}")
    return chats, report


def _open(name: str, config_file: Path | None) -> tuple[str, Iterator[tuple[int, Any]]]:
    """Return the stem for a source's ids and its rows, numbered from 1 (in JSONL, the lines)."""
    path = resolve_input(name, config_file)
    dataset, _, split = name.partition(":")
    kind = (path or Path(dataset)).suffix.lower()
    if name in BENCHMARKS and not (path and path.is_file()):
        file = find(name)
        return name, iter(sample([*_read_json(file, str(file))], BENCHMARKS[name].count))
    if path is None:
        missing = f"{name} is not a file in {Path.cwd()} or in the checkout {REPOSITORY}"
        if kind in FILE_KINDS or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", dataset):
            raise UserError(missing)
        stem = dataset.rpartition("/")[2] + f"-{split}" * bool(split)
        return stem, _read_dataset(f"{missing}, nor a data set", dataset, split=split or "train")
    if path.is_dir() or kind not in FILE_KINDS:
        what = "a folder" if path.is_dir() else "of another kind"
        raise UserError(f"{name} is {what}; name a {', '.join(FILE_KINDS)} file")
    if kind == ".parquet":  # streamed from the file; otherwise datasets makes a copy in its cache
        options = {"data_files": glob.escape(str(path)), "split": "train", "streaming": True}
        return path.stem, _read_dataset(f"{name} cannot be read", "parquet", **options)
    return path.stem, _read_json(path, name)


def _read_json(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    by_line, number = path.suffix.lower() == ".jsonl", 1
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file if by_line else [file.read()], 1):
                if text.strip():
                    data = json.loads(text.rstrip())
                    rows = data if isinstance(data, list) else [data]
                    yield from [(number, data)] if by_line else enumerate(rows, 1)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{number + error.lineno - 1}: not JSON: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{name} cannot be read: {error}") from None


def _read_dataset(failure: str, path: str, **options: Any) -> Iterator[tuple[int, Any]]:
    import datasets  # slow

    try:
        yield from enumerate(datasets.load_dataset(path, **options), 1)
    except Exception as error:  # its own, its parsers' and its network's have no base in common
        raise UserError(f"{failure}: {first_line(error)}") from error


def _messages(row: Any) -> tuple[Message, ...]:
    """Return a row's messages in OpenAI's shape. Raises UnmaskableChat if it cannot be used."""
    row = row if isinstance(row, dict) else {}
    shape = next((s for s in SHAPES if row.get(s) is not None), None)
    items = row[shape] if shape else None
    if shape == "instruction" and row.get("input"):
        items = [{"type": "text", "text": text} for text in (items, "\n\n", row["input"])]
    if shape in TEXT_SHAPES:
        items = [items]
    if not isinstance(items, list):
        raise UnmaskableChat(MALFORMED)
    if shape not in ("messages", "conversations"):
        items = [{"role": "user", "content": text} for text in items]
    messages = tuple(_message(item) for item in items)

    first = next((m["role"] for m in messages if m["role"] != "system"), "user")
    if first != "user":
        raise UnmaskableChat(f"{first}-first")
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise UnmaskableChat("empty")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError):  # half a surrogate pair; a date, from Parquet
        raise UnmaskableChat("not Unicode text") from None
    return messages


def _message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise UnmaskableChat(MALFORMED)
    if item.get("role") is None and "from" in item:
        role = SHAREGPT_ROLES.get(str(item["from"]), item["from"])
        item = {"role": role, "content": item.get("value")}
    if item.get("role") not in ROLES:
        raise UnmaskableChat("unknown role")
    content = item.get("content")
    if content is None:
        raise UnmaskableChat("null content")
    if isinstance(content, list):
        texts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        if [type(text) for text in texts] != [str] * len(content):
            raise UnmaskableChat("non-text content")
        content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise UnmaskableChat(MALFORMED)
    # None is how Parquet says that a message lacks a key which another message has.
    return {key: value for key, value in item.items() if value is not None} | {"content": content}


def _question(messages: Sequence[Message]) -> bytes:
    """A digest of what is asked: the system's and user's texts, whatever their spacing."""
    texts = [(m["role"], m["content"]) for m in messages if m["role"] in ("system", "user")]
    asked = [(role, unicodedata.normalize("NFC", text).split()) for role, text in texts]
    return hashlib.sha256(json.dumps(asked).encode()).digest()


def user_turns(chat: Chat) -> tuple[list[Message], list[list[Message]]]:
    """Split a chat for regeneration: the messages before the first user turn, then the user turns.

    Each user message ends a turn; a system message between turns belongs to the next. The file's answers are left out.
    Raises UnmaskableChat for tool calls and results, which only make sense with the answers they came with, and for a
    system message at the end.
    """
    first = next(i for i, m in enumerate(chat.messages) if m["role"] == "user")
    turns: list[list[Message]] = [[]]
    for message in chat.messages[first:]:
        if message["role"] == "tool" or message.get("tool_calls"):
            raise UnmaskableChat("tool messages")
        if message["role"] != "assistant":
            turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    if turns.pop():
        raise UnmaskableChat("system message at the end")
    return list(chat.messages[:first]), turns


@dataclass(frozen=True)
class Turn:
    """A place in a chat where the assistant speaks; `answer` is None where the file ends."""

    index: int
    messages: tuple[Message, ...]
    prompt_ids: list[int]
    answer: Message | None


class Renderer:
    """Makes the prompt in regenerate, extract, eval and the served client, with one template.

    Raises UserError for a tokenizer without a template, and for an enable_thinking that it never
    reads. The methods raise UnmaskableChat for a chat that the template refuses.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, enable_thinking: bool | None) -> None:
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        whose = f"the tokenizer {tokenizer.name_or_path}".rstrip()
        try:
            self.template = tokenizer.get_chat_template()
        except ValueError:  # none, or several without a default
            fix = "name a Jinja file in target.chat_template_file"
            raise UserError(f"{whose} has no chat template; {fix}") from None
        if enable_thinking is not None and "enable_thinking" not in self.template:
            given = f"target.enable_thinking is {str(enable_thinking).lower()}"
            raise UserError(f"{given}, but the chat template of {whose} never reads it; remove it")
        hashed = json.dumps([self.template, enable_thinking]).encode()
        self.template_hash = hashlib.sha256(hashed).hexdigest()

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        settings: dict[str, Any] = {"add_generation_prompt": generation_prompt, **self.options}
        try:
            return str(self.tokenizer.apply_chat_template([*messages], tokenize=False, **settings))
        except (TemplateError, TypeError, ValueError) as error:  # a template is a program
            raise UnmaskableChat(f"template: {error}".partition("\n")[0]) from None

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that the target is given to answer these messages."""
        return self.encode(self.render(messages, generation_prompt=True))

    def split_turns(self, chat: Chat) -> list[Turn]:
        """Return a turn per answer in the file, and one more if the chat ends without an answer."""
        turns: list[Turn] = []
        for end, message in enumerate((*chat.messages, None)):
            before = chat.messages[:end]
            if message["role"] == "assistant" if message else before[-1]["role"] != "assistant":
                turns.append(Turn(len(turns), before, self.prompt_ids(before), message))
        return turns


@dataclass(frozen=True)
class Row:
    """One answer to learn from. `id` is the chat's id, '#' and the turn."""

    id: str
    chat_id: str
    turn: int
    prompt_ids: Ids
    answer_ids: Ids
    stop_reason: Literal["stop", "length"]

    @classmethod
    def of(
        cls,
        id: str,
        chat_id: str,
        turn: int,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        stop_reason: Literal["stop", "length"],
    ) -> Row:
        return cls(id, chat_id, turn, array("i", prompt_ids), array("i", answer_ids), stop_reason)

    @property
    def input_ids(self) -> Ids:
        return self.prompt_ids + self.answer_ids

    @property
    def loss_mask(self) -> Ids:
        return array("b", bytes(len(self.prompt_ids)) + b"\1" * len(self.answer_ids))

    def to_json(self) -> dict[str, object]:
        fields = {**vars(self)}
        return fields | {k: fields[k].tolist() for k in ("prompt_ids", "answer_ids")}


def mask_answers(renderer: Renderer, chat: Chat, stop_ids: set[int]) -> list[Row]:
    """Return a row for each answer that the file gives. Raises UnmaskableChat if one of them is empty, cannot be told
    from its prompt, does not end in a stop token, or does not decode to the file's text."""
    rows = []
    for turn in renderer.split_turns(chat):
        if turn.answer is not None:
            ids = _answer_ids(renderer, turn, turn.answer, stop_ids)
            name = f"{chat.id}#{turn.index}"
            rows.append(Row.of(name, chat.id, turn.index, turn.prompt_ids, ids, "stop"))
    if not rows:
        raise UnmaskableChat("no answer in the file")
    return rows


def _answer_ids(renderer: Renderer, turn: Turn, answer: Message, stop_ids: set[int]) -> list[int]:
    content = answer["content"]
    reasoning = next((str(answer[name]) for name in REASONING_FIELDS if name in answer), None)
    if not content.strip() and not reasoning:
        raise UnmaskableChat("empty answer")
    whole = renderer.render((*turn.messages, answer), generation_prompt=False)
    ids, start = renderer.encode(whole), len(turn.prompt_ids)
    if ids[:start] != turn.prompt_ids:
        merged = whole.startswith(renderer.render(turn.messages, generation_prompt=True))
        why = "a token spans prompt and answer", "template changes the prompt once it is answered"
        raise UnmaskableChat(why[0] if merged else why[1])
    stop = next((i for i in range(start, len(ids)) if ids[i] in stop_ids), None)
    if stop is None:
        raise UnmaskableChat("no stop token after the answer")
    text = str(renderer.tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False))
    # Reasoning that is given must be there; a think block, even an empty one, only if it is given.
    wanted = [] if reasoning else [_parts(content)]
    if reasoning is not None:
        wanted.append(_parts(f"{reasoning}</think>{content}"))
    if _parts(text) in wanted:
        return ids[start : stop + 1]
    if _parts(text) == _parts(f"</think>{content}"):
        raise UnmaskableChat("template adds a think block (target.enable_thinking: false?)")
    raise UnmaskableChat("rendered answer differs from the file's")


def _parts(text: str) -> tuple[str, str, str]:
    """Reasoning, tag, answer, to compare; the opening tag may be in the generation prompt."""
    thought, tag, said = unicodedata.normalize("NFC", text).rpartition("</think>")
    return thought.strip().removeprefix("<think>").strip(), tag, said.strip()


@dataclass(frozen=True)
class MaskedSample:
    """Token ids, and 1 for each that is learned from, else 0."""

    id: str
    input_ids: Ids
    loss_mask: Ids  # of bytes

    @classmethod
    def of(cls, id: str, input_ids: Sequence[int], loss_mask: Sequence[int]) -> MaskedSample:
        return cls(id, array("i", input_ids), array("b", loss_mask))


def merge_turns(rows: Sequence[Row]) -> list[MaskedSample]:
    """Join consecutive rows of a chat where one is exactly the start of the next one's prompt.

    Every supervised token keeps its row's exact prefix. A sample has its last row's id and length.
    """
    samples: list[MaskedSample] = []
    for row, before in zip(rows, [None, *rows], strict=False):
        mask = row.loss_mask
        start = before.input_ids if before and before.chat_id == row.chat_id else None
        if start and row.prompt_ids[: len(start)] == start:
            mask[: len(start)] = samples.pop().loss_mask
        samples.append(MaskedSample(row.id, row.input_ids, mask))
    return samples
