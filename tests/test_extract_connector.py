"""States from a vLLM server: the files of its connector become the very shards of our own forward, or a refusal."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import extract.describe
import extract.main
import extract.vllm_files
from configs.load import UserError, load_config
from configs.schema import TargetConfig
from eval.loading import held_out_sets
from extract.connector import Connector, layer_ids, serve_command
from extract.head import head_of
from extract.locate import TargetSpec, load_model_config, locate
from extract.main import main
from extract.plan import plan
from extract.prompts import MaskedSample
from extract.regenerate import decode_batch
from extract.shards import ShardReader, verify, write_shard
from extract.skeleton import load_skeleton
from extract.target import Target, load_target
from tests.conftest import make_target, write_config
from tests.test_extract_server import Handler

File = dict[str, torch.Tensor]


class Vllm(ThreadingHTTPServer):
    """Answers on loopback and stores states as ExampleHiddenStatesConnector does, with vLLM's layer numbers."""

    def __init__(self, target: Target, layers: list[int], folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), VllmHandler)
        self.target, self.layers, self.folder = target, layers, folder
        self.damage: Callable[[File], File] = lambda file: file
        self.after: Callable[[Path], None] = lambda path: None
        self.stores, self.lock, self.asked = True, threading.Lock(), 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def states(self, ids: list[int]) -> File:
        """What each block reads, and what the last one gives: by hooks of this test's own."""
        read: list[torch.Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args: read.append(args[0]))
            for block in self.target.layers
        ]
        last = self.target.layers[-1]
        hooks.append(last.register_forward_hook(lambda _m, _a, out: read.append(out)))
        with torch.no_grad():
            self.target.decoder(input_ids=torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        stacked = torch.stack([read[k][0] for k in self.layers], dim=1)
        return {"hidden_states": stacked, "token_ids": torch.tensor(ids)}


class VllmHandler(Handler):
    server: Any

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine: Vllm = self.server
        with engine.lock:
            engine.asked += 1
            name = f"cmpl-{engine.asked}-0.safetensors"
            ((ids, reason),) = decode_batch(engine.target, [body["prompt"]], body["max_tokens"])
            file = engine.damage(engine.states(body["prompt"]))
        answer: dict[str, Any] = {
            "choices": [{"finish_reason": reason, "text": "", "token_ids": ids}]
        }
        if not engine.stores:
            return self.reply(200, answer)
        engine.folder.mkdir(exist_ok=True)
        path = engine.folder / name
        with path.with_name(name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            answer["kv_transfer_params"] = {"hidden_states_path": f"/elsewhere/{name}"}
            self.reply(200, answer)
            time.sleep(0.01)  # the answer is out before the file is whole
            save_file({k: v.contiguous() for k, v in file.items()}, path)
            engine.after(path)


def spec_of(folder: Path, taps: tuple[int, ...]) -> TargetSpec:
    settings = TargetConfig(path=str(folder))
    size = load_model_config(settings, locate(settings))
    layers, hidden = size.num_hidden_layers, size.hidden_size
    return TargetSpec("tiny", layers, hidden, size.vocab_size, taps, 300)


def serve(folder: Path, states: Path, layers: list[int]) -> Vllm:
    target = load_target(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    engine = Vllm(target, layers, states)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    return engine


@pytest.fixture
def pair(tiny_target: Path, tmp_path: Path) -> Iterator[tuple[Vllm, Connector]]:
    """Taps [1, 3, 5]: the last is the last block, which is layer 6 of vLLM."""
    config = load_config(write_config(tmp_path / "c.yaml", tiny_target))
    spec = spec_of(tiny_target, (1, 3, 5))
    engine = serve(tiny_target, Path(config.run_dir) / ".vllm", layer_ids(spec, False))
    Path(config.run_dir).mkdir()
    yield engine, Connector(engine.url, load_skeleton(config.target), spec, config)
    engine.shutdown()


SAMPLE = MaskedSample.of("q7", [5, 9, 30, 7, 8, 11, 40, 2, 9], [0, 0, 0, 0, 1, 1, 1, 1, 1])


def test_shards_and_manifest_are_those_of_our_own_forward(tiny_target, tmp_path, capsys):
    """Byte for byte. One sample a forward on both sides: a product rounds by its shape."""
    spec = spec_of(tiny_target, (1, 3, 4))
    ours, theirs = tmp_path / "hf", tmp_path / "vllm"
    engine = serve(tiny_target, theirs / "run" / ".vllm", layer_ids(spec, True))
    commands = {}
    for folder, backend in ((ours, "hf"), (theirs, "vllm")):
        folder.mkdir()
        config = write_config(
            folder / "c.yaml",
            tiny_target,
            extract={
                "backend": backend,
                "batch_tokens": 1,
                "shard_tokens": 60,
                "store_last_hidden": True,
            },
            data={"max_new_tokens": 8, "max_samples": 5},
            eval={"max_new_tokens": 6, "max_prompts": 2},
        )
        commands[backend] = ["--config", str(config), "--server", engine.url]
    engine.stores = False
    assert main(commands["hf"]) is None
    states = [folder / "run" / "states" for folder in (ours, theirs)]
    held = [folder / "run" / "eval-sets" / "held" / "states" for folder in (ours, theirs)]
    bad = ShardReader(states[0])[2]

    def damage(file: File) -> File:
        if torch.equal(file["token_ids"], bad.input_ids.long()):
            file["hidden_states"][5, 2] = float("nan")
        return file

    engine.stores, engine.damage = True, damage
    capsys.readouterr()
    assert main(commands["vllm"]) == 1
    said = capsys.readouterr().err
    assert f"warning: left out {bad.id!r}: hidden_states has NaN or Inf in token 5, tap" in said
    assert f"error: 1 of 5 samples are left out of {states[1]}: {bad.id!r}" in said
    assert bad.id not in ShardReader(states[1]).ids

    engine.damage = lambda file: file
    assert main(commands["vllm"]) is None  # the fault has gone
    engine.shutdown()
    files = sorted(p.name for p in states[0].iterdir())
    assert len(files) >= 6 and "manifest.json" in files
    for name in files:
        made = [folder.joinpath(name).read_bytes() for folder in states]
        assert made[0] == made[1], name
    shards = sorted(p.name for p in held[0].glob("*.safetensors"))
    assert shards
    assert all((held[0] / n).read_bytes() == (held[1] / n).read_bytes() for n in shards)
    assert list(held_out_sets(load_config(theirs / "c.yaml"))) == ["held"]  # replay takes them
    assert verify(states[1]) == verify(held[1]) == []
    assert not (theirs / "run" / ".vllm").exists()


def test_files_are_gone_when_they_are_read_and_answers_leave_none(pair, tmp_path):
    engine, connector = pair
    assert torch.equal(
        connector.sample(SAMPLE, False).input_ids, torch.tensor(list(SAMPLE.input_ids))
    )
    assert list(engine.folder.iterdir()) == []


def shifted(file: File) -> File:
    return {**file, "hidden_states": file["hidden_states"].roll(1, dims=0)}


def edited(**change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[File], File]:
    return lambda file: {k: change[k](v) if k in change else v for k, v in file.items()}


def last_is_normed(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[:, -1] /= states[:, -1].square().mean(-1, keepdim=True).sqrt()
    return states


DAMAGES = [
    (edited(token_ids=lambda x: x + (x == 40)), "9 tokens and the sample 9; token 6 is 41, not 40"),
    (edited(hidden_states=lambda x: x[:, 1:]), r"shape is \[9, 3, 64\] and layers \[0, 2, 4, 6\]"),
    (edited(hidden_states=lambda x: x[..., :32]), r"\[9, 4, 32\]"),
    (edited(hidden_states=lambda x: x.flatten(1)), r"\[9, 256\]"),
    (edited(hidden_states=lambda x: x.sum()), r"shape is \[\]"),
    (edited(hidden_states=lambda x: x.bfloat16()), "torch.bfloat16 and the config says .*float32"),
    (shifted, "row 0 does not start from the embedding of its token 5, so that [89] of 9"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_a_file_that_is_not_what_was_asked_for_is_refused_by_sample(pair, damage, sentence):
    engine, connector = pair
    engine.damage = damage
    with pytest.raises(UserError, match=rf"^vLLM's states of sample 'q7' .*{sentence}"):
        connector.sample(SAMPLE, False)


def with_value(value: float, layers: slice) -> Callable[[File], File]:
    def damage(file: File) -> File:
        file["hidden_states"][4, layers] = value
        return file

    return damage


UNFIT = [
    (with_value(float("nan"), slice(2, 3)), "hidden_states has NaN or Inf in token 4, tap number 1"),
    (with_value(float("-inf"), slice(0, 4)), "hidden_states has NaN or Inf in token 4, tap number 0"),
    (with_value(0.0, slice(0, 4)), "hidden_states has only zeros in token 4, tap number 0"),
    (edited(hidden_states=lambda x: x[:-1]), "hidden_states has shape [8, 192] and 9 tokens need [9, 192]"),
    (
        edited(hidden_states=lambda x: x[:-1], token_ids=lambda x: x[:-1]),
        "hidden_states has shape [8, 192] and 9 tokens need [9, 192]",
    ),
    (
        edited(hidden_states=lambda x: torch.cat([x, x[:1]])),
        "hidden_states has shape [10, 192] and 9 tokens need [9, 192]",
    ),
    (edited(hidden_states=lambda x: x[:0]), "hidden_states has shape [0, 192] and 9 tokens need [9, 192]"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), UNFIT)
def test_what_is_wrong_with_one_sample_leaves_that_one_out(pair, tmp_path, damage, reason):
    engine, connector = pair
    engine.damage = lambda file: damage(file) if len(file["token_ids"]) == 9 else file
    good = MaskedSample.of("q8", SAMPLE.input_ids[:6], SAMPLE.loss_mask[:6])
    (shard,) = plan([9, 6], shard_tokens=64, batch_tokens=64)
    made = connector.shard(shard, [SAMPLE, good], False)
    entry = write_shard(
        tmp_path, shard, made, num_taps=3, storage_dtype=torch.float32, plan_fingerprint=""
    )
    assert entry.samples == 1 and list(engine.folder.iterdir()) == []
    assert [(bad.id, bad.reason) for bad in entry.quarantined] == [("q7", reason)]
    with pytest.raises(UserError, match=f"'q7', cannot prove .*{re.escape(reason)}"):
        connector.probe(SAMPLE)


def test_normed_states_of_the_last_block_are_refused(pair):
    engine, connector = pair
    weight = engine.target.decoder.norm.weight
    engine.damage = edited(
        hidden_states=lambda x: torch.cat([x[:, :-1], last_is_normed(x)[:, -1:] * weight], 1)
    )
    with pytest.raises(UserError, match=r"'q7' .*after the final norm; leave out tap 5"):
        connector.sample(SAMPLE, False)


def test_layers_that_are_numbered_otherwise_do_not_pass_the_probe(pair):
    engine, connector = pair
    connector.probe(SAMPLE)
    engine.layers = [0, 1, 3, 5]  # as if vLLM counted like us
    with pytest.raises(UserError, match=r"tap 1 of tiny .* differs from a plain forward"):
        connector.probe(SAMPLE)


def test_a_file_that_is_lost_once_is_asked_for_again(pair):
    engine, connector = pair
    lost = [lambda path: path.write_bytes(path.read_bytes()[:-4]), lambda path: path.unlink()]
    for lose in lost:
        asked = engine.asked
        engine.after = lambda path, first=asked + 1, lose=lose: engine.asked == first and lose(path)
        assert torch.equal(
            connector.sample(SAMPLE, False).input_ids, torch.tensor(list(SAMPLE.input_ids))
        )
        assert engine.asked == asked + 2


def test_torn_lost_and_unfinished_files_end_in_one_sentence(pair, monkeypatch):
    engine, connector = pair
    engine.after = lambda path: path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="states of sample 'q7' cannot be read"):
        connector.sample(SAMPLE, False)
    engine.after = lambda path: time.sleep(0.3)
    monkeypatch.setattr(extract.vllm_files, "PATIENCE", 0.05)
    with pytest.raises(UserError, match="did not finish its states of sample 'q7'"):
        connector.sample(SAMPLE, False)
    connector.folder = connector.folder / "unshared"
    with pytest.raises(UserError, match="unshared does not have it; start the server"):
        connector.sample(SAMPLE, False)
    engine.stores = False
    with pytest.raises(UserError, match="answered sample 'q7' and stored no hidden states"):
        connector.sample(SAMPLE, False)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "settings", "dtype"),
    [
        ("qwen3", {"tie_word_embeddings": True}, "bfloat16"),
        ("qwen3_moe", MOE, "float32"),  # its experts are fused when they are loaded
        ("gemma3_text", {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 3}, "float32"),
    ],
)  # fmt: skip
def test_a_skeleton_is_the_loaded_target_as_far_as_extraction_sees(
    tmp_path, family, settings, dtype
):
    folder = make_target(tmp_path, family=family, layers=3, shard_size="40KB", **settings)
    assert len(list(folder.glob("*.safetensors"))) > 1
    config = TargetConfig(path=str(folder), dtype=dtype, device="cpu")
    whole, bones = load_target(config), load_skeleton(config)
    ids = torch.tensor([[5, 9, 30, 7]])
    for _ in range(2):  # what is read for a moment is let go
        assert bones.fingerprint() == whole.fingerprint()
        assert torch.equal(bones.first_blocks(ids, 1), whole.forward_taps(ids, [1])[0])
    assert all(p.is_meta for p in bones.layers.parameters())
    a, b = head_of(whole), head_of(bones)
    assert torch.equal(a.embedding, b.embedding) and torch.equal(a.weight, b.weight)
    assert (
        (a.weight is a.embedding)
        == (b.weight is b.embedding)
        == ("tie_word_embeddings" in settings)
    )
    assert (a.scale, bones.stop_ids, bones.dtype) == (b.scale, whole.stop_ids, whole.dtype)


def test_a_skeleton_says_what_its_files_lack(tmp_path):
    folder = make_target(tmp_path, layers=3, shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    del listed["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    index.write_text(json.dumps(listed))
    bones = load_skeleton(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    with pytest.raises(UserError, match=r"lack model\.layers\.2\.mlp\.up_proj\.weight"):
        bones.fingerprint()
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**settings, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(UserError, match="is quantized"):
        load_skeleton(TargetConfig(path=str(folder)))


def test_the_command_asks_for_our_layers_in_vllms_numbers(tiny_target, tmp_path, capsys):
    config = write_config(tmp_path / "c.yaml", tiny_target, extract={"backend": "vllm"})
    main(["--config", str(config), "--vllm-command"])
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    options = dict(pairwise(words))
    assert words[:3] == ["vllm", "serve", str(tiny_target)] and options["--dtype"] == "float32"
    speculative = json.loads(options["--speculative-config"])
    assert speculative["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 2, 4, 5]
    }
    transfer = json.loads(options["--kv-transfer-config"])["kv_connector_extra_config"]
    assert transfer == {"shared_storage_path": str(tmp_path / "run" / ".vllm")}
    assert options["--max-model-len"] == "1024"  # all that the target has
    main(["--config", str(config), "--vllm-command", "--set", "data.max_prompt_tokens=100"])
    assert f"--max-model-len {100 + 24 + 8} " in capsys.readouterr().out
    spec = spec_of(tiny_target, (1, 5))
    assert layer_ids(spec, True) == layer_ids(spec, False) == [0, 2, 6]
    assert layer_ids(spec_of(tiny_target, (1, 3)), True) == [0, 2, 4, 6]
    assert "--max-model-len" not in serve_command(
        load_config(config, ["data.regenerate=false"]), locate(TargetConfig(path="a/b")), spec, None
    )


def test_settings_that_do_not_go_together(tiny_target, tmp_path):
    config = str(write_config(tmp_path / "c.yaml", tiny_target, extract={"backend": "vllm"}))
    with pytest.raises(UserError, match="no server is named"):
        main(["--config", config])
    with pytest.raises(UserError, match="the config says hf"):
        main(["--config", config, "--set", "extract.backend=hf", "--vllm-command"])
    with pytest.raises(UserError, match=r"eval\.dtype is bfloat16 and target.dtype float32"):
        main(["--config", config, "--set", "eval.dtype=bfloat16"])


def test_price_and_description_load_no_target(tiny_target, tmp_path, capsys, monkeypatch):
    """Nor do they need a server. Tokens and bytes are those that backend hf names."""
    config = str(write_config(tmp_path / "c.yaml", tiny_target))
    main(["--config", config, "--dry-run"])
    wanted = capsys.readouterr().out.splitlines()
    for module in (extract.main, extract.describe):
        monkeypatch.delattr(module, "load_target")
    more = ["--config", config, "--set", "extract.backend=vllm"]
    main([*more, "--dry-run"])
    prices = capsys.readouterr().out.splitlines()
    (hours,) = set(prices) - set(wanted)
    assert hours.startswith("hours:    unknown with extract.backend=vllm")
    assert [line[:5] for line in wanted if line not in prices] == ["rates", "hours"]
    assert not (tmp_path / "run").exists()

    engine = serve(
        tiny_target, tmp_path / "run" / ".vllm", layer_ids(spec_of(tiny_target, (1, 3, 4)), True)
    )
    more += ["--set", "data.max_samples=2", "--set", "extract.store_last_hidden=true"]
    main([*more, "--server", engine.url])
    engine.shutdown()
    capsys.readouterr()
    main([*more, "--describe"])
    said = capsys.readouterr().out
    assert re.search(r"training: *greedy *100.00% of .* by the stored last_hidden", said)
    assert re.search(r"held: *greedy *unknown: .*extract.backend=vllm loads no target", said)
