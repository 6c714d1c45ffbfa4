"""The classes of transformers that compute models of normlab: one row for each, read in both directions.

A row holds the names of options and tensors in the class and in normlab. Export writes the options and tensors of a
model by it, and import reads those of a folder.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normlab.base.errors import ConfigError
from normlab.base.options import flatten_options, override_text
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig

Options = Mapping[str, Any]

FREE = (
    "norm.preset", "norm.gain", "norm.unit_offset", "norm.eps", "norm.compute", "norm.rounding", "model.preset",
    "model.depth", "model.width", "model.heads", "model.context", "model.mlp_width", "model.tie_embeddings",
    "model.z_loss",
)  # fmt: skip
"""Options that every class has, or that the weights can hold, or that change only training or the rounding in bf16."""
NOT_READ = ("rope_theta", "rope_parameters", "sliding_window", "resid_pdrop", "embd_pdrop", "attn_pdrop")
"""Options that export writes and that import does not compare: dropout, the rotation, which import reads first, and
sliding_window, which layers with full attention do not read."""

ONE = "1"
"""The name, in place of a parameter's, of a tensor [1.0] that the class has and normlab lacks."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a class, and the parameters of normlab that it holds."""

    name: str
    parameters: tuple[str, ...]
    """Joined along their first axis."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each parameter."""
    is_transposed: bool = False
    offset: float = 0.0
    """What the class adds to the parameters before it stores them."""

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor of the class."""
        rows = sum(shape[0] for shape in self.shapes)
        shape = [rows, *self.shapes[0][1:]]
        if self.is_transposed:
            shape.reverse()
        return shape

    def join(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor of the class; a parameter that the model lacks counts as 0."""
        parts: list[Tensor] = []
        for name, shape in zip(self.parameters, self.shapes, strict=True):
            parts.append(parameters[name] if name in parameters else torch.zeros(shape))
        joined = torch.cat(parts)
        if self.offset:  # adding 0 would change -0
            joined = joined + self.offset
        if self.is_transposed:
            joined = joined.T
        return joined.contiguous()

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of normlab that a tensor of the class holds."""
        if self.is_transposed:
            tensor = tensor.T
        if self.offset:
            tensor = tensor - self.offset
        yield from zip(self.parameters, tensor.split([shape[0] for shape in self.shapes]), strict=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeClass:
    """A class of transformers, and the models of normlab that it computes."""

    name: str
    model_type: str
    overrides: str
    """A model that it computes; another one may differ from it in `FREE` and `free`."""
    free: tuple[str, ...] = ()
    options: Mapping[str, str]
    """Its names of options, each with the option of normlab that has the same value."""
    fixed: Callable[[RunConfig], Options]
    """Its other options, for a model that it computes."""
    optional: tuple[str, ...]
    """Its options that config.json may lack, because their default is a model that normlab has."""
    linears: Mapping[str, tuple[str, ...]]
    """For each linear layer of a block ours, or those that are joined in it."""
    norms: Mapping[str, str]
    """For each norm of a block ours."""
    ends: Mapping[str, str]
    """The same for the embeddings, the last norm and the head."""
    blocks: str = "model.layers"
    has_biases: bool = False
    transposes: bool = False
    """Whether the weights of linear layers in a block are (inputs, outputs)."""
    gain_offset: float = 0.0
    """What its norms add to their gain."""
    derived: Mapping[str, Callable[[RunConfig], float]] = field(default_factory=dict)
    """Options of normlab whose value the class computes from the width and the number of heads."""
    ones: tuple[str, ...] = ()
    """Names of tensors of each block that must be [1.0]: factors on the stream, which normlab lacks."""

    def differences(self, config: RunConfig) -> list[str]:
        """Return the options in which a model differs from those that the class computes, as `option=value`."""
        return differences(config, compose_run(self.overrides.split()), (*FREE, *self.free))

    def reason(self, config: RunConfig) -> str:
        """Return why the class does not compute a model although its options fit; empty if it does."""
        options = flatten_options(config)
        wrong: list[str] = []
        for name, compute in self.derived.items():
            value = compute(config)
            if not math.isclose(options[name], value, rel_tol=1e-12):
                wrong.append(f"{name}={value!r}, not {options[name]:g}")
        if not wrong:
            return ""
        return f"with this width and these heads the class has {' and '.join(wrong)}"

    def write_options(self, config: RunConfig) -> dict[str, Any]:
        """Return the options of the class, besides those of the tokenizer, for a model that it computes."""
        config_options = flatten_options(config)
        return {name: config_options.get(option) for name, option in self.options.items()} | dict(self.fixed(config))

    def read_options(self, options: Options) -> tuple[list[str], RunConfig]:
        """Return the overrides and the config of a run whose model the class computes with these options.

        Raises:
            ConfigError: An option is missing or has a value that no model of normlab has.
        """
        options = _with_rotation(options)
        texts = self.overrides.split()
        for name, option in self.options.items():
            value = options.get(name)
            if name not in options and name not in self.optional:
                raise ConfigError(f"has no {name}")
            if not isinstance(value, int | float | None):
                raise ConfigError(f"{name}={value!r:.60}: must be a number")
            if value is not None:
                texts.append(f"{option}={override_text(value)}")
        # The class computes these options from others, so that config.json has no number for them.
        model = compose_run(texts)
        texts += [f"{name}={compute(model)!r}" for name, compute in self.derived.items()]
        config = compose_run(texts)
        # Another value is another model, and so may be a missing one, if its default is not that of normlab's model.
        for name, value in self.fixed(config).items():
            stored_value = options.get(name)
            requirement = f"normlab has this model only with {name}={override_text(value):.60}"
            if stored_value is None and name not in (*self.optional, *NOT_READ):
                raise ConfigError(f"has no {name}; {requirement}")
            if stored_value is not None and stored_value != value and name not in NOT_READ:
                raise ConfigError(f"{name}={override_text(stored_value):.60}: {requirement}")
        different = self.differences(config)
        if different:
            raise ConfigError(f"{', '.join(different)}: {self.name} does not compute it")
        # AutoModel reads a folder as the class of its model_type: as "mistral", a LlamaForCausalLM has sliding windows.
        model_type = options.get("model_type")
        if model_type not in (None, self.model_type):
            raise ConfigError(
                f"model_type={override_text(model_type):.60}: a {self.name} has model_type={self.model_type}"
            )
        return texts, config

    def tensors(self, config: RunConfig, vocab_size: int) -> Iterator[StoredTensor]:
        """Yield its tensors, for a model that it computes."""
        model = config.model
        assert model.mlp_width is not None  # resolved
        # Outputs of linear layers, and rows of embeddings, that are not as many as the width.
        sizes = {"up": model.mlp_width, "gate": model.mlp_width, "positions": model.context}
        sizes |= {"tokens": vocab_size, "head": vocab_size}
        for layer in range(model.depth):
            for name, modules in self.linears.items():
                full = f"{self.blocks}.{layer}.{name}"
                module_names = [f"blocks.{layer}.{module}" for module in modules]
                # (outputs, inputs): all linear layers but those of the MLP have the width on both sides.
                outputs = [sizes.get(module.rpartition(".")[2], model.width) for module in modules]
                inputs = model.mlp_width if modules == ("mlp.down",) else model.width
                weights = tuple(f"{module}.weight" for module in module_names)
                shapes = tuple((rows, inputs) for rows in outputs)
                yield StoredTensor(f"{full}.weight", weights, shapes, self.transposes)
                if self.has_biases:
                    biases = tuple(f"{module}.bias" for module in module_names)
                    yield StoredTensor(f"{full}.bias", biases, tuple((rows,) for rows in outputs))
            for name, module in self.norms.items():
                width = model.width
                if "qk_norms" in module and model.qk_norm == "head":
                    width = model.width // model.heads
                yield from self._norm(config, f"{self.blocks}.{layer}.{name}", f"blocks.{layer}.{module}", width)
            for name in self.ones:
                yield StoredTensor(f"{self.blocks}.{layer}.{name}", (ONE,), ((1,),), offset=1.0)
        for name, module in self.ends.items():
            if module == "head.close":
                yield from self._norm(config, name, module, model.width)
            elif module != "head" or not model.tie_embeddings:
                # With tied embeddings, the head is no tensor of its own.
                shape = (sizes[module.rpartition(".")[2]], model.width)
                yield StoredTensor(f"{name}.weight", (f"{module}.weight",), (shape,))

    def _norm(self, config: RunConfig, name: str, module: str, width: int) -> Iterator[StoredTensor]:
        # A model without a gain stores 0, and has the factor 1.
        is_offset = not config.norm.has_gain or getattr(config.norm, "unit_offset", False)
        offset = (1.0 if is_offset else 0.0) - self.gain_offset
        yield StoredTensor(f"{name}.weight", (f"{module}.affine.gain",), ((width,),), offset=offset)
        if self.has_biases:
            yield StoredTensor(f"{name}.bias", (f"{module}.affine.bias",), ((width,),))


def differences(config: RunConfig, other: RunConfig, free: Sequence[str] = ()) -> list[str]:
    """Return the options of the norm, placement and model in which a config differs from another, as `option=value`.

    Options in `free` may differ. Of another norm or placement, only the name is returned.
    """
    ours, theirs = flatten_options(config), flatten_options(other)
    names = [name for name in {**ours, **theirs} if name.startswith(("norm.", "placement.", "model."))]
    # Another norm has other options, so that a comparison of these would say nothing.
    for part in ("norm.", "placement."):
        if ours[f"{part}name"] != theirs[f"{part}name"]:
            names = [name for name in names if not name.startswith(part) or name == f"{part}name"]
    different: list[str] = []
    for name in names:
        if name not in free and ours.get(name) != theirs.get(name):
            different.append(f"{name}={override_text(ours.get(name))}")
    return different


def _with_rotation(options: Options) -> Options:
    """Return the options of config.json with the base of the rotation, which they hold in one of three places.

    Raises:
        ConfigError: The rotation is scaled.
    """
    rotation: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        part = options.get(name) or {}
        # Classes with sliding windows have a rotation for each kind of layer.
        if isinstance(part, dict):
            part = part.get("full_attention", part)
        is_plain = isinstance(part, dict) and not {*part} - {"rope_theta", "rope_type", "type"}
        if not is_plain or part.get("rope_type", part.get("type", "default")) != "default":
            raise ConfigError(f"{name}={part!s:.100}: normlab has only rope_type=default")
        rotation |= part
    return {**options, **rotation}


# The classes

_OPTIONS = {
    "num_hidden_layers": "model.depth", "hidden_size": "model.width", "num_attention_heads": "model.heads",
    "intermediate_size": "model.mlp_width", "max_position_embeddings": "model.context", "rms_norm_eps": "norm.eps",
    "rope_theta": "model.rope_theta", "tie_word_embeddings": "model.tie_embeddings",
}  # fmt: skip
_SOFTCAPS = {"attn_logit_softcapping": "model.attn_softcap", "final_logit_softcapping": "model.logit_softcap"}
_OPTIONAL = ("tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias", "use_bidirectional_attention")
_HEADS = ("num_key_value_heads", "head_dim")
_QKVO = {f"self_attn.{part}_proj": (f"attn.{part}",) for part in "qkv"} | {"self_attn.o_proj": ("attn.out",)}
_GATED = {f"mlp.{part}_proj": (f"mlp.{part}",) for part in ("gate", "up", "down")}
_IN = {"input_layernorm": "wiring.attn.norms.in", "post_attention_layernorm": "wiring.mlp.norms.in"}
_OUT = {"post_attention_layernorm": "wiring.attn.norms.out", "post_feedforward_layernorm": "wiring.mlp.norms.out"}
_PERI = _OUT | {"input_layernorm": "wiring.attn.norms.in", "pre_feedforward_layernorm": "wiring.mlp.norms.in"}
_QK = {"self_attn.q_norm": "attn.qk_norms.q", "self_attn.k_norm": "attn.qk_norms.k"}
_ENDS = {"model.embed_tokens": "embed.tokens", "model.norm": "head.close", "lm_head": "head"}


def _gpt2(config: RunConfig) -> dict[str, Any]:
    return dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }  # fmt: skip


def _llama(config: RunConfig) -> dict[str, Any]:
    model = config.model
    return {
        "num_key_value_heads": model.heads, "head_dim": model.width // model.heads, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}, "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip


def _kinds_of_layers(config: RunConfig, **options: Any) -> dict[str, Any]:
    model, kinds = config.model, {"layer_types": ["full_attention"] * config.model.depth}
    return _llama(config) | kinds | {"sliding_window": model.context} | options


def _rotations(config: RunConfig, **options: Any) -> dict[str, Any]:
    """Return the options of a class that has a rotation for each kind of layer."""
    rotations = {"full_attention": _llama(config)["rope_parameters"]}
    return _kinds_of_layers(config, rope_parameters=rotations) | options


def _gemma(config: RunConfig) -> dict[str, Any]:
    model = config.model
    # Gemma 3 has norms of q and k, and a rotation for each kind of layer; Gemma 2 has neither.
    make_options = _rotations if model.qk_norm == "head" else _kinds_of_layers
    return make_options(
        config, hidden_activation="silu", query_pre_attn_scalar=model.width // model.heads,
        use_bidirectional_attention=False,
    )  # fmt: skip


def _gemma4(config: RunConfig) -> dict[str, Any]:
    """Return the options of a model with full attention, without experts and without a second embedding."""
    return _rotations(
        config, hidden_activation="silu", use_bidirectional_attention=None, per_layer_config={},
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=1, num_kv_shared_layers=0, attention_k_eq_v=False,
        enable_moe_block=False, use_double_wide_mlp=False,
    )  # fmt: skip


def _root_of_width(config: RunConfig) -> float:
    return math.sqrt(config.model.width)


def _undivided_scores(config: RunConfig) -> float:
    """Return the factor on queries and on keys that undoes the divisor of the scores."""
    return (config.model.width / config.model.heads) ** 0.25


_GPT2 = NativeClass(
    name="GPT2LMHeadModel", model_type="gpt2", overrides="model=gpt2_nano norm=layernorm placement=pre",
    free=("norm.bias", "model.bias"), fixed=_gpt2,
    options={
        "n_layer": "model.depth", "n_embd": "model.width", "n_head": "model.heads", "n_inner": "model.mlp_width",
        "n_positions": "model.context", "layer_norm_epsilon": "norm.eps", "tie_word_embeddings": "model.tie_embeddings",
    },
    optional=(
        "n_inner", "tie_word_embeddings", "activation_function", "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx", "add_cross_attention",
    ),
    linears={
        "attn.c_attn": ("attn.q", "attn.k", "attn.v"), "attn.c_proj": ("attn.out",), "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    },
    norms={"ln_1": "wiring.attn.norms.in", "ln_2": "wiring.mlp.norms.in"},
    ends={
        "transformer.wte": "embed.tokens", "transformer.wpe": "embed.positions", "transformer.ln_f": "head.close",
        "lm_head": "head",
    },
    blocks="transformer.h", has_biases=True, transposes=True,
)  # fmt: skip

_LLAMA = NativeClass(
    name="LlamaForCausalLM", model_type="llama", overrides="model=llama_nano norm=rmsnorm_llama placement=pre",
    free=("model.rope_theta",), options=_OPTIONS, fixed=_llama, optional=(*_OPTIONAL, "rope_theta", *_HEADS),
    linears=_QKVO | _GATED, norms=_IN, ends=_ENDS,
)  # fmt: skip
_QWEN3 = replace(
    _LLAMA, name="Qwen3ForCausalLM", model_type="qwen3", norms=_IN | _QK,
    overrides="model=llama_nano norm=rmsnorm_qwen3 placement=pre model.qk_norm=head",
    fixed=partial(_kinds_of_layers, use_sliding_window=False),
    optional=(*_OPTIONAL, "rope_theta", "layer_types", "use_sliding_window"),
)  # fmt: skip
_OLMO2 = replace(
    _LLAMA, name="Olmo2ForCausalLM", model_type="olmo2", norms=_OUT | _QK,
    overrides="model=llama_nano norm=rmsnorm_olmo2 placement=res_post model.qk_norm=full",
)  # fmt: skip
_OLMO3 = replace(_OLMO2, name="Olmo3ForCausalLM", model_type="olmo3", fixed=_rotations, optional=(*_OPTIONAL, *_HEADS))
_GEMMA2 = replace(
    _LLAMA, name="Gemma2ForCausalLM", model_type="gemma2", options=_OPTIONS | _SOFTCAPS, fixed=_gemma, norms=_PERI,
    overrides="model=llama_nano norm=rmsnorm_gemma placement=peri model.tie_embeddings=true",
    free=("model.rope_theta", "model.embed_scale", "model.logit_softcap", "model.attn_softcap"),
    optional=(*_OPTIONAL, "rope_theta"), gain_offset=1.0, derived={"model.embed_scale": _root_of_width},
)  # fmt: skip
_GEMMA3 = replace(
    _GEMMA2, name="Gemma3ForCausalLM", model_type="gemma3_text", overrides=f"{_GEMMA2.overrides} model.qk_norm=head",
    free=_GEMMA2.free[:-1], norms=_PERI | _QK, optional=(*_OPTIONAL, *_SOFTCAPS),
)  # fmt: skip
_GEMMA4 = replace(
    _GEMMA3, name="Gemma4ForCausalLM", model_type="gemma4_text", fixed=_gemma4, gain_offset=0.0, ones=("layer_scalar",),
    overrides=f"{_GEMMA3.overrides.replace('rmsnorm_gemma', 'rmsnorm_llama')} model.v_norm=true",
    free=(*_GEMMA3.free, "model.qk_scale"), options=_OPTIONS | {"final_logit_softcapping": "model.logit_softcap"},
    optional=(*_OPTIONAL, "final_logit_softcapping"),
    derived={"model.embed_scale": _root_of_width, "model.qk_scale": _undivided_scores},
)  # fmt: skip

CLASSES = (_GPT2, _LLAMA, _QWEN3, _OLMO2, _OLMO3, _GEMMA2, _GEMMA3, _GEMMA4)
"""The classes, in the order in which they are tried. Olmo3ForCausalLM with full attention computes what
Olmo2ForCausalLM does, so that only import uses it."""


def class_of(config: RunConfig) -> NativeClass:
    """Return the class that computes a model.

    Raises:
        ConfigError: None does; the message names the nearest one and in what it differs.
    """
    different = {native.name: native.differences(config) for native in CLASSES}
    # Of two classes with equally many differences, one whose computed options fit comes first.
    nearest = min(CLASSES, key=lambda native: (len(different[native.name]), bool(native.reason(config))))
    reason = nearest.reason(config)
    if different[nearest.name]:
        reason = f"the model differs from it in {', '.join(different[nearest.name])}"
    if not reason:
        return nearest
    class_names = ", ".join(native.name for native in CLASSES)
    raise ConfigError(
        f"no class of transformers that normlab knows ({class_names}) computes this model; the nearest is "
        f"{nearest.name}: {reason}; train a model without the difference"
    )
