import math

import pytest
import torch
from torch.autograd import gradcheck

from asi import losses
from asi.losses import CodeOverlap


def random_probs(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)


def test_straight_through_is_hard_forward_and_soft_backward():
    logits = torch.tensor([[0.3, 1.2, -0.4]], requires_grad=True)
    weights = torch.tensor([[2.0, -1.0, 0.5]])
    hard = losses.straight_through(logits.softmax(-1))
    assert hard.tolist() == [[0.0, 1.0, 0.0]]
    (hard * weights).sum().backward()
    soft_logits = logits.detach().clone().requires_grad_()
    (soft_logits.softmax(-1) * weights).sum().backward()
    assert torch.allclose(logits.grad, soft_logits.grad)


def test_straight_through_gradient_can_be_weighted_and_switched_off():
    logits = torch.tensor([[0.3, 1.2]], requires_grad=True)
    full = torch.autograd.grad(losses.straight_through(logits.softmax(-1))[0, 0], logits)[0]
    half = torch.autograd.grad(losses.straight_through(logits.softmax(-1), 0.5)[0, 0], logits)[0]
    assert torch.allclose(half, full / 2)
    assert not losses.straight_through(logits.softmax(-1), 0.0).requires_grad


def test_generation_by_hand():
    log_probs = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]).log()
    docid = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    assert losses.generation(log_probs, docid).tolist() == pytest.approx([-math.log(0.5) - math.log(0.75)])


def test_generation_gives_the_heads_a_gradient():
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    log_probs = torch.tensor([[[0.9, 0.1]]]).log()
    losses.generation(log_probs, losses.straight_through(logits.softmax(-1))).sum().backward()
    assert logits.grad[0, 0, 0] < 0 < logits.grad[0, 0, 1]  # towards the code that the decoder likes


def test_discrete_contrastive_equals_the_printed_sum():
    queries, documents = random_probs(4, 3, 5), random_probs(4, 3, 5, seed=1)
    negatives = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.bool)
    margin, total = 0.3, 0.0
    for i in range(4):
        own = sum(((queries[i, p] - documents[i, p]) ** 2).sum() for p in range(3))
        for j in range(4):
            if negatives[i, j]:
                other = sum(((queries[i, p] - documents[j, p]) ** 2).sum() for p in range(3))
                total += max(0.0, float(own - other + margin))
    found = losses.discrete_contrastive(CodeOverlap.of(queries, documents), negatives, margin)
    assert float(found) == pytest.approx(total / 4)


def test_reverse_cross_entropy_equals_the_printed_maximum_capped():
    probs = random_probs(4, 3, 5)
    different = ~torch.eye(4, dtype=torch.bool)
    codes = probs.argmax(-1)
    pairs = [
        min(max(-math.log(float(probs[j, p, codes[k, p]])) for p in range(3)), math.log(5))
        for j in range(4)
        for k in range(4)
        if j != k
    ]
    assert float(losses.reverse_cross_entropy(probs.log(), different)) == pytest.approx(-sum(pairs) / len(pairs))


def test_in_batch_softmax_leaves_known_positives_out():
    scores = torch.tensor([[1.0, 5.0, 2.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    negatives = torch.tensor([[False, False, True], [True, False, True], [True, True, False]])
    first = -math.log(math.exp(1) / (math.exp(1) + math.exp(2)))  # the score 5 belongs to another positive
    others = -math.log(math.exp(1) / (math.exp(1) + 2))
    assert float(losses.in_batch_softmax(scores, negatives)) == pytest.approx((first + 2 * others) / 3)


def test_expected_match_by_brute_force():
    queries, documents = random_probs(3, 2, 4), random_probs(3, 2, 4, seed=1)
    negatives = ~torch.eye(3, dtype=torch.bool)
    scores = [
        [sum(math.log(float((queries[i, p] * documents[j, p]).sum()) + 1e-6) for p in range(2)) for j in range(3)]
        for i in range(3)
    ]
    rows = [-math.log(math.exp(row[i]) / sum(map(math.exp, row))) for i, row in enumerate(scores)]
    assert float(losses.expected_match(CodeOverlap.of(queries, documents), negatives)) == pytest.approx(sum(rows) / 3)


def test_code_balance_is_zero_for_even_use_and_log_v_for_one_code():
    even = torch.eye(4).unsqueeze(1)  # four documents, each with its own code
    assert float(losses.code_balance(even)) == pytest.approx(0, abs=1e-6)
    assert float(losses.code_balance(even[:1].expand(4, 1, 4))) == pytest.approx(math.log(4), rel=1e-5)


@pytest.mark.parametrize("name", ["discrete_contrastive", "vector_softmax", "expected_match"])
def test_gradients_of_the_batch_losses(name):
    negatives = ~torch.eye(3, dtype=torch.bool)
    left, right = (random_probs(3, 2, 4, seed=s).requires_grad_() for s in (2, 3))
    calls = {
        "discrete_contrastive": lambda q, d: losses.discrete_contrastive(CodeOverlap.of(q, d), negatives, 0.37),
        "vector_softmax": lambda q, d: losses.vector_softmax(q.flatten(1), d.flatten(1), negatives, 0.1),
        "expected_match": lambda q, d: losses.expected_match(CodeOverlap.of(q, d), negatives),
    }
    assert gradcheck(calls[name], (left, right))
