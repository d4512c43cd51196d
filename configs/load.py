"""Read an experiment file: YAML plus --set, checked in one go, every mistake reported at once.

    config = load_config("configs/demo.yaml", ["train.epochs=2"])

YAML 1.1 has traps that change a value in silence (`no` is false, `010` is 8, `1:30` is 90, `6e-4`
is text). This reader knows what JSON knows: text, numbers, true/false, null, lists and mappings.
Whatever only resembles one of them stays text for the schema to judge. No inheritance, no secrets.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.credentials import hide, holds_credential
from configs.schema import Config

REPOSITORY = Path(__file__).resolve().parent.parent


DISK_FIXES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EFBIG: "raise `ulimit -f`",
    errno.EROFS: "make it writable, or choose another run_dir,",
    errno.EIO: "the disk failed: look at the kernel's log, copy run_dir to another one",
}


class UserError(Exception):
    """A mistake that the user can mend. The message is for the terminal and names the fix."""


def first_line(error: BaseException) -> str:
    """What a library's error says, short enough for a sentence of ours; its kind where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def main_guard(main: Callable[[list[str] | None], int | None]) -> int:
    """Run a command's main and return its exit code: `sys.exit(main_guard(main))`.

    UserError and what DISK_FIXES has (a full, read-only or failing disk) become `error: ...` and 2, Ctrl-C 130; the
    rest are bugs and raise.
    """
    again = "run the same command again"
    try:
        return main(None) or 0
    except UserError as error:
        print(hide(f"error: {error}"), file=sys.stderr)
    except KeyboardInterrupt:
        print(f"interrupted; {again} (with --resume where it trains) to continue", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in DISK_FIXES:
            raise
        how = "at" if error.errno == errno.EIO else "while writing"
        where = f" {how} {error.filename}" if error.filename else ""
        fix = DISK_FIXES[error.errno]
        print(f"error: {error.strerror}{where}; {fix} and {again}", file=sys.stderr)
    return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the three arguments that every command takes."""
    parser.add_argument("--config", metavar="FILE", required=True, help="the experiment file")
    text = "replace one value of the file; repeatable, the last one wins"
    parser.add_argument(
        "--set", dest="overrides", metavar="a.b=value", action="append", default=[], help=text
    )
    parser.add_argument("--print-config", action="store_true", help="print all values and stop")


def config_from_args(args: argparse.Namespace) -> Config:
    """Load what add_arguments parsed, as load_config does; --print-config prints it and exits."""
    config = load_config(args.config, args.overrides)
    if args.print_config:
        print(dump_config(config), end="")
        raise SystemExit(0)
    return config


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Return the checked config of a file, with `a.b=value` overrides applied on top.

    Raises UserError: one sentence for what is not readable YAML, else all mistakes, a line each.
    """
    mistakes: list[str] = []
    data = _read_file(Path(path), mistakes)
    for text in overrides:
        try:
            _override(data, text, mistakes)
        except ValueError as error:
            mistakes.append(f"--set {text}: {error}")
    try:
        # JSON mode: strict types, but a list fills a tuple field and an int a float field.
        config = Config.model_validate_json(json.dumps(data))
    except ValidationError as error:
        mistakes += [_explain(detail, overrides) for detail in error.errors(include_url=False)]
    else:
        sections = {key[:-1] for key in _keys(Config)}
        mistakes += [
            f"{'.'.join(key)} holds a credential, and configs are copied into run folders, wandb and model cards; keep "
            "it in the environment (HF_TOKEN, WANDB_API_KEY)"
            for key in _keys(Config)
            if key not in sections and holds_credential(str(reduce(getattr, key, config)))
        ]
    if mistakes:
        head = f"{path} has {len(mistakes)} mistake{'s' * (len(mistakes) > 1)}:"
        raise UserError("\n  ".join([head, *mistakes]))
    return config


def dump_config(config: Config) -> str:
    """Return YAML of the resolved values, which load_config reads back as an equal config.

    Left out: defaults that the schema refuses to see written down, as they have no effect here.
    """
    dumped = config.model_dump(mode="json")

    def tree(paths: Iterable[tuple[str, ...]]) -> dict[str, Any]:
        root: dict[str, Any] = {}
        for *sections, name in paths:
            place = reduce(lambda at, section: at.setdefault(section, {}), sections, root)
            place[name] = reduce(operator.getitem, sections, dumped)[name]
        return root

    keys = _keys(type(config))
    leaves = [p for p in keys if not isinstance(reduce(getattr, p, config), BaseModel)]
    kept = {p for p in leaves if p[-1] in reduce(getattr, p[:-1], config).model_fields_set}
    for path in leaves:
        with contextlib.suppress(ValidationError):
            trial = tree(p for p in leaves if p in kept or p == path)
            type(config).model_validate_json(json.dumps(trial))
            kept.add(path)
    data = tree(p for p in leaves if p in kept)
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6))


def resolve_input(path: str, config_file: Path | None) -> Path | None:
    """Find an input that a config names: in the current directory, else in a checkout.

    That is the parent of the `configs/` folder around config_file, if any, or this code's checkout.
    None when the path is in none of them; it may be the name of a data set.
    """
    roots = [Path(), REPOSITORY]
    if config_file is not None:
        around = [p.parent for p in config_file.resolve().parents if p.name == "configs"]
        roots[1:1] = around[:1]
    found = (p for p in [root / path for root in roots] if os.path.exists(p))  # noqa: PTH110
    return next(found, None)  # Path.exists would raise on a name that is too long


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (forgets those of YAML 1.1)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs give it no types
        self.depth += 1
        if isinstance(event, yaml.AliasEvent) or event.tag is not None or self.depth > 20:
            problem = "aliases, tags (*name, !name) and deep nesting are not supported"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes all text that this reader or a YAML 1.1 reader would take for something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'  # the other styles lose U+0085, for one
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)


_FLOAT = r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
for _name, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]{0,40})", list("-+0123456789")),
    ("float", rf"{_FLOAT}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
]:
    for _class in (_Loader, _Dumper):
        _tag, _regexp = f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z")
        _class.add_implicit_resolver(_tag, _regexp, _first)


def _read_file(path: Path, mistakes: list[str]) -> dict[str, Any]:
    try:
        data = _parse(path.read_text(encoding="utf-8"), "", mistakes)
    except (OSError, ValueError) as error:  # ValueError: not YAML, not UTF-8, a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the config file {path}: {why}") from None
    if not isinstance(data, dict):
        raise UserError(f"the config file {path} must hold sections of keys, not {_given(data)}")
    return data


def _override(data: dict[str, Any], text: str, mistakes: list[str]) -> None:
    """Set one `a.b=value` in data. Raises ValueError with the reason if that cannot be done."""
    key, equals, raw = text.partition("=")
    *sections, name = parts = key.split(".")
    if not equals or not all(parts):
        raise ValueError("write it as --set section.key=value")
    value = _parse(raw, key, mistakes)
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise ValueError(f"{section} is not a section")
    data[name] = value


def _parse(text: str, where: str, mistakes: list[str]) -> Any:
    """Turn YAML into what JSON can say; duplicate keys go to mistakes.

    Raises ValueError with line and reason for what is not YAML or is more than is read here.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, where, mistakes)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem}") from None
    except (yaml.YAMLError, OverflowError) as error:  # a control character, "\UFFFFFFFF"
        raise ValueError(str(error).partition("\n")[0]) from None


def _value(loader: _Loader, node: yaml.Node, where: str, mistakes: list[str]) -> Any:
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_value(loader, item, f"{where}[{i}]", mistakes) for i, item in items]
    if isinstance(node, yaml.ScalarNode):
        node.value.encode()  # half a surrogate pair ("\ud800") is a ValueError here, not later
        return loader.construct_object(node)
    data: dict[str, Any] = {}
    lines: dict[str, list[str]] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"line {key_node.start_mark.line + 1}: a key must be a word")
        key_node.value.encode()
        key = f"{where}.{key_node.value}".removeprefix(".")
        lines.setdefault(key, []).append(str(key_node.start_mark.line + 1))
        data[key_node.value] = _value(loader, value_node, key, mistakes)
    for key, at in lines.items():
        if len(at) > 1:
            mistakes.append(f"{key}: given {len(at)} times, on lines {' and '.join(at)}")
    return data


def _explain(detail: ErrorDetails, overrides: Sequence[str]) -> str:
    """One line for one of pydantic's mistakes."""
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"])[1:]
    match detail["type"]:
        case "extra_forbidden":
            line = f"{where}: unknown key{_suggestion(where)}"
        case "missing":
            line = f"{where}: missing"
        case "value_error":  # from the schema's own validators, which tend to name their keys
            line = str(detail["ctx"]["error"])
            line = line if line.startswith(where) else f"{where}: {line}"
        case kind:
            wanted = _WANTED.get(kind) or re.sub(r"^\w+ should", "must", detail["msg"])
            line = f"{where}: {wanted}, was given {_given(detail['input'])}"
            if detail["input"] in ("None", "none"):
                line += " (null leaves a key unset)"
    keys = [text.partition("=")[0] + "." for text in overrides]
    return line + " (from --set)" * any(f"{where}.".startswith(key) for key in keys)


_WANTED = {  # where pydantic's own words are not those of a YAML file
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "model_type": "must be a section of keys",
    "tuple_type": "must be a list",
}


def _given(value: Any) -> str:
    return ("the text " * isinstance(value, str)) + json.dumps(value, ensure_ascii=False)[:60]


def _suggestion(where: str) -> str:
    """What the author of an unknown key may have meant."""
    section, _, name = where.rpartition(".")
    known = {".".join(path): path for path in _keys(Config)}
    here = {path[-1]: key for key, path in known.items() if ".".join(path[:-1]) == section}
    if where in known:  # a dotted key at the top level
        return "; write a section and put the key into it"
    elsewhere = {path[-1]: key for key, path in known.items()}
    if name in elsewhere:
        return f"; did you mean {' or '.join(k for k in known if known[k][-1] == name)}?"
    for names, likeness in ((here, 0.6), (elsewhere, 0.75)):
        for near in difflib.get_close_matches(name, names, n=1, cutoff=likeness):
            return f"; did you mean {names[near]}?"
    return f"; known are {', '.join(here)}" if here else ""


def _keys(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key that a config file may hold, sections too, as its path."""
    for name, info in model.model_fields.items():
        yield (*above, name)
        kind = info.annotation
        if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, (*above, name))
