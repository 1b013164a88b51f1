"""Sec. 2.2 and 2.4 of arXiv 2601.02360 as identities, in float64."""

import pytest
import torch
from torch.testing import assert_close

from isthmus.subspace import (
    OpeningBoundary,
    SubspaceBoundary,
    grassmann_step,
    project,
    random_basis,
    reproject,
    split,
)
from isthmus.subspace.wire import as_on_wire

WIDTH, DIM, VOCAB = 32, 4, 100


def parts():
    torch.manual_seed(0)
    basis = random_basis(WIDTH, DIM, seed=0)
    table = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    tokens = torch.randint(0, VOCAB, (3, 5))
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    return basis, table, tokens, x


@pytest.mark.parametrize(("width", "dim"), [(32, 4), (32, 32), (7, 1), (128, 16)])
def test_basis_has_orthonormal_columns_and_depends_on_its_seed_alone(width, dim):
    basis = random_basis(width, dim, seed=3)
    assert_close(basis.T @ basis, torch.eye(dim, dtype=torch.float64))
    assert torch.equal(basis, random_basis(width, dim, seed=3))
    assert not torch.equal(basis, random_basis(width, dim, seed=4))


def test_boundary_projects_what_is_not_in_t_perp():  # sec. 2.2
    basis, table, tokens, x = parts()
    _, t_perp = split(table, basis)
    boundary = SubspaceBoundary(basis, t_perp)
    z = boundary.compress(x, tokens)
    assert z.shape == (3, 5, DIM)
    projector = basis @ basis.T
    expected = torch.stack([(x[b] - t_perp[tokens[b]]) @ projector + t_perp[tokens[b]] for b in range(3)])
    assert_close(boundary.expand(z, tokens), expected)


def test_subtracting_the_whole_table_gives_the_same_stream():  # docs/method.md, The embedding
    basis, table, tokens, x = parts()
    whole = SubspaceBoundary(basis, table)
    rest = SubspaceBoundary(basis, split(table, basis)[1])
    assert_close(
        whole.expand(whole.compress(x, tokens), tokens), rest.expand(rest.compress(x, tokens), tokens)
    )


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_an_opening_boundary_blends_the_projection_with_the_identity(share):
    basis, table, tokens, x = parts()
    a = torch.zeros((), dtype=torch.float64)
    boundary, closed = OpeningBoundary(basis, table, a), SubspaceBoundary(basis, table)
    a.fill_(share)  # in place, as from round to round
    x.requires_grad_()
    crossed = boundary.expand(boundary.compress(x, tokens), tokens)
    blend = basis @ basis.T + share * (torch.eye(WIDTH, dtype=torch.float64) - basis @ basis.T)
    assert_close(crossed, table[tokens] + (x - table[tokens]) @ blend)
    outgoing = torch.randn_like(x)
    (grad,) = torch.autograd.grad(crossed, x, outgoing)
    assert_close(grad, outgoing @ blend)
    if share == 0:
        assert_close(crossed, closed.expand(closed.compress(x, tokens), tokens))
    if share == 1:
        assert torch.equal(crossed, x)
        assert torch.equal(grad, outgoing)


def test_all_dimensions_carry_everything():  # k = d
    _, table, tokens, x = parts()
    boundary = SubspaceBoundary(random_basis(WIDTH, WIDTH, seed=1), table)
    assert_close(boundary.expand(boundary.compress(x, tokens), tokens), x)


def test_the_gradient_on_the_wire_is_grad_times_basis_and_autograd_through_the_whole_agrees():  # sec. 2.2
    basis, table, tokens, x = parts()
    boundary = SubspaceBoundary(basis, table)
    outgoing = torch.randn_like(x)  # gradient at the receiver's side

    x_there = x.clone().requires_grad_()
    whole = boundary.expand(boundary.compress(x_there, tokens), tokens)
    (direct,) = torch.autograd.grad(whole, x_there, outgoing)

    z = boundary.compress(x, tokens).requires_grad_()
    (on_wire,) = torch.autograd.grad(boundary.expand(z, tokens), z, outgoing)
    assert_close(on_wire, outgoing @ basis)
    assert_close(direct, on_wire @ basis.T)


def test_split_and_reprojection_keep_the_table_and_separate_the_parts():  # eqs. 3-4
    basis, table, _, _ = parts()
    t_s, t_perp = split(table, basis)
    drifted = t_s + 0.1 * torch.randn_like(t_s)  # an outer step that left S
    new_s, new_perp = reproject(drifted, t_perp, basis)
    assert_close(new_s + new_perp, drifted + t_perp)
    assert_close(new_perp @ basis, torch.zeros(VOCAB, DIM, dtype=torch.float64))
    assert_close(new_s - project(new_s, basis), torch.zeros_like(new_s))
    # One table is all there is to keep: splitting TE anew gives the same parts.
    assert_close(split(drifted + t_perp, basis)[0], new_s)


def test_the_wire_rounds_the_stream_and_its_gradient():
    z = torch.randn(4, 8, requires_grad=True)
    grad = torch.randn(4, 8)
    out = as_on_wire(z, torch.bfloat16)
    out.backward(grad)
    assert torch.equal(out, z.detach().bfloat16().float())
    assert z.grad is not None
    assert torch.equal(z.grad, grad.bfloat16().float())


def test_a_grassmann_step_stays_orthonormal_and_catches_more_of_the_gradient():  # Table 5c
    basis, _, _, _ = parts()
    grads = torch.randn(200, WIDTH, dtype=torch.float64) * torch.linspace(3, 0.1, WIDTH, dtype=torch.float64)
    covariance = grads.T @ grads
    turned = grassmann_step(basis, covariance, lr=0.1)
    assert_close(turned.T @ turned, torch.eye(DIM, dtype=torch.float64))

    def lost(u):
        return (grads - project(grads, u)).square().sum()

    assert lost(turned) < lost(basis)
