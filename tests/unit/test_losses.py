"""The chunked head operator against losses written out with full logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deepspec.losses import RowCoefficients, Teacher, head_losses

H, RANK, POSITIONS = 6, 3, 9


class Problem(NamedTuple):
    leaves: dict[str, Tensor]
    labels: Tensor
    teacher: Teacher
    coefficients: RowCoefficients
    softcap: float | None


def _problem(
    *,
    rows: int = 41,
    vocab: int = 11,
    has_latent: bool = True,
    softcap: float | None = None,
    is_reduced: bool = False,
    own_head: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    full = draw(vocab + 4, H)
    frozen = full[:vocab] if is_reduced else draw(vocab, H)
    hidden = draw(POSITIONS, H)
    logits = hidden @ full.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    leaves = {"hidden": draw(rows, H).requires_grad_()}
    leaves["weight"] = draw(vocab, H).requires_grad_() if own_head else frozen
    if has_latent:
        leaves |= {"latent": draw(rows, RANK).requires_grad_(), "latent_weight": draw(vocab, RANK).requires_grad_()}
    taught_by = torch.randint(0, POSITIONS, (rows,), generator=generator).sort().values
    labels = torch.randint(-1 if is_reduced else 0, vocab, (rows,), generator=generator)
    teacher = Teacher(hidden, taught_by, frozen, torch.logsumexp(logits, dim=-1) if is_reduced else None)
    positive = [draw(rows).abs() for _ in range(3)]
    positive[1][::5] = 0.0
    return Problem(leaves, labels, teacher, RowCoefficients(*positive), softcap)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _naive(problem: Problem) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Row by row, token by token."""
    leaves, teacher = problem.leaves, problem.teacher
    objective = torch.zeros((), dtype=leaves["hidden"].dtype)
    terms: dict[str, list[Tensor]] = {name: [] for name in ("ce", "tv", "soft_ce", "acceptance", "is_top")}
    for row, label in enumerate(problem.labels.tolist()):
        logits = _cap(leaves["weight"] @ leaves["hidden"][row], problem.softcap)
        if "latent" in leaves:
            logits = logits + leaves["latent_weight"] @ leaves["latent"][row]
        log_q = torch.log_softmax(logits, dim=-1)
        position = int(teacher.rows[row])
        taught = _cap(teacher.weight @ teacher.hidden[position], problem.softcap)
        p = torch.softmax(taught, dim=-1)
        if teacher.log_normaliser is not None:
            p = torch.exp(taught - teacher.log_normaliser[position])
        outside = 1 - p.sum() if teacher.log_normaliser is not None else torch.zeros(())
        ce = -log_q[label] if label >= 0 else 0.0 * log_q[0]
        tv = sum((log_q[token].exp() - p[token]).abs() for token in range(len(p))) + outside
        soft_ce = -sum(p[token] * log_q[token] for token in range(len(p)))
        acceptance = sum(torch.minimum(p[token], log_q[token].exp()) for token in range(len(p)))
        is_top = torch.tensor(float(int(logits.argmax()) == label))
        for name, value in zip(terms, (ce, tv, soft_ce, acceptance, is_top), strict=True):
            terms[name].append(torch.as_tensor(value).detach())
        weights = problem.coefficients
        objective = objective + weights.ce[row] * ce + weights.tv[row] * tv + weights.soft_ce[row] * soft_ce
    return objective, terms


def _run(problem: Problem, **more: Any) -> tuple[Tensor, Any]:
    leaves = problem.leaves
    return head_losses(
        leaves["hidden"],
        problem.labels,
        problem.teacher,
        problem.coefficients,
        leaves["weight"],
        latent=leaves.get("latent"),
        latent_weight=leaves.get("latent_weight"),
        softcap=problem.softcap,
        **more,
    )


def _gradients(problem: Problem, objective: Tensor) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in problem.leaves.items() if leaf.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(objective * 1.7, list(wanted.values())), strict=True))


CASES: list[dict[str, Any]] = [
    {},
    {"has_latent": False},
    {"softcap": 2.0},
    {"is_reduced": True},
    {"is_reduced": True, "softcap": 2.0},
    {"own_head": True},
    {"own_head": True, "has_latent": False, "softcap": 1.5, "is_reduced": True},
]

# Of 41 rows, with vocabulary 11 in float64: the least there is (4 rows); chunks of 20 rows in tiles of 6; one of all.
SIZES = [(1, 1), (20 * 2 * 8 * 11, 6 * 8 * 11), (None, None)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("chunk_bytes", "tile_bytes"), SIZES)
def test_terms_and_gradients_equal_those_of_a_loop_over_rows_and_tokens(
    case: dict[str, Any], chunk_bytes: int | None, tile_bytes: int | None
) -> None:
    problem = _problem(**case)
    expected, terms = _naive(problem)
    objective, found = _run(problem, chunk_bytes=chunk_bytes, tile_bytes=tile_bytes)
    torch.testing.assert_close(objective, expected, rtol=1e-9, atol=1e-9)
    for name, values in terms.items():
        torch.testing.assert_close(getattr(found, name), torch.stack(values).to(torch.float64), rtol=1e-9, atol=1e-9)
    wanted = _gradients(problem, expected)
    for name, gradient in _gradients(problem, objective).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_single_precision_gradients_are_within_1e_4_of_the_exact_ones(case: dict[str, Any]) -> None:
    exact = _problem(**case)
    wanted = _gradients(exact, _naive(exact)[0])
    single = _problem(**case, dtype=torch.float32)
    objective, terms = _run(single)
    assert all(term.dtype == torch.float32 for term in terms)
    for name, gradient in _gradients(single, objective).items():
        assert (gradient - wanted[name]).norm() <= 1e-4 * wanted[name].norm(), name


# A bf16 mantissa has 8 bits: inputs and products each carry 2^-9, so logits of size 4 move by a few 2^-7. Where q and p
# nearly agree that changes the sign of a token's TV slope, a jump that no precision bounds: hence the wider bound.
@pytest.mark.parametrize(("has_tv", "bound"), [(False, 0.02), (True, 0.25)])
@pytest.mark.parametrize("case", CASES)
def test_autocast_gradients_are_within_the_rounding_of_bfloat16_products(
    case: dict[str, Any], has_tv: bool, bound: float
) -> None:
    exact, single = _problem(**case), _problem(**case, dtype=torch.float32)
    if not has_tv:
        exact, single = (
            problem._replace(coefficients=problem.coefficients._replace(tv=torch.zeros_like(problem.coefficients.tv)))
            for problem in (exact, single)
        )
    wanted = _gradients(exact, _naive(exact)[0])
    with torch.autocast("cpu", torch.bfloat16):
        objective, terms = _run(single)
    assert all(term.dtype == torch.float32 for term in terms)
    for name, gradient in _gradients(single, objective).items():
        assert gradient.dtype == torch.float32
        assert (gradient - wanted[name]).norm() <= bound * wanted[name].norm(), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_pass_a_finite_difference_check(case: dict[str, Any]) -> None:
    # TV has a kink where q = p; at these random points no token lies within the step of it.
    problem = _problem(rows=5, vocab=4, **case)
    names = [name for name, leaf in problem.leaves.items() if leaf.requires_grad]

    def objective(*values: Tensor) -> Tensor:
        leaves = problem.leaves | dict(zip(names, values, strict=True))
        return _run(problem._replace(leaves=leaves))[0]

    assert torch.autograd.gradcheck(objective, [problem.leaves[name] for name in names], eps=1e-7, atol=1e-5)


def _naive_full_logits(problem: Problem) -> Tensor:
    """The objective from all logits at once, products in the autocast dtype, softmaxes in fp32, autograd."""
    leaves, teacher, weights = problem.leaves, problem.teacher, problem.coefficients
    logits = _cap((leaves["hidden"] @ leaves["weight"].T).float(), problem.softcap)
    if "latent" in leaves:
        logits = logits + (leaves["latent"] @ leaves["latent_weight"].T).float()
    log_q = torch.log_softmax(logits, dim=-1)
    taught = _cap((teacher.hidden[teacher.rows] @ teacher.weight.T).float(), problem.softcap)
    p = torch.softmax(taught, dim=-1)
    if teacher.log_normaliser is not None:
        p = torch.exp(taught - teacher.log_normaliser[teacher.rows, None])
    inside = problem.labels >= 0
    ce = -log_q.gather(1, problem.labels.clamp(min=0)[:, None])[:, 0] * inside
    tv, soft_ce = (log_q.exp() - p).abs().sum(dim=-1), -(p * log_q).sum(dim=-1)
    return (weights.ce * ce + weights.tv * tv + weights.soft_ce * soft_ce).sum()


# Both round the same products to 8 bits, in another order: the gradient of the logits carries 2^-9 in each, and where a
# logit sum rounds differently a token's TV slope jumps.
@pytest.mark.parametrize(("has_tv", "bound"), [(False, 0.01), (True, 0.05)])
@pytest.mark.parametrize("case", CASES)
def test_autocast_gradients_are_those_of_naive_bfloat16_training(
    case: dict[str, Any], has_tv: bool, bound: float
) -> None:
    problem = _problem(rows=200, vocab=301, **case, dtype=torch.float32)
    if not has_tv:
        problem.coefficients.tv.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = _gradients(problem, _naive_full_logits(problem))
        found = _gradients(problem, _run(problem, chunk_bytes=64 * 4 * 301, tile_bytes=16 * 4 * 301)[0])
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= bound * wanted[name].norm(), name


@pytest.mark.parametrize("case", CASES)
def test_results_do_not_depend_on_the_sizes_of_chunks_and_tiles_nor_on_the_order_of_rows(case: dict[str, Any]) -> None:
    problem = _problem(**case)
    objective, terms = _run(problem)
    gradients = _gradients(problem, objective)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(1))
    mixed = problem._replace(
        leaves={name: leaf[order] if len(leaf) == 41 else leaf for name, leaf in problem.leaves.items()},
        labels=problem.labels[order],
        teacher=problem.teacher._replace(rows=problem.teacher.rows[order]),
        coefficients=RowCoefficients(*(factors[order] for factors in problem.coefficients)),
    )
    for rows in (4, 5, 16, 40, 41):
        for tile in (4, 7, 41):
            found, found_terms = _run(mixed, chunk_bytes=rows * 2 * 8 * 11, tile_bytes=tile * 8 * 11)
            torch.testing.assert_close(found, objective, rtol=1e-12, atol=0)
            for one, other in zip(found_terms, terms, strict=True):
                torch.testing.assert_close(one, other[order], rtol=1e-12, atol=1e-12)
            wanted = {name: leaf for name, leaf in problem.leaves.items() if leaf.requires_grad}
            again = torch.autograd.grad(found * 1.7, list(wanted.values()), retain_graph=True)
            for name, gradient in zip(wanted, again, strict=True):
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_results_are_the_same_bit_by_bit_with_any_number_of_threads(case: dict[str, Any]) -> None:
    problem, before = _problem(**case), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            # Eight rows a chunk in tiles of two, so that threads have tiles of their own.
            objective, terms = _run(problem, chunk_bytes=8 * 3 * 8 * 11, tile_bytes=4 * 8 * 11)
            results.append([objective, *terms, *_gradients(problem, objective).values()])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, found) for one, found in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "present", [("ce",), ("tv",), ("soft_ce",), ("ce", "tv"), ("tv", "soft_ce"), ("ce", "soft_ce")]
)
@pytest.mark.parametrize("case", CASES)
def test_losses_without_coefficients_are_those_of_zero_coefficients(
    present: tuple[str, ...], case: dict[str, Any]
) -> None:
    problem = _problem(**case)
    given = problem.coefficients._asdict()
    zeros = problem._replace(
        coefficients=RowCoefficients(
            *(value if name in present else torch.zeros_like(value) for name, value in given.items())
        )
    )
    left_out = problem._replace(
        coefficients=RowCoefficients(*(value if name in present else None for name, value in given.items()))
    )
    (wanted, wanted_terms), (found, terms) = _run(zeros), _run(left_out)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = _gradients(problem, wanted)
    for name, gradient in _gradients(problem, found).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12, msg=name)
    for name, term in wanted_terms._asdict().items():
        if name != "soft_ce" or "soft_ce" in present:
            torch.testing.assert_close(getattr(terms, name), term, rtol=0, atol=0)
    assert bool(terms.soft_ce.isnan().all()) == ("soft_ce" not in present)


def test_one_row_has_the_losses_that_it_has_among_others() -> None:
    problem = _problem(softcap=2.0)
    _, terms = _run(problem)
    row = slice(17, 18)
    leaves = {name: leaf[row] if name in ("hidden", "latent") else leaf for name, leaf in problem.leaves.items()}
    teacher = problem.teacher._replace(rows=problem.teacher.rows[row])
    factors = RowCoefficients(*(factor[row] for factor in problem.coefficients))
    _, alone = _run(Problem(leaves, problem.labels[row], teacher, factors, 2.0))
    for one, other in zip(alone, terms, strict=True):
        torch.testing.assert_close(one, other[row], rtol=1e-12, atol=1e-12)


def test_coefficients_of_zero_give_a_zero_objective_and_zero_gradients_but_all_terms() -> None:
    problem = _problem(own_head=True)
    _, terms = _run(problem)
    zero = torch.zeros(41, dtype=torch.float64)
    objective, found = _run(problem._replace(coefficients=RowCoefficients(zero, zero, zero)))
    assert objective.item() == 0.0
    assert all(bool((gradient == 0).all()) for gradient in _gradients(problem, objective).values())
    for one, other in zip(found, terms, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_logits_far_from_zero_give_finite_losses_and_gradients() -> None:
    problem = _problem(dtype=torch.float32)
    with torch.no_grad():
        problem.leaves["hidden"].mul_(1000.0)
    exact = problem._replace(leaves={name: leaf.detach().double() for name, leaf in problem.leaves.items()})
    exact = exact._replace(
        teacher=problem.teacher._replace(hidden=problem.teacher.hidden.double(), weight=problem.teacher.weight.double())
    )
    objective, terms = _run(problem)
    torch.testing.assert_close(terms.ce.double(), _run(exact)[1].ce, rtol=1e-4, atol=1e-2)
    assert terms.ce.max() > 1000
    assert all(bool(gradient.isfinite().all()) for gradient in _gradients(problem, objective).values())


def test_of_equal_logits_the_first_is_the_most_likely_token() -> None:
    # Bfloat16 products make such ties common, and greedy decoding takes the first.
    problem = _problem(rows=22, has_latent=False)
    rows = torch.cat([problem.teacher.weight[:5], problem.teacher.weight[:6]])
    labels = torch.arange(11).repeat(2)
    _, terms = _run(problem._replace(leaves=problem.leaves | {"weight": rows}, labels=labels))
    logits = problem.leaves["hidden"] @ rows.T
    assert ((logits == logits.amax(dim=1, keepdim=True)).sum(dim=1) == 2).any()
    torch.testing.assert_close(terms.is_top, (logits.argmax(dim=1) == labels).double())


def test_two_backward_passes_add_their_gradients() -> None:
    problem = _problem(own_head=True, softcap=2.0)
    whole = _gradients(problem, _run(problem)[0])
    leaves = problem.leaves
    for rows in (slice(0, 13), slice(13, 41)):
        part = {name: leaf[rows] if name in ("hidden", "latent") else leaf for name, leaf in leaves.items()}
        teacher = problem.teacher._replace(rows=problem.teacher.rows[rows])
        factors = RowCoefficients(*(factor[rows] for factor in problem.coefficients))
        (_run(Problem(part, problem.labels[rows], teacher, factors, 2.0))[0] * 1.7).backward()
    for name, gradient in whole.items():
        torch.testing.assert_close(leaves[name].grad, gradient, rtol=1e-10, atol=1e-10)
    objective, _ = _run(problem)
    for _ in range(2):
        (objective * 1.7).backward(retain_graph=True)
    for name, gradient in whole.items():
        torch.testing.assert_close(leaves[name].grad, 3 * gradient, rtol=1e-10, atol=1e-10)


# Dynamo itself looks at .grad of what crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("case", [{"own_head": True, "softcap": 2.0}, {"is_reduced": True}])
def test_a_compiled_function_around_the_operator_gives_the_same_losses_and_gradients(case: dict[str, Any]) -> None:
    problem = _problem(**case)
    names = [name for name, leaf in problem.leaves.items() if leaf.requires_grad]

    def step(mixer: Tensor, *values: Tensor) -> tuple[Tensor, Any]:
        leaves = problem.leaves | dict(zip(names, values, strict=True))
        leaves["hidden"] = torch.tanh(leaves["hidden"] @ mixer)
        objective, terms = _run(problem._replace(leaves=leaves), chunk_bytes=16 * 2 * 8 * 11)
        return objective * 3.0 + mixer.square().sum(), terms

    torch._dynamo.reset()
    mixer = torch.eye(H, dtype=torch.float64, requires_grad=True)
    inputs = [mixer, *(problem.leaves[name] for name in names)]
    wanted, wanted_terms = step(*inputs)
    found, terms = torch.compile(step, backend="aot_eager")(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for one, other in zip(terms, wanted_terms, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_acceptance_is_the_overlap_of_p_and_q_and_half_the_l1_distance_short_of_one() -> None:
    problem = _problem(is_reduced=True)
    _, terms = _run(problem)
    torch.testing.assert_close(terms.acceptance, 1 - 0.5 * terms.tv, rtol=0, atol=1e-12)
    assert bool(((terms.acceptance > 0) & (terms.acceptance < 1)).all())


def test_a_draft_equal_to_its_teacher_is_always_accepted() -> None:
    problem = _problem(has_latent=False)
    same = problem.teacher.hidden[problem.teacher.rows].clone().requires_grad_()
    _, terms = _run(problem._replace(leaves={"hidden": same, "weight": problem.teacher.weight}))
    torch.testing.assert_close(terms.acceptance, torch.ones(len(same), dtype=torch.float64))


def test_labels_outside_the_draft_vocabulary_drop_the_cross_entropy_alone() -> None:
    problem = _problem(is_reduced=True)
    outside = problem.labels < 0
    _, terms = _run(problem)
    assert outside.any()
    assert bool((terms.ce[outside] == 0).all())
    assert bool((terms.is_top[outside] == 0).all())
    assert bool((terms.tv[outside] > 0).all())
    only_ce = RowCoefficients(torch.ones(41).double(), torch.zeros(41).double(), torch.zeros(41).double())
    objective, _ = _run(problem._replace(coefficients=only_ce))
    gradient = _gradients(problem, objective)["hidden"]
    assert bool((gradient[outside] == 0).all())
    assert bool((gradient[~outside] != 0).any(dim=1).all())


def test_no_rows_give_a_zero_objective_and_zero_gradients() -> None:
    problem = _problem(rows=0, own_head=True)
    objective, terms = _run(problem)
    assert objective.item() == 0.0
    assert all(len(term) == 0 for term in terms)
    for gradient in _gradients(problem, objective).values():
        assert gradient.abs().sum() == 0


def test_the_frozen_head_gets_no_gradient_and_the_terms_are_detached() -> None:
    problem = _problem()
    objective, terms = _run(problem)
    objective.backward()
    assert problem.leaves["weight"].grad is None
    assert not any(term.requires_grad for term in terms)
