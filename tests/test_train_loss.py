"""The chunked objective equals the obvious one, in value and in every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Config
from extract.head import TargetHead
from train.batches import Batch
from train.drafter import DraftShape
from train.loss import slot_losses
from train.sampling import SampledHead, StepHead
from train.step import Prepared, loss_of, prepare

HIDDEN, VOCABULARY, BLOCK = 12, 40, 4
SHAPE = DraftShape(BLOCK, 39, (0,), 4)
FROM_ANCHOR = replace(SHAPE, sample_from_anchor=True)


def make_head(
    *, bias: bool = False, soft_cap: float | None = None, dtype: torch.dtype = torch.float32
) -> TargetHead:
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g).to(dtype)
    b = torch.randn(VOCABULARY, generator=g).to(dtype) if bias else None
    return TargetHead(weight, weight, bias=b, soft_cap=soft_cap)


def make_batch(rows: int = 2, length: int = 14) -> Batch:
    """Rows of two documents each, whose answers end inside some of the blocks."""
    g = torch.Generator().manual_seed(2)
    document = torch.zeros(rows, length, dtype=torch.long)
    document[:, 9:] = 1
    mask = torch.ones(rows, length, dtype=torch.uint8)
    mask[:, :2] = mask[0, 6] = mask[0, 10] = mask[1, 7:] = 0
    position = torch.cat([torch.arange(9), torch.arange(length - 9)]).expand(rows, -1)
    return Batch(
        input_ids=torch.randint(0, VOCABULARY, (rows, length), generator=g),
        loss_mask=mask,
        document=document,
        position=position,
        priority=torch.rand(rows, length, generator=g, dtype=torch.float64),
        features=torch.zeros(rows, length, 2),
        last_hidden=torch.randn(rows, length, HIDDEN, generator=g),
        sample_ids=["a"],
    )


def make_config(**train: object) -> Config:
    return Config.model_validate(
        {
            "run_dir": "run",
            "target": {"path": "x"},
            "data": {"prompts": ("x",)},
            "extract": {"store_last_hidden": True},
            "drafter": {"block_size": BLOCK},
            "train": {"anchors": 5, "precision": "fp32", **train},
        }
    )


def oracle(hidden: Tensor, head: TargetHead | StepHead, part: Prepared, config: Config) -> Tensor:
    """Loss of a micro-batch, slot by slot, in float64 and by autograd; hidden [R, S, H] float64."""
    options, batch = config.train, part.batch
    whole = head.head if isinstance(head, StepHead) else head

    def log_p(state: Tensor, token: int) -> tuple[Tensor, int]:
        raw = whole.weight.double() @ state
        raw = raw if whole.bias is None else raw + whole.bias.double()
        if whole.soft_cap is not None:
            raw = torch.tanh(raw / whole.soft_cap) * whole.soft_cap
        if not isinstance(head, StepHead):
            return raw.log_softmax(0), token
        drawn = len(whole.weight) - len(head.ids) // 2  # tokens that the drawn half stands for
        parts, half = [raw[token]], len(head.ids) // 2
        for i, other in enumerate(head.ids.tolist()):
            if other != token:
                stands_for = 1.0 if i < half else drawn / (len(head.ids) - half)
                parts.append(raw[other] + math.log(stands_for))
        return torch.stack(parts).log_softmax(0), 0

    numerator, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for r, anchors in enumerate(part.anchors.tolist()):
        for j, anchor in enumerate(anchors):
            losses, confidence = [], []
            for k in range(part.first, BLOCK):
                if anchor < 0 or not part.supervised[r, j, k]:
                    break
                predicted = anchor + k + (1 - part.first)
                token = int(batch.input_ids[r, predicted])
                mine, at = log_p(hidden[r, j * BLOCK + k], token)
                assert batch.last_hidden is not None
                teacher, _ = log_p(batch.last_hidden[r, predicted - 1].double(), token)
                kl = (teacher.exp() * (teacher - mine)).sum()
                share = options.distillation
                losses.append((1 - share) * -mine[at] + share * kl)
                confidence.append(mine[at].exp().item())
            for k, loss in enumerate(losses):
                if options.weighting == "dpace":
                    smoothed = [0.5 * q + 0.5 for q in confidence]
                    weight = sum(math.prod(smoothed[: m + 1]) for m in range(k, len(smoothed)))
                elif options.weighting == "decay":
                    weight = math.exp(-k / (options.decay_gamma or BLOCK / 2))
                else:
                    weight = 1.0
                numerator = numerator + weight * loss
                divisor += weight if options.weighting != "dpace" else 0.0
            divisor += float(len(losses) > 0) if options.weighting == "dpace" else 0.0
    return numerator / divisor


def draw(head: TargetHead, count: int, step: int = 3) -> StepHead:
    return SampledHead(head, torch.arange(VOCABULARY), count, seed=1).at(step)


HEADS: dict[str, Callable[[], TargetHead | StepHead]] = {
    "plain": lambda: make_head(),
    "biased": lambda: make_head(bias=True),
    "capped": lambda: make_head(bias=True, soft_cap=5.0),
    "sampled": lambda: draw(make_head(), 15),
    "sampled biased": lambda: draw(make_head(bias=True), 16),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("weighting", ["decay", "uniform", "dpace"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [SHAPE, FROM_ANCHOR], ids=["DFlash", "from the anchor"])
def test_equals_the_plain_objective(kind, weighting, share, shape):
    head, batch = HEADS[kind](), make_batch()
    hidden = torch.randn(2, 5 * BLOCK, HIDDEN, generator=torch.Generator().manual_seed(4))
    exact = hidden.double().requires_grad_()
    config = make_config(weighting=weighting, distillation=share)
    part = prepare(batch, config, shape)
    lengths = part.supervised.sum(2).unique().tolist()
    assert lengths == list(range(shape.drafts + 1)), (
        "the batch has lost its short blocks and unused anchors"
    )
    expected = oracle(exact, head, part, config)
    expected.backward()
    for chunk in (1, 7, 1024):
        mine = hidden.clone().requires_grad_()
        options = make_config(weighting=weighting, distillation=share, loss_chunk=chunk)
        numerator, _ = loss_of(mine, head, part, options)
        (numerator / part.divisor).backward()
        torch.testing.assert_close((numerator / part.divisor).double(), expected, rtol=1e-5, atol=0)
        assert mine.grad is not None and exact.grad is not None
        torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


def test_a_slot_is_correct_when_its_token_is_the_heads_first():
    head = make_head(bias=True)
    hidden = torch.randn(30, HIDDEN)
    best = head.logits(hidden).argmax(-1)
    targets = torch.where(torch.arange(30) % 2 == 0, best, (best + 1) % VOCABULARY)
    assert slot_losses(hidden, head, targets, chunk=7).correct.tolist() == [True, False] * 15


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["whole", "sampled"])
def test_bfloat16_head_is_close_and_the_gradient_points_the_same_way(share, kind):
    g = torch.Generator().manual_seed(0)
    hidden, teacher = torch.randn(2, 200, 64, generator=g).unbind()
    weight, targets = (
        torch.randn(500, 64, generator=g) * 0.3,
        torch.randint(0, 500, (200,), generator=g),
    )
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = TargetHead(weight.to(dtype), weight.to(dtype))
        head = SampledHead(whole, torch.arange(500), 250, 0).at(0) if kind == "sampled" else whole
        x = hidden.clone().requires_grad_()
        slots = slot_losses(x, head, targets, teacher=teacher, share=share)
        slots.loss.sum().backward()
        assert x.grad is not None
        out.append((slots.loss.mean(), x.grad.flatten()))
    (exact, a), (rounded, b) = out
    torch.testing.assert_close(rounded, exact, rtol=2e-3, atol=0)
    assert F.cosine_similarity(a, b, dim=0) > 0.999


def test_an_answer_that_bfloat16_gives_no_chance_has_a_finite_loss_and_the_full_gradient():
    """Its probability is 0 in bfloat16, and minus its logarithm would be infinite: the whole step would be skipped."""
    weight = torch.eye(4).bfloat16()
    hidden = torch.tensor([[200.0, 0.0, 0.0, 0.0]], requires_grad=True)
    slots = slot_losses(hidden, TargetHead(weight, weight), torch.tensor([1]))
    slots.loss.sum().backward()
    assert 80 < slots.loss.item() < 90 and slots.confidence.item() < 1e-30
    torch.testing.assert_close(hidden.grad, torch.tensor([[1.0, -1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("weighting", ["decay", "uniform", "dpace"])
def test_no_supervised_slot_gives_zero_loss_and_zero_gradient(weighting):
    batch, config = make_batch(), make_config(weighting=weighting)
    batch.loss_mask.zero_()
    part = prepare(batch, config, SHAPE)
    hidden = torch.randn(2, 5 * BLOCK, HIDDEN, requires_grad=True)
    numerator, correct = loss_of(hidden, make_head(), part, config)
    numerator.backward()
    assert numerator == 0 and part.divisor == 0 and not correct.any()
    assert hidden.grad is not None and not hidden.grad.any()


def test_sampled_head_stands_for_the_whole_vocabulary():
    """Averaged over many draws, loss and gradient come close to the full softmax; with all tokens but one they are it."""
    g = torch.Generator().manual_seed(0)
    hidden, teacher = torch.randn(2, 40, 16, generator=g).unbind()
    weight = torch.randn(200, 16, generator=g) * 0.3
    targets = torch.randint(0, 200, (40,), generator=g)
    head, frequency = TargetHead(weight, weight), torch.bincount(targets, minlength=200)

    def of(head: TargetHead | StepHead, share: float) -> tuple[Tensor, Tensor]:
        x = hidden.clone().requires_grad_()
        loss = slot_losses(x, head, targets, teacher=teacher, share=share, chunk=7).loss.sum()
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    for share, bias in (
        (0.0, 0.01),
        (1.0, 0.06),
    ):  # of a logarithm's estimate: it is below, KL's more
        expected, gradient = of(head, share)
        almost, _ = of(SampledHead(head, frequency, 199, 0).at(0), share)
        torch.testing.assert_close(almost, expected, rtol=3e-3, atol=0)
        draws = [of(SampledHead(head, frequency, 80, 0).at(step), share) for step in range(200)]
        mean = torch.stack([d[0] for d in draws]).mean()
        torch.testing.assert_close(mean, expected, rtol=bias, atol=0)
        mean = torch.stack([d[1] for d in draws]).mean(0)
        assert F.cosine_similarity(mean.flatten(), gradient.flatten(), dim=0) > 0.995
    draw = lambda seed, step: of(SampledHead(head, frequency, 80, seed).at(step), 0.0)[0]  # noqa: E731
    assert (
        draw(0, 3) == draw(0, 3) and len({draw(*at).item() for at in ((0, 3), (0, 4), (1, 3))}) == 3
    )
