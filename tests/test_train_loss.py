"""The chunked objective equals the obvious one, in value and in every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from extract.head import TargetHead
from train.loss import default_gamma, drafter_loss, slot_weights
from train.sampling import SampledHead


def setup(n: int = 23, hidden: int = 12, vocabulary: int = 40, *, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(n, hidden, generator=g, dtype=torch.float64).float()
    weight = torch.randn(vocabulary, hidden, generator=g)
    targets = torch.randint(0, vocabulary, (n,), generator=g)
    weights = torch.rand(n, generator=g)
    teacher = torch.randn(n, hidden, generator=g)
    return h, weight, targets, weights, teacher


@pytest.mark.parametrize("chunk", [1, 7, 23, 1024])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_objective(chunk, share, soft_cap, bias):
    h, weight, targets, weights, teacher = setup()
    b = torch.randn(len(weight), generator=torch.Generator().manual_seed(9)) if bias else None
    head = TargetHead(weight, weight, bias=b, soft_cap=soft_cap)

    def logits(x):
        raw = F.linear(x, weight, b)
        return raw if soft_cap is None else torch.tanh(raw / soft_cap) * soft_cap

    a = h.clone().requires_grad_()
    numerator, denominator, correct = drafter_loss(
        a, head, targets, weights, teacher=teacher, share=share, chunk=chunk
    )
    (numerator / denominator).backward()

    c = h.clone().requires_grad_()
    log_p = logits(c).log_softmax(-1)
    q = logits(teacher).softmax(-1)
    each = (1 - share) * F.nll_loss(log_p, targets, reduction="none") + share * F.kl_div(
        log_p, q, reduction="none"
    ).sum(-1)
    expected = (each * weights).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(numerator / denominator, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.grad, c.grad, rtol=1e-4, atol=1e-6)
    assert correct.tolist() == (logits(h).argmax(-1) == targets).tolist()


def test_bfloat16_head_is_close_and_the_gradient_points_the_same_way():
    h, weight, targets, weights, _ = setup(200, 64, 500)
    exact = h.clone().requires_grad_()
    drafter_loss(exact, TargetHead(weight, weight), targets, weights)[0].backward()
    rounded = h.clone().requires_grad_()
    half = weight.to(torch.bfloat16)
    numerator, _, _ = drafter_loss(rounded, TargetHead(half, half), targets, weights)
    numerator.backward()
    cosine = F.cosine_similarity(exact.grad.flatten(), rounded.grad.flatten(), dim=0)
    assert cosine > 0.999


def test_no_supervised_slot_gives_zero_loss_and_zero_gradient():
    h, weight, targets, _, _ = setup()
    empty = h[:0].requires_grad_()
    numerator, denominator, _ = drafter_loss(
        empty, TargetHead(weight, weight), targets[:0], torch.zeros(0)
    )
    numerator.backward()
    assert numerator == 0 and denominator == 0


def test_weights_decay_from_one_and_skip_what_is_not_supervised():
    supervised = torch.tensor([[[False, True, True, False]]])
    weights = slot_weights(supervised, gamma=2.0)[0, 0]
    assert weights[0] == 0 and weights[3] == 0
    torch.testing.assert_close(weights[1:3], torch.tensor([1.0, 0.60653067]))
    assert [default_gamma(b) for b in (16, 10, 8, 4)] == [7.0, 5.0, 4.0, 2.0]


def test_sampled_head_stands_for_the_whole_vocabulary():
    """Averaged over many draws, loss and gradient come close to the full softmax; with all tokens but one they are it."""
    h, weight, targets, weights, _ = setup(40, 16, 200)
    weight = weight * 0.3
    head = TargetHead(weight, weight)
    full = h.clone().requires_grad_()
    expected = drafter_loss(full, head, targets, weights)[0]
    expected.backward()
    frequency = torch.bincount(targets, minlength=200)

    def at(count: int, step: int):
        x = h.clone().requires_grad_()
        loss = drafter_loss(
            x, SampledHead(head, frequency, count, 0).at(step), targets, weights, chunk=7
        )[0]
        loss.backward()
        return loss.detach(), x.grad

    loss, _ = at(199, 0)
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    draws = [at(80, step) for step in range(200)]
    torch.testing.assert_close(
        torch.stack([d[0] for d in draws]).mean(), expected.detach(), rtol=1e-2, atol=0
    )
    mean = torch.stack([d[1] for d in draws]).mean(0)
    assert F.cosine_similarity(mean.flatten(), full.grad.flatten(), dim=0) > 0.995
    assert at(80, 3)[0] == at(80, 3)[0] != at(80, 4)[0]


def test_sampled_gradient_is_the_gradient_of_the_sampled_loss():
    h, weight, targets, weights, _ = setup(9, 6, 50)
    bias = torch.linspace(-1, 1, 50)
    sampled = SampledHead(
        TargetHead(weight, weight, bias=bias), torch.bincount(targets, minlength=50), 20, 1
    ).at(5)
    x = h.clone().requires_grad_()
    drafter_loss(x, sampled, targets, weights)[0].backward()

    y = h.clone().requires_grad_()
    own = (y * weight[targets]).sum(-1) + bias[targets]
    logits = y @ sampled.weight.T + sampled.bias
    logits = logits.masked_fill(sampled.ids == targets[:, None], -torch.inf)
    ((torch.cat([logits, own[:, None]], 1).logsumexp(1) - own) * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-6)
