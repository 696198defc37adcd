import pytest
import torch
import torch.nn.functional as F

from mmldlm.models.linear_cross_entropy import Candidates, linear_cross_entropy, linear_logits


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_equals_plain_cross_entropy_with_gradients(chunk_rows):
    torch.manual_seed(0)
    hidden = torch.randn(23, 16, requires_grad=True)
    weight, bias = torch.randn(50, 16, requires_grad=True), torch.randn(50, requires_grad=True)
    targets, weights = torch.randint(1, 50, (23,)), torch.rand(23)
    loss, nll, correct = linear_cross_entropy(
        hidden, weight, bias, targets, weights, 0, chunk_rows
    )
    (2.5 * loss).backward()
    grads = [t.grad.clone() for t in (hidden, weight, bias)]
    for tensor in (hidden, weight, bias):
        tensor.grad = None

    logits = (hidden.double() @ weight.double().t() + bias.double()).index_fill(
        1, torch.tensor([0]), float("-inf")
    )
    plain = F.cross_entropy(logits, targets, reduction="none")
    (2.5 * (plain * weights).sum()).backward()
    torch.testing.assert_close(nll.double(), plain.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(correct, logits.argmax(-1) == targets)
    for grad, tensor in zip(grads, (hidden, weight, bias), strict=True):
        torch.testing.assert_close(grad, tensor.grad, rtol=1e-4, atol=1e-5)


def test_no_rows_give_zero_loss_and_zero_gradients():
    weight, bias = torch.randn(9, 4, requires_grad=True), torch.zeros(9, requires_grad=True)
    hidden = torch.zeros(0, 4, requires_grad=True)
    loss, nll, _ = linear_cross_entropy(
        hidden, weight, bias, torch.zeros(0, dtype=torch.int64), torch.zeros(0), 3
    )
    loss.backward()
    assert loss.item() == 0 and len(nll) == 0
    assert torch.equal(weight.grad, torch.zeros(9, 4)) and torch.equal(bias.grad, torch.zeros(9))


def test_excluded_id_has_no_probability_and_no_gradient():
    weight, bias = torch.randn(6, 4, requires_grad=True), torch.zeros(6, requires_grad=True)
    hidden = torch.randn(5, 4)
    bias.data[2] = 100.0  # would win everywhere
    loss, nll, correct = linear_cross_entropy(
        hidden, weight, bias, torch.ones(5, dtype=torch.int64), torch.ones(5), 2
    )
    loss.backward()
    assert torch.isfinite(nll).all() and nll.max() < 50
    assert torch.equal(weight.grad[2], torch.zeros(4)) and bias.grad[2] == 0


@pytest.mark.parametrize(
    "num_rows, chunk_rows", [(40, 7), (40, 20), (40, 40), (200, 80), (200, 150), (200, 200)]
)
def test_bf16_is_as_near_to_fp32_as_its_rounding(num_rows, chunk_rows):
    """One chunk, two (summed in bf16) and more (in fp32), with one softmax at a time and with
    several; targets repeat, as frequent tokens do."""
    torch.manual_seed(0)
    given = [torch.randn(num_rows, 32), torch.randn(50, 32) / 6, torch.randn(50) / 6]
    targets, weights = torch.randint(1, 6, (num_rows,)), torch.rand(num_rows)
    targets[::4] = (given[0] @ given[1].T + given[2])[::4, 1:].argmax(-1) + 1
    found, right = [], []
    for dtype, rows in ((torch.float32, num_rows), (torch.bfloat16, chunk_rows)):
        parameters = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in given]
        loss, nll, correct = linear_cross_entropy(*parameters, targets, weights, 0, rows)
        loss.backward()
        found.append([loss.detach(), nll, *(parameter.grad.float() for parameter in parameters)])
        right.append(correct)
    for exact, low in zip(*found):
        assert (low - exact).norm() / exact.norm() < 1e-2
    assert (right[0] == right[1]).float().mean() > 0.9 and right[0].float().mean() > 0.2


def head_with(tokens, frequent: int, sampled: int, population: int, chunk_rows=3):
    """Loss, NLLs and gradients of 9 rows over 20 tokens, [MASK] = 19; targets of all kinds, and
    repeated.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator, requires_grad=True) for shape in ((9, 5), (20, 5))
    )
    bias = torch.randn(20, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 3, 5, 5, 11, 11, 18, 2, 7])
    candidates = None
    if tokens is not None:
        own = sorted({int(target) for target in targets} - set(range(frequent)))
        columns = [
            t if t < frequent else frequent + sampled + own.index(t) for t in targets.tolist()
        ]
        ids = torch.tensor([*range(frequent), *tokens, *own])
        candidates = Candidates(ids, torch.tensor(columns), frequent, sampled, population)
    loss, nll, _ = linear_cross_entropy(
        hidden, weight, bias, targets, torch.linspace(0.5, 2, 9), 19, chunk_rows, candidates
    )
    loss.backward()
    return loss.detach(), nll, hidden.grad, weight.grad, bias.grad


def test_candidates_that_are_all_tokens_give_the_exact_loss_and_gradients():
    for found, expected in zip(
        head_with(range(4, 19), 4, 15, 15), head_with(None, 0, 0, 0), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_normalizer_of_candidates_is_unbiased():
    """The mean of exp(NLL) = normalizer / exp(target's logit) over all samples of two of 15
    tokens.
    """
    exact = head_with(None, 0, 0, 0)[1].exp()
    pairs = [
        (first, second) for first in range(4, 19) for second in range(4, 19) if first != second
    ]
    mean = torch.stack([head_with(pair, 4, 2, 15)[1].exp() for pair in pairs]).mean(0)
    # The target counts by itself: a sample of the others holds it, hidden, with probability 2 /
    # 15.
    frequent_rows = torch.tensor([0, 1, 7])
    torch.testing.assert_close(mean[frequent_rows], exact[frequent_rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean, exact, rtol=0.15, atol=0.0)


@pytest.mark.parametrize("low", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_without_gradients_are_those_with_gradients(low):
    torch.manual_seed(0)
    dtype = torch.float64 if low == torch.float64 else torch.float32
    hidden, weight, bias = (torch.randn(size, dtype=dtype) for size in ((7, 16), (50, 16), (50,)))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low == torch.bfloat16):
        expected = linear_logits(hidden, weight, bias)
        with torch.no_grad():
            found = linear_logits(hidden, weight, bias)
            nothing = linear_logits(hidden[:0], weight, bias)
    assert found.dtype == expected.dtype == low and nothing.shape == (0, 50)
    torch.testing.assert_close(found, expected)
    plain = (hidden.to(low).double() @ weight.to(low).double().t() + bias.to(low).double()).to(low)
    torch.testing.assert_close(found, plain)
