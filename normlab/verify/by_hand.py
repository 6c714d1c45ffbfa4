"""A model written out by hand: the placement's own formula, evaluated as it stands in the catalogue.

The formula is Python, statements separated by `;`, each of which gives a stream a new value. In it

- x is the stream, A attention, M the MLP; with F in it, it is run twice a block, F being A and then M;
- A(x) = W_out(heads(x)), M(x) = W_down(hidden(x)), heads_qkv(x) is heads(x) with a norm on each q, k and v, and
  heads_scaled(x) is heads(x) with a learned factor on each head's channels;
- N is the block's next norm, in the order in which the block calls them, by the norm's own `reference`;
- L is the number of blocks, l this one counted from 1, D the width;
- any other name is a learned parameter of the wiring, with `_` for the dots in its name.

What the model does is looked at once, for the order of its norms; everything else here is written a second time.

Shapes: B batch, T time, D width, H heads, K head width, M hidden width, V vocabulary.
"""

from __future__ import annotations

import cmath
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from normlab.config import RunConfig
from normlab.model.gpt import GPT, Block

Map = Callable[[Tensor], Tensor]


class Mismatch(Exception):
    """The formula and the model do not even have the same parts; the words say what differs."""


class ByHand:
    """The forward pass of a model by its placement's formula. Call it with tokens (B, T) for logits (B, T, V).

    Args:
        config: What the model was built from.
        model: In float64; its parameters are read, its forward pass is run once, for the order of its norms.
        norms: The norms in it.
        tokens: What it is run on.

    Raises:
        Mismatch: When called: the formula names more norms than the model has, or fewer, or something unknown.
    """

    def __init__(self, config: RunConfig, model: GPT, norms: list[nn.Module], tokens: Tensor):
        self.config, self.model = config, model
        self.order = norm_order(model, norms, tokens)
        self.waiting: deque[nn.Module] = deque()

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """The logits."""
        model, placement = self.model, self.config.placement
        x_BTD = model.embed.tokens.weight[tokens_BT]
        if model.embed.positions is not None:
            x_BTD = x_BTD + model.embed.positions.weight[: tokens_BT.shape[1]]
        streams: dict[str, Any] = {"x": x_BTD}
        opens, closes = placement.end_formulas
        self._run("embed", opens, streams, (model.embed, {}))
        for layer, block in enumerate(model.blocks, start=1):
            assert isinstance(block, Block)
            self._block(layer, block, streams)
        self._run("head", closes, streams, (model.head, {}))
        logits_BTV = linear(streams["x"], model.head.weight)
        return self._inside("z", logits_BTV, model.head.logits)

    def _block(self, layer: int, block: Block, streams: dict[str, Any]) -> None:
        attention, mlp = self._attention(block), self._mlp(block)
        names = {**attention, **mlp, "l": layer}
        segment, formula = f"block {layer}", self.config.placement.formula
        if "F(" not in formula:
            self._run(segment, formula, streams, (block.wiring, names))
            return
        twice = (("attn", attention["A"]), ("mlp", mlp["M"]))
        wirings = dict(block.wiring.named_children())
        runs = [(wirings.get(part, block.wiring), {**names, "F": branch}) for part, branch in twice]
        self._run(segment, formula, streams, *runs)

    def _run(
        self, segment: str, formula: str, streams: dict[str, Any], *runs: tuple[nn.Module, Mapping[str, Any]]
    ) -> None:
        """Let the statements of a formula change the streams, once for each owner of parameters and its names."""
        self.waiting = deque(self.order.get(segment, ()))
        for owner, names in runs:
            self._evaluate(segment, formula, streams, owner, names)
        if self.waiting:
            count = len(self.order[segment])
            raise Mismatch(f"{segment}: has {count} norms, its formula {count - len(self.waiting)}")

    def _evaluate(
        self, segment: str, formula: str, streams: dict[str, Any], owner: nn.Module, names: Mapping[str, Any]
    ) -> None:
        known = {
            "N": self.norm,
            **self._constants(),
            **{name.replace(".", "_"): parameter for name, parameter in owner.named_parameters()},
            **names,
        }
        try:
            exec(compile(formula, f"<formula of {self.config.placement.name}>", "exec"), known, streams)  # noqa: S102
        except Exception as error:
            raise Mismatch(f"{segment}: {formula!r} cannot be evaluated ({error})") from error

    def _inside(self, name: str, value: Tensor, owner: nn.Module | None, shape: tuple[int, ...] = (-1,)) -> Tensor:
        """A number inside the sub-layers, after what the placement says is done to it; `shape` is its scale's."""
        done = [text for text in self.config.placement.inside.split("; ") if text.startswith(f"{name} = ")]
        scales = {} if owner is None else {n: scale.reshape(shape) for n, scale in owner.named_parameters()}
        if not done:
            if scales:
                raise Mismatch(f"something is done to {name}, and the placement does not say it")
            return value
        streams = {name: value}
        known = {"K": self.config.model.width // self.config.model.heads, **self._constants(), **scales}
        exec(compile(done[0], "<inside>", "exec"), known, streams)  # noqa: S102
        return streams[name]

    def _constants(self) -> dict[str, Any]:
        return {
            "L": self.config.model.depth, "D": self.config.model.width, "sqrt": math.sqrt, "ln": math.log,
            "silu": lambda t: t * torch.sigmoid(t), "stop": torch.Tensor.detach,
            "norm2": lambda t: t.square().sum(-1, keepdim=True).sqrt(),
        }  # fmt: skip

    def norm(self, x_D: Tensor) -> Tensor:
        """The next norm of the segment, by its own reference; by itself where it has none."""
        if not self.waiting:
            raise Mismatch("the formula has more norms than the model")
        module = self.waiting.popleft()
        weights = dict(module.named_parameters()) | dict(module.named_buffers())
        try:
            return self.config.norm.reference(x_D, weights)
        except NotImplementedError:
            return module(x_D)

    def _attention(self, block: Block) -> dict[str, Map]:
        """A, and what it is made of."""
        weights, model = block.attn, self.config.model

        def project(site: str, x_BTD: Tensor, *, inner: bool) -> Tensor:
            layer = getattr(weights, site)
            y_BTD = linear(x_BTD, layer.weight, layer.bias)
            normed = model.qk_norm if site in "qk" else "off"
            if normed == "full":
                y_BTD = self.norm(y_BTD)
            y_BTHK = y_BTD.reshape(*y_BTD.shape[:-1], model.heads, -1)
            if normed == "head":
                y_BTHK = self.norm(y_BTHK)
            return self.norm(y_BTHK) if inner else y_BTHK

        def heads(x_BTD: Tensor, inner: bool = False) -> Tensor:
            q_BTHK, k_BTHK, v_BTHK = (project(site, x_BTD, inner=inner) for site in "qkv")
            if model.rope_theta is not None:
                q_BTHK, k_BTHK = _turned(q_BTHK, model.rope_theta), _turned(k_BTHK, model.rope_theta)
            shape = (model.heads, -1)
            q_BTHK, k_BTHK = (self._inside("q", y_BTHK, weights.rotated, shape) for y_BTHK in (q_BTHK, k_BTHK))
            usual = "a = " not in self.config.placement.inside
            steps = []
            for t in range(x_BTD.shape[1]):
                product_BHS = torch.einsum("bhk,bshk->bhs", q_BTHK[:, t], k_BTHK[:, : t + 1])
                score_BHS = product_BHS / math.sqrt(q_BTHK.shape[-1]) if usual else self._inside("a", product_BHS, None)
                weight_BHS = (score_BHS - score_BHS.amax(-1, keepdim=True)).exp()
                weight_BHS = weight_BHS / weight_BHS.sum(-1, keepdim=True)
                steps.append(torch.einsum("bhs,bshk->bhk", weight_BHS, v_BTHK[:, : t + 1]).flatten(1))
            return torch.stack(steps, dim=1)

        def heads_scaled(x_BTD: Tensor) -> Tensor:
            scale_H = block.get_parameter("attn.head_scale")
            return heads(x_BTD) * scale_H.repeat_interleave(x_BTD.shape[-1] // model.heads)

        def w_out(y_BTD: Tensor) -> Tensor:
            return linear(y_BTD, weights.out.weight, weights.out.bias)

        return {
            "heads": heads,
            "heads_scaled": heads_scaled,
            "heads_qkv": lambda x: heads(x, inner=True),
            "W_out": w_out,
            "A": lambda x: w_out(heads(x)),
            "A_qkv": lambda x: w_out(heads(x, inner=True)),
        }

    def _mlp(self, block: Block) -> dict[str, Map]:
        """M, and what it is made of."""
        weights = block.mlp

        def hidden(x_BTD: Tensor) -> Tensor:
            h_BTM = self._inside("h", linear(x_BTD, weights.up.weight, weights.up.bias), weights.of_up)
            if weights.gate is not None:
                gate_BTM = self._inside("h", linear(x_BTD, weights.gate.weight, weights.gate.bias), weights.of_gate)
                return gate_BTM * torch.sigmoid(gate_BTM) * h_BTM
            inner_BTM = math.sqrt(2 / math.pi) * (h_BTM + 0.044715 * h_BTM**3)
            return h_BTM * torch.sigmoid(2 * inner_BTM)

        def w_down(h_BTM: Tensor) -> Tensor:
            return linear(h_BTM, weights.down.weight, weights.down.bias)

        return {"hidden": hidden, "W_down": w_down, "M": lambda x: w_down(hidden(x))}


def _turned(x_BTHK: Tensor, theta: float) -> Tensor:
    """Rotary positions as a product of complex numbers: channel i and i + K/2 are one, at angle t theta^(-2i/K)."""
    half = x_BTHK.shape[-1] // 2
    z_BTHK = torch.complex(x_BTHK[..., :half], x_BTHK[..., half:])
    turns = [[cmath.exp(1j * t * theta ** (-i / half)) for i in range(half)] for t in range(x_BTHK.shape[1])]
    z_BTHK = z_BTHK * torch.tensor(turns, dtype=z_BTHK.dtype)[:, None]
    return torch.cat([z_BTHK.real, z_BTHK.imag], dim=-1)


def norm_order(model: GPT, norms: list[nn.Module], tokens: Tensor) -> dict[str, list[nn.Module]]:
    """The norms of each segment, in the order in which a forward pass first calls them."""
    called: list[nn.Module] = []
    handles = [norm.register_forward_pre_hook(lambda module, _: called.append(module)) for norm in norms]
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    where = {id(module): name for name, segment in _segments(model) for module in segment.modules()}
    order: dict[str, list[nn.Module]] = {}
    for module in called:
        found = order.setdefault(where[id(module)], [])
        if module not in found:
            found.append(module)
    return order


def _segments(model: GPT) -> Iterator[tuple[str, nn.Module]]:
    yield "embed", model.embed
    for layer, block in enumerate(model.blocks, start=1):
        yield f"block {layer}", block
    yield "head", model.head
