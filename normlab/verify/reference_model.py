"""A reference implementation of the model, driven by the placement's formula.

`catalogue/placements/formula.py` defines the notation, and `formula_functions.py` computes its functions. N is
computed by the norm's own `reference`.

The order of the norms is recorded from a forward pass of the model. Everything else is implemented here independently
of `normlab.model`, and slowly.

Shapes: B batch, T and S time, D width, H heads, K head width, M hidden width, V vocabulary.
"""

import ast
import builtins
import cmath
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from normlab.base.errors import counted, unknown
from normlab.base.options import plain_tree
from normlab.catalogue.placements.base import SWITCHES
from normlab.catalogue.placements.formula import SHAPE_METHODS, runs_twice
from normlab.catalogue.placements.formula_functions import FUNCTIONS, STREAM_FUNCTIONS
from normlab.catalogue.placements.wiring import UPDATES
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT, Block
from normlab.verify.formula_sites import WithSites

Map = Callable[[Tensor], Tensor]


class FormulaMismatch(Exception):
    """The formula and the model do not have the same parts; the message names the difference."""


def _unknown_name(name: str, listed: Collection[str]) -> str:
    """Return the message for an unknown name in a formula; for a function of Python, there is no closest name."""
    if hasattr(builtins, name):
        return (
            f"{name!r} is a function of Python, which formulas lack on purpose (sum(x) would add over the batch); use "
            f"one of {', '.join(sorted(listed))}"
        )
    return unknown("name", name, listed)


class ReferenceModel:
    """Computes logits (B, T, V) from tokens (B, T) by the placement's formula.

    It uses the parameters of the model, in float64, and the norms of each segment, from `record_norm_order`. Which
    options a norm has follows from its site in the formula (`formula_sites`), and not from where the model made it.

    Raises:
        FormulaMismatch: When called: the formula has more norms than the model, or fewer, or an unknown name.
    """

    def __init__(self, config: RunConfig, model: GPT, norm_order: dict[str, list[nn.Module]]):
        self.config, self.model, self.norm_order = config, model, norm_order
        self.pending: deque[nn.Module] = deque()
        """Norms of the current segment that the formula has not used yet."""
        self.site = ""
        """The site of all norms of the current segment; empty in a block."""
        self.layer: int | None = None
        """The current block, from 0."""
        self.sites: list[tuple[nn.Module, str]] = []
        """The norms that the formula has used, with their sites in it."""
        self.first_values: Tensor | None = None
        """The values of attention in the first block."""
        self.tokens_BT = torch.empty(0)
        self.options = plain_tree(config.placement)
        self.norm_parameters: set[int] = set()
        """The ids of the parameters of all norms."""
        for norms in norm_order.values():
            for norm in norms:
                self.norm_parameters.update(map(id, norm.parameters()))
        self.sizes = {"L": config.model.depth, "D": config.model.width}

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        model, self.first_values, self.tokens_BT = self.model, None, tokens_BT
        x_BTD = self.config.model.embed_scale * model.embed.tokens.weight[tokens_BT]
        if model.embed.positions is not None:
            x_BTD = x_BTD + model.embed.positions.weight[: tokens_BT.shape[1]]
        streams: dict[str, Any] = {"x": x_BTD}
        embedding_formula, head_formula = self.config.placement.end_formulas
        self.site, self.layer, self.sites = "embedding", None, []
        self._run("embed", embedding_formula, streams, (model.embed, {}))
        self.site = ""
        for layer, block in enumerate(model.blocks, start=1):
            assert isinstance(block, Block)
            self.layer = layer - 1
            self._run_block(layer, block, streams)
        self.site, self.layer = "final", None
        statements = filter(None, (self.config.placement.head_weights_formula, head_formula))
        self._run("head", "; ".join(statements), streams, (model.head, {}))
        logits_BTV = linear(streams["x"], model.head.weight) / self.config.model.width_ratio
        logits_BTV = self._apply_inside("z", logits_BTV, model.head.logits)
        softcap = self.config.model.logit_softcap
        if softcap is not None:
            logits_BTV = softcap * torch.tanh(logits_BTV / softcap)
        return logits_BTV

    def _run_block(self, layer: int, block: Block, streams: dict[str, Any]) -> None:
        """Execute the formula of a block, or once for attention and once for the MLP if it has F."""
        attention, mlp = self._attention(block), self._mlp(block)
        names = {**attention, **mlp, "l": layer}
        for name, buffer in block.wiring.named_buffers():
            if name.endswith(f".{UPDATES}"):
                names["t"] = buffer.item()
        segment, formula = f"block {layer}", self.config.placement.full_formula
        if not runs_twice(formula):
            self._run(segment, formula, streams, (block.wiring, names))
            return
        # One call, because attention and the MLP take their norms from one list, one after the other.
        wirings = dict(block.wiring.named_children())
        of_attention = wirings.get("attn", block.wiring), {**names, "F": attention["A"]}
        of_mlp = wirings.get("mlp", block.wiring), {**names, "F": mlp["M"]}
        self._run(segment, formula, streams, of_attention, of_mlp)

    def _run(
        self, segment: str, formula: str, streams: dict[str, Any], *runs: tuple[nn.Module, Mapping[str, Any]]
    ) -> None:
        """Execute the formula once for each (owner of parameters, names); every norm must be used."""
        self.pending = deque(self.norm_order.get(segment, ()))
        for (owner, names), sub_layer in zip(runs, ("attn", "mlp"), strict=False):
            parameters = {name.replace(".", "_"): parameter for name, parameter in owner.named_parameters()}
            namespace = self._namespace(
                formula, streams, {"N": self._norm, "N_streams": self._norm_streams, **names}, parameters
            )
            try:
                exec(_compiled_with_sites(formula, sub_layer), namespace, streams)  # noqa: S102
            except Exception as error:  # a plugin's formula may raise anything
                raise FormulaMismatch(f"{segment}: {formula!r} cannot be evaluated ({error})") from error
        if self.pending:
            count = len(self.norm_order[segment])
            raise FormulaMismatch(f"{segment}: has {counted(count, 'norm')}, its formula {count - len(self.pending)}")

    def _namespace(
        self, formula: str, streams: Mapping[str, Any], block: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values of the names that a formula may use; Python's own functions are not among them.

        Raises:
            FormulaMismatch: A name of the formula is unknown, or has two meanings; or it uses a method of a tensor.
        """
        kinds: dict[str, Mapping[str, Any]] = {
            "a function": FUNCTIONS | STREAM_FUNCTIONS,
            "an option of the placement": self.options,
            "a size of the model": self.sizes,
            "a name of the block": block,
            "a learned parameter": parameters,
        }
        for node in ast.walk(_parsed(formula)):
            if isinstance(node, ast.Attribute) and node.attr not in SHAPE_METHODS:
                functions = ", ".join(sorted(FUNCTIONS))
                raise FormulaMismatch(
                    f"{formula!r}: .{node.attr} is a method of torch, which formulas lack on purpose (x.sum() would "
                    f"add over the batch); use one of the functions {functions}, or .{', .'.join(SHAPE_METHODS)}"
                )
        nodes = [node for node in ast.walk(_parsed(formula)) if isinstance(node, ast.Name)]
        assigned = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        for name in dict.fromkeys(node.id for node in nodes):
            meanings = [kind for kind, values in kinds.items() if name in values]
            if name in assigned:
                meanings.append("a variable of the formula")
            if len(meanings) > 1:
                raise FormulaMismatch(f"{formula!r}: the name {name!r} is {' and '.join(meanings)}; rename one of them")
            if not meanings and name not in streams:
                listed = self._listed_names(block, parameters) | {*streams, *assigned}
                raise FormulaMismatch(f"{formula!r}: {_unknown_name(name, listed)}")
        # Without an entry for `__builtins__`, exec would add all of Python's functions.
        values: dict[str, Any] = {"__builtins__": {}}
        for names in kinds.values():
            values |= names
        return values

    def _listed_names(self, block: Mapping[str, Any], parameters: Mapping[str, Any]) -> set[str]:
        """Return the names for a message: those that `normlab list formulas` explains.

        The parameters of the norms, and the options that add a norm before or after the blocks, are names too, but
        have no meaning in a formula. Only a placement of several streams needs the functions of streams.
        """
        names = {*FUNCTIONS, *self.sizes, *block} | self.options.keys() - {"name", *SWITCHES}
        for name, parameter in parameters.items():
            if id(parameter) not in self.norm_parameters:
                names.add(name)
        if self.config.placement.weights_formula:
            names |= STREAM_FUNCTIONS.keys()
        return names

    def _apply_inside(
        self, name: str, value: Tensor, owner: nn.Module | None, shape: tuple[int, ...] = (-1,)
    ) -> Tensor:
        """Apply the `inside` statement for q, a, h or z; `shape` is that of its learned scale."""
        statements = [text for text in self.config.placement.inside.split("; ") if text.startswith(f"{name} = ")]
        scales: dict[str, Tensor] = {}
        if owner is not None:
            for scale_name, scale in owner.named_parameters():
                scales[scale_name] = scale.reshape(shape)
        if not statements:
            if scales:
                raise FormulaMismatch(f"the model changes {name}, and the placement's `inside` has no `{name} = ...`")
            return value
        streams = {name: value}
        head_width = {"K": self.config.model.width // self.config.model.heads}
        namespace = self._namespace(statements[0], streams, head_width, scales)
        exec(_compiled(statements[0]), namespace, streams)  # noqa: S102
        return streams[name]

    def _norm(self, x_D: Tensor, site: str) -> Tensor:
        """Apply the segment's next norm by its reference, or by its module if it has no reference.

        Args:
            site: Where the formula has it, if in a block.
        """
        if not self.pending:
            raise FormulaMismatch("the formula has more norms than the model")
        module, site = self.pending.popleft(), self.site or site
        self.sites.append((module, site))
        weights = dict(module.named_parameters()) | dict(module.named_buffers())
        try:
            return self.config.norm_at(site, self.layer).reference(x_D, weights)
        except NotImplementedError:
            return module(x_D)

    def _norm_streams(self, x_BTnD: Tensor, site: str) -> Tensor:
        """Apply one norm after the other of the segment, each to a stream of its own."""
        return torch.stack([self._norm(x_BTD, site) for x_BTD in x_BTnD.unbind(-2)], -2)

    def _attention(self, block: Block) -> dict[str, Map]:
        """Return the functions of attention that a formula may call."""
        weights, heads_of_model = block.attn, self.config.model.heads

        def heads(x_BTD: Tensor) -> Tensor:
            return self._heads(block, x_BTD, inner=False)

        def heads_qkv(x_BTD: Tensor) -> Tensor:
            return self._heads(block, x_BTD, inner=True)

        def heads_scaled(x_BTD: Tensor) -> Tensor:
            scale_H = block.get_parameter("attn.head_scale")
            return heads(x_BTD) * scale_H.repeat_interleave(x_BTD.shape[-1] // heads_of_model)

        def w_out(y_BTD: Tensor) -> Tensor:
            return linear(y_BTD, weights.out.weight, weights.out.bias) / self.config.model.depth_ratio

        return {
            "heads": heads,
            "heads_scaled": heads_scaled,
            "heads_qkv": heads_qkv,
            "W_out": w_out,
            "A": lambda x: w_out(heads(x)),
            "A_qkv": lambda x: w_out(heads_qkv(x)),
        }

    def _heads(self, block: Block, x_BTD: Tensor, *, inner: bool) -> Tensor:
        """Return the outputs of the heads side by side, (B, T, D); if `inner`, q, k and v have norms (`A_qkv`)."""
        model = self.config.model
        # The norms are called in this order, which `record_norm_order` has recorded.
        q_BTHK, k_BTHK, v_BTHK = (self._project(block, site, x_BTD, inner=inner) for site in "qkv")
        if model.rope_theta is not None:
            q_BTHK, k_BTHK = (_rotate(x, model.rope_theta, model.rope_fraction) for x in (q_BTHK, k_BTHK))
        if model.qk_norm_after_rope:
            q_BTHK, k_BTHK = self._norm(q_BTHK, "q"), self._norm(k_BTHK, "k")
        q_BTHK, k_BTHK = q_BTHK * model.qk_scale, k_BTHK * model.qk_scale
        shape, scales = (model.heads, -1), block.attn.rotated
        q_BTHK, k_BTHK = (self._apply_inside("q", y_BTHK, scales, shape) for y_BTHK in (q_BTHK, k_BTHK))
        scores_BHTS = self._scores(q_BTHK, k_BTHK)
        # The softmax over the tokens so far; the largest score is subtracted, because its exponential may overflow.
        earlier_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool).tril()
        scores_BHTS = torch.where(earlier_TS, scores_BHTS, -math.inf)
        weights_BHTS = (scores_BHTS - scores_BHTS.amax(-1, keepdim=True)).exp()
        weights_BHTS = weights_BHTS / weights_BHTS.sum(-1, keepdim=True)
        y_BTHK = torch.einsum("bhts,bshk->bthk", weights_BHTS, v_BTHK)
        if model.attn_gate != "off":
            gate_BTG = 1 / (1 + torch.exp(-(x_BTD @ block.get_parameter("attn.gate.weight").T)))
            y_BTHK = y_BTHK * gate_BTG.reshape(*y_BTHK.shape[:-1], -1)
        return y_BTHK.flatten(2)

    def _project(self, block: Block, site: str, x_BTD: Tensor, *, inner: bool) -> Tensor:
        """Return the queries, keys or values (`site` is q, k or v), with the norms before the rotation."""
        model = self.config.model
        layer = getattr(block.attn, site)
        y_BTD = linear(x_BTD, layer.weight, layer.bias)
        if site == "v" and model.shares_values:
            y_BTD = self._mixed_values(block, x_BTD, y_BTD)
        qk_norm = model.qk_norm if site in "qk" else "off"
        if qk_norm == "full":
            y_BTD = self._norm(y_BTD, site)
        y_BTHK = y_BTD.reshape(*y_BTD.shape[:-1], model.heads, -1)
        if qk_norm == "head" and not model.qk_norm_after_rope:
            y_BTHK = self._norm(y_BTHK, site)
        if inner or (site == "v" and model.v_norm):
            return self._norm(y_BTHK, site)
        return y_BTHK

    def _scores(self, q_BTHK: Tensor, k_BTHK: Tensor) -> Tensor:
        """Return the scores of attention before the mask."""
        model = self.config.model
        scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK)
        # Rules of transfer divide by K; a placement may have a divisor of its own; all others have sqrt(K).
        if model.scaling != "none":
            scores_BHTS = scores_BHTS / q_BTHK.shape[-1]
        elif "a = " in self.config.placement.inside:
            scores_BHTS = self._apply_inside("a", scores_BHTS, None)
        else:
            scores_BHTS = scores_BHTS / math.sqrt(q_BTHK.shape[-1])
        if model.attn_softcap is not None:
            scores_BHTS = model.attn_softcap * torch.tanh(scores_BHTS / model.attn_softcap)
        return scores_BHTS

    def _mixed_values(self, block: Block, x_BTD: Tensor, v_BTD: Tensor) -> Tensor:
        """Return the mean of a block's values and those of the first block, weighted by m, plus the value embedding."""
        parameters = dict(block.attn.named_parameters())
        if self.config.model.value_residual != "off":
            if self.first_values is None:
                self.first_values = v_BTD
            v_BTD = v_BTD + parameters.get("value_mix", 0.5) * (self.first_values - v_BTD)
        if "value_gate.weight" in parameters:
            weight_HC = parameters["value_gate.weight"]
            gate_BTH = 2 / (1 + torch.exp(-(x_BTD[..., : weight_HC.shape[1]] @ weight_HC.T)))
            head_width = v_BTD.shape[-1] // len(weight_HC)
            embed_BTD = parameters["value_embed.weight"][self.tokens_BT]
            v_BTD = v_BTD + gate_BTH.repeat_interleave(head_width, -1) * embed_BTD
        return v_BTD

    def _mlp(self, block: Block) -> dict[str, Map]:
        weights = block.mlp

        def hidden(x_BTD: Tensor) -> Tensor:
            h_BTM = self._apply_inside("h", linear(x_BTD, weights.up.weight, weights.up.bias), weights.of_up)
            if weights.gate is not None:
                gate_BTM = linear(x_BTD, weights.gate.weight, weights.gate.bias)
                gate_BTM = self._apply_inside("h", gate_BTM, weights.of_gate)
                return gate_BTM * torch.sigmoid(gate_BTM) * h_BTM
            if self.config.model.mlp == "relu2":
                return torch.where(h_BTM > 0, h_BTM * h_BTM, 0.0)
            inner_BTM = math.sqrt(2 / math.pi) * (h_BTM + 0.044715 * h_BTM**3)
            return h_BTM * torch.sigmoid(2 * inner_BTM)

        def w_down(h_BTM: Tensor) -> Tensor:
            return linear(h_BTM, weights.down.weight, weights.down.bias) / self.config.model.depth_ratio

        return {"hidden": hidden, "W_down": w_down, "M": lambda x: w_down(hidden(x))}


@cache
def _parsed(formula: str) -> ast.Module:
    """Return the syntax tree of a formula.

    Raises:
        FormulaMismatch: It is not Python.
    """
    try:
        return ast.parse(formula)
    except SyntaxError as error:
        raise FormulaMismatch(f"{formula!r} cannot be evaluated ({error})") from error


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "exec")


@cache
def _compiled_with_sites(formula: str, sub_layer: str) -> CodeType:
    """Return the code of a formula of blocks, in which each norm knows its site; F is the `sub_layer`."""
    tree = ast.parse(formula)
    tree = WithSites(tree, sub_layer).visit(tree)
    return compile(ast.fix_missing_locations(tree), "<formula>", "exec")


def _rotate(x_BTHK: Tensor, theta: float, fraction: float) -> Tensor:
    """Apply RoPE as a complex product: x_i + j x_(i + K/2) is turned by t theta^(-2i/K), K the channels that turn."""
    half = round(fraction * x_BTHK.shape[-1]) // 2
    z_BTHK = torch.complex(x_BTHK[..., :half], x_BTHK[..., half : 2 * half])
    turns: list[list[complex]] = []
    for t in range(x_BTHK.shape[1]):
        turns.append([cmath.exp(1j * t * theta ** (-i / half)) for i in range(half)])
    z_BTHK = z_BTHK * torch.tensor(turns, dtype=z_BTHK.dtype)[:, None]
    return torch.cat([z_BTHK.real, z_BTHK.imag, x_BTHK[..., 2 * half :]], dim=-1)


@contextmanager
def record_norm_order(model: GPT, norms: list[nn.Module]) -> Iterator[dict[str, list[nn.Module]]]:
    """Record the norms of each segment in the order of their first call while the block runs."""
    segments = {"embed": model.embed, "head": model.head}
    segments |= {f"block {layer}": block for layer, block in enumerate(model.blocks, start=1)}
    segment_of: dict[int, str] = {}
    for name, segment in segments.items():
        for module in segment.modules():
            segment_of[id(module)] = name
    order: dict[str, list[nn.Module]] = {}

    def record(module: nn.Module, _: Any) -> None:
        called = order.setdefault(segment_of[id(module)], [])
        if module not in called:
            called.append(module)

    handles = [norm.register_forward_pre_hook(record) for norm in norms]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()
