"""Verification leaves no trace: every family of target, against forwards that know nothing of trees.

The oracles: transformers' own forward over a root path, and for the delta rule a loop over tokens in float64. The naive
verifiers at the end are what published code does; the self-test has to catch them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from configs.load import UserError
from eval.gated_delta import PROJECTIONS
from eval.selftest import leaf_paths, plain_logits, random_tree, self_test
from eval.tree import Tree, build_tree, chain_tree
from eval.verify import CHUNK, LINEAR, Verifier, layer_kinds
from extract.regenerate import decode_batch
from extract.target import Target
from tests.conftest import make_target, tiny_tokenizer

GDN = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "qwen3_moe": {"family": "qwen3_moe", **MOE},
    "mistral": {"family": "mistral", "sliding_window": 10},
    "gemma3": {"family": "gemma3_text", "sliding_window": 12, "layer_types": SLIDING, "query_pre_attn_scalar": 16},
    "gpt_oss": {"family": "gpt_oss", "sliding_window": 12, "layer_types": SLIDING, "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "qwen3_next": {"family": "qwen3_next", **GDN, **MOE, "shared_expert_intermediate_size": 32},
    "qwen3_5": {"family": "qwen3_5_text", **GDN},
    "qwen3_5_moe": {"family": "qwen3_5_moe_text", **GDN, **MOE, "shared_expert_intermediate_size": 32},
}  # fmt: skip
PROMPT = list(range(40, 75))
# In float32 transformers' own two forms of the delta rule (chunked, recurrent) are up to 5e-5 of the largest logit apart
# on these targets, and ours lies closer to float64 than the chunked one; without a recurrent layer it is 4e-6.
FLOAT32 = {"dense": 1e-5, "hybrid": 2.5e-4}


def load(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Target:
    """gpt-oss has no SDPA kernel (attention sinks)."""
    attention = "eager" if family == "gpt_oss" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return Target(model, tiny_tokenizer(), family)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Target] = {}

    def get(family: str) -> Target:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = load(make_target(folder, **FAMILIES[family]), family)
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_self_test_passes_on_every_family(targets, family):
    target = targets(family)
    limit = FLOAT32["hybrid" if LINEAR in layer_kinds(target) else "dense"]
    checks = self_test(target, PROMPT, nodes=48, rounds=10, new_tokens=32)
    assert [c.name for c in checks] == ["plain", "nodes", "long", "commits", "text"]
    for check in checks:
        assert check.passed and check.compared >= 3, str(check)
        assert check.difference <= limit and check.flips == 0, str(check)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "qwen3_5"])
def test_big_trees_and_200_rounds(targets, family):
    """256 nodes, depth 15, and 200 commits; a prompt of more than one chunk."""
    target = targets(family)
    prompt = PROMPT * (1 + CHUNK // len(PROMPT))
    checks = self_test(target, prompt, nodes=256, rounds=2, new_tokens=4)
    checks += self_test(target, PROMPT, nodes=8, rounds=200, new_tokens=64, seed=1)
    for check in checks:
        assert check.passed, str(check)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "qwen3_5"])
def test_greedy_text_is_plain_decoding_at_every_budget(targets, family):
    """Drafters that are right, wrong and adversarial, which means: sure of what the target does not say."""
    target = targets(family)
    ((answer, _),) = decode_batch(target, [PROMPT], 40)
    assert len(set(answer)) >= 5, "the answer says too little"
    random = torch.Generator().manual_seed(0)
    vocabulary = target.config.vocab_size
    for kind in ("right", "wrong", "adversarial", "mixed"):
        for budget in (None, 1, 2, 7, 64, 512):
            verifier = Verifier(target, (0,))
            logits, _ = verifier.prefill(PROMPT)
            said = [int(logits.argmax())]
            accepted = 0
            while len(said) < len(answer):
                draft = torch.randn(7, vocabulary, generator=random)
                ahead = answer[len(said) : len(said) + 7]
                for d, token in enumerate(ahead):
                    sure = {"right": 20.0, "wrong": 0.0, "adversarial": -20.0, "mixed": 5.0}[kind]
                    draft[d, token] += sure * (1 if kind != "mixed" or d % 3 != 2 else 0.5)
                tree = (
                    chain_tree(draft.argmax(-1), said[-1])
                    if budget is None
                    else build_tree(draft, said[-1], budget)
                )
                logits, _ = verifier.verify(tree)
                wanted = logits.argmax(-1)
                path = tree.walk(wanted)
                accepted += len(path) - 1
                said += [int(tree.tokens[i]) for i in path[1:]] + [int(wanted[path[-1]])]
                verifier.commit(path)
            assert said[: len(answer)] == answer, (kind, budget)
            if kind == "right":
                assert accepted >= len(answer) * 0.4 * min(1, (budget or 7) / 2), (kind, budget)


# --- the delta rule itself --------------------------------------------------------------------------------------------


def token_by_token(m: Any, hidden: Tensor) -> Tensor:
    """A Gated-DeltaNet layer as its paper states it: one token after the other, [1, T, hidden] -> the same."""
    qkv, z, b, a = PROJECTIONS[type(m).__name__](m, hidden)
    out = []
    kernel = m.conv_kernel_size
    padded = torch.cat([qkv.new_zeros(kernel - 1, qkv.shape[1]), qkv])
    state = qkv.new_zeros(m.num_v_heads, m.head_k_dim, m.head_v_dim)
    for t in range(len(qkv)):
        x = (padded[t : t + kernel] * m.conv1d.weight[:, 0].T).sum(0)
        x = x * torch.sigmoid(x)
        q, k, v = x.split([m.key_dim, m.key_dim, m.value_dim])
        reads = []
        for h in range(m.num_v_heads):
            group = h // (m.num_v_heads // m.num_k_heads)
            qh = q[group * m.head_k_dim :][: m.head_k_dim]
            kh = k[group * m.head_k_dim :][: m.head_k_dim]
            vh = v[h * m.head_v_dim :][: m.head_v_dim]
            qh = qh / (qh.square().sum() + 1e-6).sqrt() / m.head_k_dim**0.5
            kh = kh / (kh.square().sum() + 1e-6).sqrt()
            g = -m.A_log[h].exp() * nn.functional.softplus(a[t, h] + m.dt_bias[h])
            decayed = state[h] * g.exp()
            written = b[t, h].sigmoid() * (vh - kh @ decayed)
            state[h] = decayed + torch.outer(kh, written)
            reads.append(qh @ state[h])
        out.append(torch.stack(reads))
    core = torch.stack(out).reshape(-1, m.head_v_dim)
    return m.out_proj(m.norm(core, z.reshape(-1, m.head_v_dim)).reshape(1, len(qkv), -1))


@pytest.fixture(scope="module")
def hybrid64(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("hybrid64")
    return load(make_target(folder, **FAMILIES["qwen3_5"]), "qwen3_5", torch.float64)


@torch.inference_mode()
def test_tree_delta_rule_equals_the_loop_over_tokens_in_float64(hybrid64, monkeypatch):
    """Nodes and the state after commits, to rounding: the one place where an error of 1e-6 would be seen."""
    target = hybrid64
    random = torch.Generator().manual_seed(3)
    words = torch.arange(4, 290)
    verifier = Verifier(target, (0,))
    verifier.prefill(PROMPT[:20])
    kept = PROMPT[:20]
    seen: list[tuple[Tensor, list[int], int]] = []  # logits along a path, the text, how many
    for _ in range(4):
        tree = random_tree(random, 24, 8, words)
        logits, _ = verifier.verify(tree)
        paths = leaf_paths(tree)
        seen += [(logits[p], kept + tree.tokens[p].tolist(), len(p)) for p in paths]
        path = paths[len(paths) // 2]
        kept = kept + tree.tokens[path].tolist()
        verifier.commit(path)
    for layer in target.layers:
        if hasattr(layer, "linear_attn"):
            monkeypatch.setattr(
                layer.linear_attn,
                "forward",
                lambda hidden_states, m=layer.linear_attn, **_: torch.cat(
                    [token_by_token(m, row[None]) for row in hidden_states]
                ),
            )
    for logits, text, count in seen:
        (plain,) = plain_logits(target, [text], [count])
        assert (logits - plain).abs().max() / plain.abs().max() < 1e-9


def test_verify_changes_nothing(targets):
    """The same tree after another tree was verified and dropped: bit for bit the same logits and taps."""
    for family in ("qwen3", "gemma3", "qwen3_5"):
        target = targets(family)
        random = torch.Generator().manual_seed(0)
        words = torch.arange(4, 290)
        tree, other = (random_tree(random, 20, 6, words) for _ in range(2))
        verifier = Verifier(target, (1, 4))
        verifier.prefill(PROMPT)
        first = verifier.verify(tree)
        verifier.verify(other)
        again = verifier.verify(tree)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), family
        # the target itself is as it was: its own layers run their own forward
        assert not any("forward" in m.__dict__ for m in target.model.modules())


def test_order_of_siblings_does_not_matter(targets):
    """A node's logits do not depend on where in the tree, beside whom, it stands."""
    target = targets("qwen3_5")
    verifier = Verifier(target, (0,))
    verifier.prefill(PROMPT)
    nan = torch.full((5,), float("nan"), dtype=torch.float64)
    a = Tree(
        torch.tensor([50, 60, 61, 70, 71]),
        torch.tensor([-1, 0, 0, 1, 2]),
        torch.tensor([0, 1, 1, 2, 2]),
        nan,
    )
    b = Tree(
        torch.tensor([50, 61, 71, 60, 70]),
        torch.tensor([-1, 0, 1, 0, 3]),
        torch.tensor([0, 1, 2, 1, 2]),
        nan,
    )
    la, lb = verifier.verify(a)[0], verifier.verify(b)[0]
    torch.testing.assert_close(la, lb[[0, 3, 1, 4, 2]], rtol=1e-5, atol=1e-5)


def test_conditional_generation_class(tmp_path):
    """Qwen3.5 and 3.6 are released as a vision-language class: text layers one level down, the config too."""
    text = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=320, initializer_range=0.08, **GDN,
    )  # fmt: skip
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 64,
    }
    config: Any = AutoConfig.for_model("qwen3_5", text_config=text.to_dict(), vision_config=vision)
    from transformers import Qwen3_5ForConditionalGeneration

    torch.manual_seed(0)
    target = Target(Qwen3_5ForConditionalGeneration(config).float(), tiny_tokenizer(), "vl")
    for check in self_test(target, PROMPT, nodes=24, rounds=5, new_tokens=16):
        assert check.passed, str(check)


def test_layers_spread_over_devices_by_accelerate_hooks(targets, tmp_path):
    """device_map moves tensors with hooks on every module; the delta rule's stand-in has to live with them."""
    from accelerate import dispatch_model

    folder = make_target(tmp_path, **FAMILIES["qwen3_5"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    places = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    places |= {f"model.layers.{i}": "cpu" for i in range(6)}
    target = Target(dispatch_model(model, places, force_hooks=True), tiny_tokenizer(), "hooked")
    assert hasattr(target.layers[0].linear_attn, "_hf_hook")
    module: Any = target.layers[0].linear_attn
    before = module.forward
    plain, hooked = Verifier(targets("qwen3_5"), (0, 3)), Verifier(target, (0, 3))
    for mine, theirs in zip(hooked.prefill(PROMPT), plain.prefill(PROMPT), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert module.forward == before  # the hooks are back


# --- what is refused, and what must be caught -------------------------------------------------------------------------


def test_layers_it_does_not_know_are_refused_by_name(tmp_path):
    config = AutoConfig.for_model(
        "olmo_hybrid", hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=320, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), "olmo")
    with pytest.raises(
        UserError, match=r"olmo has layers of the kind .*linear_attention in OlmoHybrid"
    ):
        Verifier(target, (0,))


class Naive(Verifier):
    """What published code does to a target with recurrent layers: transformers' own forward, and a crop."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, (0,))
        self.recurrent = []
        self.cache = DynamicCache(config=target.config)

    def rollback(self) -> None:
        self.pending = 0

    def commit(self, path: Any) -> None:
        with torch.inference_mode():
            for layer, kind in zip(self.cache.layers, self.kinds, strict=True):
                if kind != LINEAR:
                    rows = self.past + torch.tensor(list(path))
                    for name in ("keys", "values"):
                        old = getattr(layer, name)
                        new = torch.cat([old[:, :, : self.past], old[:, :, rows]], dim=2)
                        setattr(layer, name, new)
        self.past += len(path)
        self.pending = 0


def test_the_naive_way_is_caught(targets):
    """Shared state between siblings, rejected tokens left in the recurrent state: both show in logits and text."""
    plain, *checks = self_test(
        targets("qwen3_5"), PROMPT, nodes=24, rounds=5, new_tokens=24, verifier=Naive
    )
    assert plain.passed
    for check in checks:
        assert not check.passed and check.difference > 1e-2, str(check)


def test_bfloat16_is_judged_by_the_targets_own_rounding(targets, tmp_path):
    """Rounding passes, contamination does not."""
    folder = make_target(tmp_path, **FAMILIES["qwen3_5"])
    target = load(folder, "qwen3_5", torch.bfloat16)
    options: dict[str, Any] = {"nodes": 24, "rounds": 10, "new_tokens": 24}
    for check in self_test(target, PROMPT, **options):
        assert check.passed and check.difference > 1e-3, str(check)
    for check in self_test(target, PROMPT, **options, verifier=Naive)[1:]:
        assert not check.passed, str(check)


class NoWindow(Verifier):
    """A sliding layer that sees everything."""

    def _mask(self, ancestors: Tensor, depths: Tensor, kind: str) -> Tensor:
        return super()._mask(ancestors, depths, "full_attention")


class Siblings(Verifier):
    """Every node sees every node before it, as a causal mask over a flattened tree does."""

    def _forward(self, tree: Tree) -> tuple[Tensor, Tensor]:
        flat = Tree(
            tree.tokens,
            torch.arange(len(tree.tokens)) - 1,
            torch.arange(len(tree.tokens)),
            tree.log_weights,
        )
        flat = Tree(flat.tokens, flat.parents, tree.depths, flat.log_weights)
        return super()._forward(flat)


@pytest.mark.parametrize(
    ("family", "broken"), [("gemma3", NoWindow), ("qwen3", Siblings), ("qwen3_5", Siblings)]
)
def test_wrong_masks_are_caught(targets, family, broken):
    checks = self_test(
        targets(family),
        PROMPT,
        nodes=24,
        rounds=5,
        new_tokens=16,
        verifier=lambda t: broken(t, (0,)),
    )
    assert not any(check.passed for check in checks[1:4]), list(map(str, checks))


def test_a_window_longer_than_a_chat_is_tested_too(tmp_path):
    """Real windows are 512 and more: the self-test has to read beyond them."""
    folder = make_target(tmp_path, **{**FAMILIES["gemma3"], "sliding_window": 300})
    target = load(folder, "gemma3")
    checks = self_test(target, PROMPT, nodes=8, rounds=2, new_tokens=8)
    assert all(check.passed for check in checks), list(map(str, checks))
    broken = self_test(
        target, PROMPT, nodes=8, rounds=2, new_tokens=8, verifier=lambda t: NoWindow(t, (0,))
    )
    assert [check.name for check in broken if not check.passed] == ["long"]


def test_rope_that_depends_on_the_length_gets_its_prompt_at_once(tmp_path):
    """A prompt in chunks would rotate the first ones as if the text ended with them."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = make_target(
        tmp_path, family="llama", rope_parameters=rope, max_position_embeddings=600
    )
    target = load(folder, "llama")
    prompt = (PROMPT * 20)[:700]
    logits, _ = Verifier(target, (0,)).prefill(prompt)
    (plain,) = plain_logits(target, [prompt], [1])
    assert (logits - plain[0]).abs().max() / plain.abs().max() < 1e-5


def test_logits_that_are_scaled_behind_the_head_fail_the_self_test(tmp_path):
    folder = make_target(tmp_path, family="granite", logits_scaling=8.0)
    checks = self_test(load(folder, "granite"), PROMPT, nodes=8, rounds=2, new_tokens=8)
    assert not checks[0].passed


def test_layers_that_share_keys(tmp_path):
    """Gemma 4's last layers read the keys of earlier ones and keep none of their own."""
    folder = make_target(
        tmp_path, family="gemma4_text", sliding_window=12, layer_types=SLIDING, num_kv_shared_layers=3,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=320,
    )  # fmt: skip
    for check in self_test(load(folder, "gemma4"), PROMPT, nodes=24, rounds=5, new_tokens=16):
        assert check.passed, str(check)
