"""The update of each optimiser, for parameters with the same hyperparameters: a single run's or those of stacked runs.

An update is in place. Where `alive` is false it changes nothing; the host does not read `alive`.

Shapes: R runs; `...R` marks an axis that only stacked runs have. N numbers of a run; L equal matrices, n x m each.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normlab.catalogue.optimizers.options import SGD, AdamW, Lion, Muon, NorMuon, Orthogonal

ROWS = "row_square"
"""The kind of moment that has one number for each row of a matrix, (n, 1)."""

Number = float | Tensor
TensorList = list[Tensor]
"""One tensor for each parameter: the parameters, their gradients, or a kind of moment."""


@dataclass(slots=True)
class Group:
    """Parameters of a single run, and what their update needs."""

    names: list[str]
    params: TensorList
    grads: TensorList
    moments: list[TensorList]
    """One for each kind of the update's moments."""
    count: Tensor
    """Updates made, with this one."""
    lr: float | Tensor
    weight_decay: float
    alive: Tensor

    @property
    def skip(self) -> Tensor:
        """1 if nothing may change, else 0."""
        return (~self.alive).float()


@dataclass(slots=True)
class StackedGroup:
    """Adjacent columns of the buffers of stacked runs, (R, N), and what their update needs."""

    params: Tensor
    grads: Tensor
    """The update may overwrite them."""
    moments: list[Tensor]
    decayed: int
    """Number of columns with weight decay, the first ones."""
    coefficients: Any
    """A tensor, (K, R, 1), or the numbers of a single run."""
    alive: Tensor
    """Whether to make the update, (R, 1)."""
    names: list[str]
    views: list[TensorList]
    """The parameters, the gradients and the moments in the buffers, each by parameter, (R, ...)."""

    def set(self, buffer: Tensor, values: Tensor) -> None:
        """Write the values of the runs that are alive into a buffer."""
        torch.where(self.alive, values, buffer, out=buffer)


def adamw(options: AdamW, group: Group) -> None:
    mean, square = group.moments
    # found_inf skips the update on the device, so that the host need not wait for `alive`.
    torch._fused_adamw_(
        group.params, group.grads, mean, square, [], [group.count] * len(group.params), lr=group.lr,
        beta1=options.beta1, beta2=options.beta2, weight_decay=group.weight_decay, eps=options.eps, amsgrad=False,
        maximize=False, found_inf=group.skip,
    )  # fmt: skip


def adamw_coefficients(options: AdamW, lr: float, count: int) -> tuple[float, ...]:
    # m^ and v^ divide by numbers of the step, not of a parameter, so these are folded into two coefficients.
    corrections = [1 - beta**count for beta in (options.beta1, options.beta2)]
    decay_factor = 1 - lr * options.decay_per_lr
    return 1 - options.beta1, 1 - options.beta2, lr / corrections[0], 1 / corrections[1], decay_factor


def stacked_adamw(options: AdamW, group: StackedGroup) -> None:
    (mean, square), (mean_weight, square_weight, rate, correction, decay_factor) = group.moments, group.coefficients
    params, grads = group.params, group.grads
    group.set(mean, mean.lerp(grads, mean_weight))
    group.set(square, square.lerp(grads.square_(), square_weight))
    # The gradients are no longer needed, and their buffer holds the step.
    step = torch.mul(square, correction, out=grads).sqrt_().add_(options.eps)
    torch.div(mean, step, out=step)
    # The decay is of the old parameters and comes first, as in torch's AdamW.
    params[:, : group.decayed].mul_(decay_factor.where(group.alive, 1))
    group.set(params, torch.addcmul(params, step, rate, value=-1, out=step))


def sgd(options: SGD, group: Group) -> None:
    # The kernel requires an empty list without momentum.
    velocity = group.moments[0] if options.momentum else []
    # With dampening 0 and a velocity that starts at 0, the first step is torch's own, which copies the gradient.
    torch._fused_sgd_(
        group.params, group.grads, velocity, weight_decay=group.weight_decay, momentum=options.momentum,
        lr=group.lr,  # pyright: ignore[reportArgumentType]  # torch's stub has no tensor
        dampening=0.0, nesterov=options.nesterov, maximize=False, is_first_step=False, found_inf=group.skip,
    )  # fmt: skip


def sgd_coefficients(options: SGD, lr: float, count: int) -> tuple[float, ...]:
    return lr, options.decay_per_lr, options.momentum


def stacked_sgd(options: SGD, group: StackedGroup) -> None:
    (velocity,), (lr, decay, momentum, *_), decayed = group.moments, group.coefficients, group.decayed
    group.grads[:, :decayed].addcmul_(group.params[:, :decayed], decay)
    group.set(velocity, torch.addcmul(group.grads, velocity, momentum))
    direction = torch.addcmul(group.grads, velocity, momentum) if options.nesterov else velocity
    group.set(group.params, torch.addcmul(group.params, direction, lr, value=-1))


def lion(options: Lion, group: Group) -> None:
    """Update a single run as stacked runs, because torch has no fused kernel."""
    params, grads, mean = (flat(state)[None] for state in (group.params, group.grads, *group.moments))
    # A group has one decay, so all of its columns are decayed or none.
    decayed = params.shape[1] if group.weight_decay else 0
    coefficients = (*lion_coefficients(options, group.lr, 0), 0)
    stacked_lion(options, StackedGroup(params, grads, [mean], decayed, coefficients, group.alive, group.names, []))
    unflatten(group.params, params[0])
    unflatten(group.moments[0], mean[0])


def lion_coefficients(options: Lion, lr: Number, count: int) -> tuple[Number, ...]:
    return 1 - options.beta1, 1 - options.beta2, lr, lr * options.decay_per_lr


def stacked_lion(options: Lion, group: StackedGroup) -> None:
    (mean,), (sign_weight, mean_weight, lr, decay, _) = group.moments, group.coefficients
    # The sign reads the old mean, with beta1; only then is the mean updated, with beta2 (algorithm 2).
    signs = mean.lerp(group.grads, sign_weight).sign_()
    group.set(mean, mean.lerp(group.grads, mean_weight))
    new, decayed = group.params - signs.mul_(lr), slice(group.decayed)
    new[:, decayed].sub_(group.params[:, decayed] * decay)
    group.set(group.params, new)


def flat(state: TensorList) -> Tensor:
    """Return the numbers of some tensors in one, (N,)."""
    return torch.cat([tensor.flatten() for tensor in state])


def unflatten(state: TensorList, values_N: Tensor) -> None:
    """Write numbers into tensors: the inverse of `flat`."""
    pieces = values_N.split([tensor.numel() for tensor in state])
    torch._foreach_copy_(state, [piece.view_as(tensor) for piece, tensor in zip(pieces, state, strict=True)])


# Optimisers of matrices

POLYNOMIALS = {"fast": (3.4445, -4.7750, 2.0315), "convergent": (2.0, -1.5, 0.5)}
"""a, b and c of a Newton-Schulz step: of the odd polynomial a s + b s^3 + c s^5 of each singular value s."""


def orthogonalise(x_NM: Tensor, steps: int, polynomial: str = "fast") -> Tensor:
    """Return matrices, (L, ..., n, m), whose singular values are near 1, with the singular vectors of the given ones.

    Newton-Schulz: x <- x / |x|, then `steps` times x <- a x + (b y + c y y) x, with y = x x^T. In bfloat16 on a GPU, in
    the dtype of x on a CPU. The result does not depend on |x|; a zero matrix stays zero.

    Source: Jordan et al. 2024, Muon (KellerJordan/Muon); torch.optim.Muon computes in bfloat16 everywhere. Both limit
    the divisor (KellerJordan adds 1e-7 to |x|, torch takes max(|x|, 1e-7)), so tiny gradients get tiny updates. Here
    they do not. For |x| > 1e-7 the result equals torch's; KellerJordan's differs by 1e-7 / |x|. The convergent
    polynomial: KellerJordan/modded-nanogpt, track 3.
    """
    a, b, c = POLYNOMIALS[polynomial]
    # The shorter side of the matrix gives the smaller Gram matrix, and the singular values are the same.
    is_tall = x_NM.shape[-2] > x_NM.shape[-1]
    x = x_NM.mT if is_tall else x_NM
    lead = x.shape[:-2]
    # Scaled before it is rounded and squared: the squares of a small gradient would be 0.
    x = scale_by_power_of_two(x)
    if x.is_cuda:
        x = x.bfloat16()
    x = _unit(x.flatten(0, -3))
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.mT
    return x.unflatten(0, lead).to(x_NM.dtype)


def scale_by_power_of_two(x_NM: Tensor) -> Tensor:
    """Return matrices whose largest element is at least 1/2 and below 1; a zero matrix stays zero.

    Each matrix is multiplied by a power of two, which changes no digit. Where all elements are below the smallest
    normal number of the dtype, the largest one stays below 1/2.
    """
    largest = x_NM.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(x_NM.dtype).smallest_normal)
    mantissa, _ = torch.frexp(largest)
    return x_NM * (mantissa / largest)


@dataclass(slots=True)
class Matrices:
    """Matrices of a single run or of stacked runs, and what their update needs."""

    names: list[str]
    params: TensorList
    grads: TensorList
    moments: list[TensorList]
    alive: Tensor
    """(...R)."""
    lr: float | Tensor
    """As the numbers below: a number, or (R,)."""
    decay_factor: float | Tensor
    momentum: float | Tensor
    row_weight: float | Tensor


def muon(options: Orthogonal, group: Group) -> None:
    decay_factor = 1 - group.lr * group.weight_decay
    _update(options, Matrices(
        group.names, group.params, group.grads, group.moments, group.alive, group.lr, decay_factor, options.momentum,
        options.row_weight,
    ))  # fmt: skip


def muon_coefficients(options: Orthogonal, lr: float, count: int) -> tuple[float, ...]:
    return lr, 1 - lr * options.decay_per_lr, options.momentum, options.row_weight


def stacked_muon(options: Orthogonal, group: StackedGroup) -> None:
    (params, grads, *moments), numbers = group.views, group.coefficients[:4, :, 0]
    _update(options, Matrices(group.names, params, grads, moments, group.alive[:, 0], *numbers))


def _update(options: Orthogonal, group: Matrices) -> None:
    """Update the matrices of one shape together."""
    for units, heads in _units_by_shape(options, group.names, group.params):
        states = (group.params, group.grads, *group.moments)
        params, grads, momenta, *rows = [_stack(state, units, heads) for state in states]
        # The numbers of stacked runs, (R,), are spread over the matrices of each run.
        numbers: list[float | Tensor] = []
        for number in (group.lr, group.decay_factor, group.momentum, group.row_weight):
            numbers.append(number.view(*number.shape, 1, 1) if isinstance(number, Tensor) else number)
        lr, decay_factor, momentum, row_weight = numbers
        alive = group.alive.view(*group.alive.shape, 1, 1)
        # An average, as in torch.optim.Muon: NS ignores the scale of its input, so a sum would give the same update.
        new_momenta = momenta + (1 - momentum) * (grads - momenta)
        direction = grads + momentum * (new_momenta - grads) if options.nesterov else new_momenta
        update = orthogonalise(direction, options.ns_steps, options.polynomial)
        # Only NorMuon has a moment of rows.
        new_rows = [row + row_weight * (update.square().mean(-1, keepdim=True) - row) for row in rows]
        if isinstance(options, NorMuon):
            (new_row,) = new_rows
            # Equal rows, and then the norm of NS or 1, which `scale_of` multiplies.
            norm = torch.linalg.matrix_norm(update, keepdim=True) if options.keeps_norm else 1.0
            update = update / (new_row.sqrt() + ROW_EPS)
            update = update * (norm / (torch.linalg.matrix_norm(update, keepdim=True) + ROW_EPS))
        if isinstance(options, Muon):
            new = decay_factor * params - lr * options.scale_of(*params.shape[-2:]) * update
        else:  # no update changes the norm
            # The norm before the update is the initial one, so the sphere needs no number of its own.
            radius = torch.linalg.matrix_norm(params, keepdim=True)
            new = radius * _unit(decay_factor * params - lr * radius * _unit(update))
        # A run that is not alive, such as one with an infinite gradient, keeps everything.
        states = (group.params, *group.moments)
        values = (new, new_momenta, *new_rows)
        for state, value, old in zip(states, values, (params, momenta, *rows), strict=True):
            _unstack(state, units, heads, torch.where(alive, value, old))


ROW_EPS = 1e-10
"""Added to the divisors of NorMuon, as in its public code: beside an orthogonal matrix, not beside a gradient."""


def _unit(x_NM: Tensor) -> Tensor:
    """Return matrices divided by their Frobenius norm; a zero matrix stays zero.

    The divisor is at least the smallest normal number of the dtype.
    """
    norm = torch.linalg.matrix_norm(x_NM, keepdim=True)
    return x_NM / norm.clamp(min=torch.finfo(x_NM.dtype).smallest_normal)


Unit = tuple[int, ...]
"""The numbers of the parameters that are one matrix for the update."""


def _units_by_shape(options: Orthogonal, names: Sequence[str], params: TensorList) -> list[tuple[list[Unit], int]]:
    """Return the units of each shape, and the number of heads whose rows are matrices of their own.

    A unit is a parameter, or with qkv=together those of q, k and v.
    """
    together: dict[str, list[int]] = {}
    heads: dict[str, int] = {}
    for number, name in enumerate(names):
        block, _, leaf = name.rpartition(".attn.")
        is_qkv = leaf in ("q.weight", "k.weight", "v.weight")
        unit = block if is_qkv and options.qkv == "together" else name
        together.setdefault(unit, []).append(number)
        # Only with qkv=heads `options.heads` is set.
        heads[unit] = 1
        if is_qkv and options.heads:
            heads[unit] = options.heads
    # Matrices of one shape are orthogonalised in one batch of products.
    by_shape: dict[Any, list[Unit]] = {}
    for name, unit in together.items():
        shape = (params[unit[0]].shape[-2:], len(unit), heads[name])
        by_shape.setdefault(shape, []).append(tuple(unit))
    return [(units, count) for (_, _, count), units in by_shape.items()]


def _stack(state: TensorList, units: Sequence[Unit], heads: int) -> Tensor:
    """Return the matrices of units, (L, ...R, n, m); with heads L counts them, and n is a head's width."""
    matrices = torch.stack([state[number] for number in itertools.chain(*units)])
    parts = len(units[0])
    if heads > 1:
        return matrices.unflatten(-2, (heads, -1)).movedim(-3, 1).flatten(0, 1)
    if parts > 1:
        # The rows of q, k and v one below the other.
        return matrices.unflatten(0, (-1, parts)).movedim(1, -3).flatten(-3, -2)
    return matrices


def _unstack(state: TensorList, units: Sequence[Unit], heads: int, values: Tensor) -> None:
    """Write the matrices of units into their parameters."""
    values = values.unflatten(0, (-1, heads)).movedim(1, -3).flatten(-3, -2)
    targets: TensorList = []
    pieces: list[Tensor] = []
    for value, unit in zip(values, units, strict=True):
        targets += [state[number] for number in unit]
        pieces += value.chunk(len(unit), -2)
    torch._foreach_copy_(targets, pieces)


def decay_cautiously(params: Tensor, old: Tensor, rate: float | Tensor, alive: Tensor) -> None:
    """Decay, in place where `alive`, the parameters that an update has not moved away from 0.

    w <- w - rate old [(old - w) old >= 0]
    """
    params.sub_(((old - params) * old >= 0) * old * (alive.to(old.dtype) * rate))


class Update(NamedTuple):
    moments: tuple[str, ...]
    """Kinds of moment of each parameter; part of the tensor names of a checkpoint."""
    single: Callable[[Any, Group], None]
    """Of a single run, by a fused kernel where torch has one."""
    stacked: Callable[[Any, StackedGroup], None]
    """Of stacked runs, in as many operations for any number of them."""
    coefficients: Callable[[Any, float, int], tuple[Any, ...]]
    """The coefficients of a stacked run, from its options, the learning rate and the number of the update, from 1."""


UPDATES = {
    "adamw": Update(("mean", "square"), adamw, stacked_adamw, adamw_coefficients),
    "sgd": Update(("velocity",), sgd, stacked_sgd, sgd_coefficients),
    "lion": Update(("mean",), lion, stacked_lion, lion_coefficients),
    "muon": Update(("momentum",), muon, stacked_muon, muon_coefficients),
    "normuon": Update(("momentum", ROWS), muon, stacked_muon, muon_coefficients),
    "hyperball": Update(("momentum",), muon, stacked_muon, muon_coefficients),
}
"""By the name of the optimiser."""
COEFFICIENTS = 5
"""K: the number of coefficients of an update, with zeros for those with fewer."""
