"""Export a run's model as a folder that transformers loads, where one of its classes computes the same.

The folder has the weights (model.safetensors), config.json, the tokenizer and a card (README.md).
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normlab.analysis.cells import BAD_OUTCOMES
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.tokenizers import BytesTokenizer, CharsTokenizer, SubwordTokenizer, Tokenizer
from normlab.errors import ConfigError, StoreError, warn
from normlab.loaded_run import LoadedRun
from normlab.model.gpt import GPT
from normlab.options import plain_tree
from normlab.store.files import io_error
from normlab.store.outcome import format_loss
from normlab.store.record import flatten
from normlab.version import __version__

END_OF_DOCUMENT = "<|end_of_document|>"
UNKNOWN = "<|unknown|>"
Options = Mapping[str, Any]

FREE = (
    "norm.preset", "norm.gain", "norm.unit_offset", "norm.eps", "norm.compute", "norm.rounding", "model.preset",
    "model.depth", "model.width", "model.heads", "model.context", "model.mlp_width", "model.tie_embeddings",
    "model.z_loss",
)  # fmt: skip
"""Options that every class has, or that the weights can hold, or that change only training or the rounding in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeClass:
    """A class of transformers, and the models of ours that it computes."""

    name: str
    model_type: str
    overrides: str
    """A model that it computes; another one may differ from it in `FREE` and `free`."""
    free: tuple[str, ...] = ()
    config: Callable[[RunConfig], Options]
    """Its options besides the sizes."""
    sizes: Mapping[str, str]
    """Its name of each size."""
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
    reasons: Callable[[RunConfig], str] = field(default=lambda config: "")
    """Why a model cannot be exported although its options fit; empty if it can."""

    def differences(self, config: RunConfig) -> list[str]:
        """Return the options in which a model differs from those that the class computes, as `option=value`."""
        ours, theirs = (
            flatten({part: tree[part] for part in ("norm", "placement", "model")})
            for tree in map(plain_tree, (config, compose_run(self.overrides.split())))
        )
        names = [name for name in {**ours, **theirs} if name not in (*FREE, *self.free)]
        for part in ("norm.", "placement."):  # of another norm, the options say nothing
            if ours[f"{part}name"] != theirs[f"{part}name"]:
                names = [name for name in names if not name.startswith(part) or name == f"{part}name"]
        return [f"{name}={_text(ours.get(name))}" for name in names if ours.get(name) != theirs.get(name)]

    def tensors(self, config: RunConfig, model: GPT) -> Iterator[tuple[str, Tensor]]:
        """Yield its weights by name."""
        weights = dict(model.named_parameters())
        for layer in range(config.model.depth):
            for name, modules in self.linears.items():
                full = f"{self.blocks}.{layer}.{name}"
                parts: list[Tensor] = [weights[f"blocks.{layer}.{module}.weight"] for module in modules]
                joined = torch.cat(parts)
                yield f"{full}.weight", joined.T if self.transposes else joined
                if self.has_biases:
                    zeros = [part.new_zeros(len(part)) for part in parts]
                    biases = [weights.get(f"blocks.{layer}.{module}.bias") for module in modules]
                    pairs = zip(biases, zeros, strict=True)
                    yield f"{full}.bias", torch.cat([zero if bias is None else bias for bias, zero in pairs])
            for name, module in self.norms.items():
                width = config.model.width // (config.model.heads if self._is_of_head(config, module) else 1)
                yield from self._norm(
                    config, weights, f"{self.blocks}.{layer}.{name}", f"blocks.{layer}.{module}", width
                )
        for name, module in self.ends.items():
            if module == "head.close":
                yield from self._norm(config, weights, name, module, config.model.width)
            elif module != "head" or not config.model.tie_embeddings:
                yield f"{name}.weight", weights[f"{module}.weight"]

    @staticmethod
    def _is_of_head(config: RunConfig, module: str) -> bool:
        return "qk_norms" in module and config.model.qk_norm == "head"

    def _norm(
        self, config: RunConfig, weights: Mapping[str, Tensor], name: str, module: str, width: int
    ) -> Iterator[tuple[str, Tensor]]:
        like = weights["embed.tokens.weight"]
        gain = weights.get(f"{module}.affine.gain", like.new_zeros(width))
        has_gain = f"{module}.affine.gain" in weights
        is_offset = not has_gain or getattr(config.norm, "unit_offset", False)
        yield f"{name}.weight", gain + (1.0 if is_offset else 0.0) - self.gain_offset
        if self.has_biases:
            yield f"{name}.bias", weights.get(f"{module}.affine.bias", like.new_zeros(width))


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# The classes

_SIZES = {
    "depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "mlp_width":
    "intermediate_size", "context": "max_position_embeddings",
}  # fmt: skip
_QKVO = {f"self_attn.{part}_proj": (f"attn.{part}",) for part in "qkv"} | {"self_attn.o_proj": ("attn.out",)}
_GATED = {f"mlp.{part}_proj": (f"mlp.{part}",) for part in ("gate", "up", "down")}
_IN = {"input_layernorm": "wiring.attn.norms.in", "post_attention_layernorm": "wiring.mlp.norms.in"}
_OUT = {"post_attention_layernorm": "wiring.attn.norms.out", "post_feedforward_layernorm": "wiring.mlp.norms.out"}
_PERI = _OUT | {"input_layernorm": "wiring.attn.norms.in", "pre_feedforward_layernorm": "wiring.mlp.norms.in"}
_QK = {"self_attn.q_norm": "attn.qk_norms.q", "self_attn.k_norm": "attn.qk_norms.k"}
_ENDS = {"model.embed_tokens": "embed.tokens", "model.norm": "head.close", "lm_head": "head"}
_LLAMA = "model=llama_nano norm=rmsnorm"


def _gpt2(config: RunConfig) -> dict[str, Any]:
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"activation_function": "gelu_new", "layer_norm_epsilon": getattr(config.norm, "eps", None)} | no_dropout


def _llama(config: RunConfig) -> dict[str, Any]:
    model = config.model
    rotation = {"rope_type": "default", "rope_theta": model.rope_theta}
    return {
        "num_key_value_heads": model.heads, "head_dim": model.width // model.heads, "hidden_act": "silu",
        "rms_norm_eps": getattr(config.norm, "eps", None), "rope_theta": model.rope_theta, "rope_parameters": rotation,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def _gemma(config: RunConfig) -> dict[str, Any]:
    model = config.model
    options = _llama(config) | {
        "hidden_activation": "silu", "query_pre_attn_scalar": model.width // model.heads,
        "attn_logit_softcapping": model.attn_softcap, "final_logit_softcapping": model.logit_softcap,
        "sliding_window": model.context, "layer_types": ["full_attention"] * model.depth,
    }  # fmt: skip
    if config.model.qk_norm == "head":  # Gemma 3 has a rotation for each kind of layer
        options["rope_parameters"] = {"full_attention": options["rope_parameters"]}
    return options


def _scaled_embeddings(config: RunConfig) -> str:
    scale, root = config.model.embed_scale, math.sqrt(config.model.width)
    if math.isclose(scale, root, rel_tol=1e-12):
        return ""
    return f"the class multiplies embeddings by the root of the width: model.embed_scale={root!r}, not {scale:g}"


def _family(name: str, model_type: str, overrides: str, norms: Mapping[str, str]) -> NativeClass:
    return NativeClass(
        name=name, model_type=model_type, overrides=f"{_LLAMA} {overrides}", free=("model.rope_theta",), config=_llama,
        sizes=_SIZES, linears=_QKVO | _GATED, norms=norms, ends=_ENDS,
    )  # fmt: skip


def _gemma_family(name: str, model_type: str, overrides: str, norms: Mapping[str, str], *free: str) -> NativeClass:
    return NativeClass(
        name=name, model_type=model_type, overrides=f"{_LLAMA} placement=peri {overrides}",
        free=("model.rope_theta", "model.embed_scale", "model.logit_softcap", *free), config=_gemma, sizes=_SIZES,
        linears=_QKVO | _GATED, norms=norms, ends=_ENDS, gain_offset=1.0, reasons=_scaled_embeddings,
    )  # fmt: skip


_GPT2 = NativeClass(
    name="GPT2LMHeadModel", model_type="gpt2", overrides="model=gpt2_nano norm=layernorm placement=pre",
    free=("norm.bias", "model.bias"), config=_gpt2,
    sizes={"depth": "n_layer", "width": "n_embd", "heads": "n_head", "mlp_width": "n_inner", "context": "n_positions"},
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

CLASSES = (
    _GPT2,
    _family("LlamaForCausalLM", "llama", "placement=pre", _IN),
    _family("Qwen3ForCausalLM", "qwen3", "placement=pre model.qk_norm=head", _IN | _QK),
    _family("Olmo2ForCausalLM", "olmo2", "placement=res_post model.qk_norm=full", _OUT | _QK),
    _gemma_family("Gemma2ForCausalLM", "gemma2", "", _PERI, "model.attn_softcap"),
    _gemma_family("Gemma3ForCausalLM", "gemma3_text", "model.qk_norm=head", _PERI | _QK),
)
"""The classes, in the order in which they are tried."""


def class_of(config: RunConfig) -> NativeClass:
    """Return the class that computes a model.

    Raises:
        ConfigError: None does; the message names the nearest one and in what it differs.
    """
    differences = {each.name: each.differences(config) for each in CLASSES}
    reasons = {each.name: each.reasons(config) for each in CLASSES}
    for each in CLASSES:
        if not differences[each.name] and not reasons[each.name]:
            return each
    nearest = min(CLASSES, key=lambda each: (len(differences[each.name]), bool(reasons[each.name])))
    different = ", ".join(differences[nearest.name]) or reasons[nearest.name]
    verb = "the model differs from it in " if differences[nearest.name] else ""
    known = ", ".join(each.name for each in CLASSES)
    raise ConfigError(
        f"no class of transformers that normlab knows ({known}) computes this model; the nearest is {nearest.name}: "
        f"{verb}{different}; train a model without the difference"
    )


# The folder


def export(run: LoadedRun, folder: Path) -> NativeClass:
    """Write a run's model to a new folder: that of its newest checkpoint, or of the one of `run.at`.

    Raises:
        ConfigError: The folder exists and is not empty, or no class computes the model.
        StoreError: The run has no checkpoint, or the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"-o {folder}: exists; give the name of a new folder")
    native = class_of(run.config)
    if run.record.result in BAD_OUTCOMES:
        warn(f"run {run.folder.run_id}: {run.record.result}; its model is exported as it is")
    model = run.model
    write_folder(folder, native, run.config, model, run.tokenizer, _card(run, native))
    return native


@torch.no_grad()
def write_folder(
    folder: Path, native: NativeClass, config: RunConfig, model: GPT, tokenizer: Tokenizer, card: str
) -> None:
    """Write the folder, whole or not at all; errors as for `export`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    sizes = {native.sizes[name]: getattr(config.model, name) for name in native.sizes}
    options = {
        "architectures": [native.name], "model_type": native.model_type, "vocab_size": tokenizer.vocab_size,
        "tie_word_embeddings": config.model.tie_embeddings, "bos_token_id": tokenizer.end_of_document,
        "eos_token_id": tokenizer.end_of_document, "pad_token_id": None, "dtype": "float32",
    }  # fmt: skip
    weights = {name: tensor.contiguous() for name, tensor in native.tensors(config, model)}
    definition = _tokenizer_json(tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
            new = Path(made) / "model"
            new.mkdir()
            save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
            _write_json(new / "config.json", options | sizes | dict(native.config(config)))
            (new / "tokenizer.json").write_text(definition, encoding="utf-8")
            _write_json(new / "tokenizer_config.json", _TOKENIZER_OPTIONS | {"model_max_length": config.model.context})
            (new / "README.md").write_text(card, encoding="utf-8")
            shutil.copymode(new / "config.json", new / "model.safetensors")  # which safetensors hides from others
            if folder.exists():
                folder.rmdir()
            shutil.move(new, folder)
    except (OSError, SafetensorError) as error:
        reason = error if isinstance(error, OSError) else OSError(str(error))
        raise io_error(folder, "written", reason, setting="-o") from error


_TOKENIZER_OPTIONS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_DOCUMENT, "eos_token": END_OF_DOCUMENT,
    "clean_up_tokenization_spaces": False,
}  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the tokenizer as a tokenizer.json, with the same tokens for a text without `END_OF_DOCUMENT`.

    Raises:
        StoreError: Its end of a document cannot have the same number.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Definition

    if isinstance(tokenizer, SubwordTokenizer):
        made = Definition.from_str(tokenizer.definition)
    elif isinstance(tokenizer, CharsTokenizer):
        vocab = {character: token for token, character in enumerate(tokenizer.characters)}
        vocab |= {END_OF_DOCUMENT: tokenizer.end_of_document, UNKNOWN: tokenizer.unknown}
        made = Definition(models.WordLevel(vocab, unk_token=UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
    else:
        assert isinstance(tokenizer, BytesTokenizer)
        made = Definition(models.BPE(_byte_names(), []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_DOCUMENT])
    if made.token_to_id(END_OF_DOCUMENT) != tokenizer.end_of_document:
        raise StoreError("the tokenizer has no free number for the end of a document; export a run with another one")
    return made.to_str()


def _byte_names() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet: a visible one is itself, the others follow."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _card(run: LoadedRun, native: NativeClass) -> str:
    record, config, status = run.record, run.config, run.status
    corpus, train = record.corpus, config.train
    loss = format_loss(status.val_loss) if run.step == status.step else ""
    lines = {
        "block": f"norm={record.options['norm.preset'] or config.norm.name} placement={config.placement.name}, "
        f"fingerprint {record.run.fingerprint} (`normlab verify` checks it)",
        "size": f"depth {config.model.depth}, width {config.model.width}, context {config.model.context}",
        "text": f"{corpus.name}, SHA-256 {corpus.sha256}, tokenizer {corpus.tokenizer}",
        "training": f"{run.step} updates of {train.batch_size} x {config.model.context} tokens, {config.optim.name}, "
        f"learning rate {config.optim.lr:g}, seed {config.seed}",
        "outcome": f"{record.outcome or status.state}, "
        f"{f'validation loss {loss} nats/token' if loss else f'this is its checkpoint of step {run.step}'}",
        "run": f"{record.run_id}, by normlab {__version__}",
    }
    table = "\n".join(f"- {name}: {text}" for name, text in lines.items())
    return (
        f"# {native.name} of a normlab run\n\n{table}\n\n```python\nfrom transformers import AutoModelForCausalLM, "
        'AutoTokenizer\n\nmodel = AutoModelForCausalLM.from_pretrained(".")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n\nIn training each document started with '
        f"`{END_OF_DOCUMENT}`.\n"
    )
