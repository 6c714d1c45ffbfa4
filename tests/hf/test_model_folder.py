"""Models that transformers has made are read with the same logits; what normlab cannot represent is refused."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from normlab.base.errors import NormlabError
from normlab.data.tokenizers import BytesTokenizer, SubwordTokenizer
from normlab.hf import checks
from normlab.hf import folder as folder_module
from normlab.hf.classes import CLASSES, NOT_READ, class_of
from normlab.hf.export import write_folder
from normlab.hf.folder import ModelFolder, weights_sha256
from normlab.model.init import build_model
from support.run_folders import Command
from support.tolerance import float32_as_float64
from support.transformers_folders import CHARS, change, change_tensor
from support.transformers_models import CONTEXT, VOCAB, config_of, randomised

FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": 3}
"""Layers with full attention, which read no window."""
TWO_ROTATIONS = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in (("full_attention", 500.0), ("sliding_attention", 9.0))
}
GEMMA = FULL | {"hidden_activation": "silu", "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "layer_norm_epsilon": 1e-3},
    "LlamaForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"rms_norm_eps": 1e-3},
    "Olmo2ForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "Olmo3ForCausalLM": FULL | {"rope_parameters": TWO_ROTATIONS},
    "Gemma2ForCausalLM": GEMMA | {"attn_logit_softcapping": 0.3, "final_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": GEMMA | {"rope_parameters": TWO_ROTATIONS},
    "Gemma4ForCausalLM": GEMMA
    | {"rope_parameters": TWO_ROTATIONS, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
    | {"vocab_size_per_layer_input": 1, "num_kv_shared_layers": 0},
}
"""Options of transformers for a small model of each class, besides its sizes."""
SIZES = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": CONTEXT,
}  # fmt: skip
HARMLESS = {
    "attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "max_window_layers", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "reorder_and_upcast_attn", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "model_type",
    "_sliding_window_pattern", "num_experts", "top_k_experts", "moe_intermediate_size",
}  # fmt: skip
"""Options that change neither logits nor weights: tokens, training, precision, heads of other tasks, and experts of a
model without them."""


def made_by_transformers(name: str, folder: Path, **options: Any) -> transformers.PreTrainedModel:
    """Save a model with random weights of every kind."""
    sizes = {} if name.startswith("GPT2") else SIZES
    config_class = getattr(transformers, name).config_class
    config = config_class(
        **{"vocab_size": VOCAB, "eos_token_id": 59, "bos_token_id": 59, "pad_token_id": None}, **sizes | CONFIGS[name]
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model = model.bfloat16() if "Olmo2" in name else model
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_transformers_has_the_same_logits(name: str, tmp_path: Path) -> None:
    """Also in several files, and in bfloat16, which float32 holds."""
    theirs = made_by_transformers(name, tmp_path, max_shard_size="20KB" if "Qwen" in name else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("Qwen" in name)
    folder = ModelFolder.open(str(tmp_path))
    assert (folder.native.name, folder.vocab_size) == (name, VOCAB)
    folder.tensors(folder.config)
    ours = build_model(folder.config, VOCAB).eval()
    ours.load_state_dict(folder.read(folder.config, CHARS), strict=not folder.config.model.tie_embeddings)
    tokens = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(2))
    tokens[tokens == CHARS.end_of_document] = 0
    with torch.no_grad(), float32_as_float64():
        in_float64 = type(theirs)(theirs.config).double().eval()
        in_float64.load_state_dict(theirs.state_dict())
        expected = in_float64(tokens, use_cache=False).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours.double()(tokens), expected, rtol=0, atol=1e-10)


def test_a_factor_on_the_stream_that_is_not_1_is_refused(tmp_path: Path, run_command: Command) -> None:
    made_by_transformers("Gemma4ForCausalLM", tmp_path)
    change_tensor("model.layers.1.layer_scalar", lambda scalar: scalar / 2)(tmp_path)
    code, _, err = run_command("verify", str(tmp_path))
    assert code == 2
    assert "its tensor layers.1.layer_scalar is 0.5, and must be 1; choose another model" in err


def test_a_folder_that_transformers_reads_as_another_class_is_refused(tmp_path: Path, run_command: Command) -> None:
    """By its model_type it is a Mistral model, each token of which sees three at most; by `architectures` a Llama."""
    llama = made_by_transformers("LlamaForCausalLM", tmp_path)
    change(model_type="mistral", sliding_window=3)(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = torch.arange(CONTEXT)[None]
    with torch.no_grad():
        expected, found = (model(tokens, use_cache=False).logits for model in (llama, read))
    torch.testing.assert_close(found[:, :3], expected[:, :3])
    assert (found - expected)[:, 3:].abs().max() > 0.1
    code, out, err = run_command("verify", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model_type=mistral: a LlamaForCausalLM has model_type=llama; choose another model" in err


def test_every_option_of_a_class_is_read_or_harmless() -> None:
    common = set(transformers.PreTrainedConfig().to_dict())
    for native in CLASSES:
        config_class = getattr(transformers, native.name).config_class
        read = {*native.options, *native.fixed(config_of(*native.overrides.split())), *NOT_READ}
        assert set(config_class().to_dict()) - common - read - HARMLESS == set(), native.name


def test_the_official_files_of_gpt2_have_other_names(tmp_path: Path) -> None:
    """They lack the prefix and have masks; their config.json lacks options."""
    made_by_transformers("GPT2LMHeadModel", tmp_path)
    expected = ModelFolder.open(str(tmp_path)).read(config := ModelFolder.open(str(tmp_path)).config, CHARS)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("transformer."): values for name, values in weights.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(renamed | masks, tmp_path / "model.safetensors")
    change(n_inner=..., tie_word_embeddings=..., activation_function=..., scale_attn_weights=...)(tmp_path)
    folder = ModelFolder.open(str(tmp_path))
    folder.tensors(folder.config)
    again = folder.read(config, CHARS)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def change_header(folder: Path) -> None:
    """Declare a tensor of 2^60 numbers in the bytes of the file."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [2**60]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a damage that deletes a file of the folder, and makes something else in its place."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def linked_from_outside(path: Path) -> None:
    (path.parent.parent / "outside").write_text("{}")
    path.symlink_to("../outside")


def sparse(path: Path) -> None:
    """Make a file of a terabyte without content, which takes hours to hash."""
    with path.open("wb") as file:
        file.truncate(2**40)


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


PIPE, LINK = "cannot be read (is a pipe or a device, not a file)", "is a link to "


@pytest.mark.few(20)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replaced("model.safetensors", os.mkfifo), f"model.safetensors: {PIPE}; restore a copy"),
        (replaced("model.safetensors", linked_from_outside), f"model.safetensors: cannot be read ({LINK}"),
        (replaced("model.safetensors", sparse), "cannot be read (has 1099511627776 bytes, of which the disk holds 0"),
        (replaced("model.safetensors", Path.mkdir), "model.safetensors: cannot be read ([Errno 21] Is a directory"),
        (replaced("model.safetensors", Path.touch), "model.safetensors: cannot be read (has no header of safetensors)"),
        (lambda folder: appended(folder / "model.safetensors"), ", and its header declares "),
        (replaced("config.json", linked_from_outside), f"config.json: cannot be read ({LINK}"),
        (change(num_key_value_heads=2), "num_key_value_heads=2: normlab has this model only with"),
        (change(hidden_act="gelu"), "hidden_act=gelu: normlab has this model only with hidden_act=silu"),
        (change(attention_bias=True), "attention_bias=true: normlab has this model only with attention_bias=false"),
        (change(head_dim=16), "head_dim=16: normlab has this model only with head_dim=8"),
        (change(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "normlab has only rope_type=default"),
        (change(rope_parameters=None, rope_scaling={"type": "linear"}), "normlab has only rope_type=default"),
        (change(rope_parameters={"full_attention": 3}), "rope_parameters=3: normlab has only rope_type=default"),
        (change(rope_parameters="yarn"), "normlab has only rope_type=default"),
        (change(architectures=["MambaForCausalLM"]), "unknown class 'MambaForCausalLM'"),
        (change(architectures=["GPT2LMHeadModel"]), "config.json: has no n_layer; choose another model"),
        (change(architectures=["Gemma2ForCausalLM"]), "has no attn_logit_softcapping"),
        (change(architectures=["Olmo3ForCausalLM"]), "has no layer_types; normlab has this model only with"),
        (change(architectures=["MistralForCausalLM"]), "unknown class 'MistralForCausalLM'"),
        (change(num_hidden_layers=3), "has no tensor layers.2.self_attn.q_proj.weight; choose another model"),
        (change(num_hidden_layers=1), "its tensor layers.1.input_layernorm.weight is not one of the model"),
        (change(num_hidden_layers=10_000), "has 21 tensors, too few for model.depth=10000"),
        (change(num_hidden_layers=10**9), "model.depth=1000000000: must be at most 10000"),
        (change(num_hidden_layers="${oc.env:HOME}"), "num_hidden_layers='${oc.env:HOME}': must be a number"),
        (change(num_hidden_layers=True), "model.depth"),
        (change(num_attention_heads=5), "model.heads=5"),
        (change(hidden_size=-1), "model.width=-1: must be at least 1"),
        (change(rms_norm_eps=float("nan")), "norm.eps=nan: must be a finite number"),
        (change(rms_norm_eps=...), "config.json: has no rms_norm_eps; choose another model"),
        (change(vocab_size=[61]), "vocab_size=[61]: must be 1 to 1048576"),
        (change(vocab_size=62), "embed_tokens.weight is F32 [61, 32], and must be F32 or BF16 or F16 [62, 32]"),
        (change_tensor("model.norm.weight", None), "model.safetensors: has no tensor norm.weight"),
        (change_tensor("model.norm.gain", torch.clone), "its tensor norm.gain is not one of the model in config.json"),
        (change_tensor("model.norm.weight", torch.Tensor.double), "norm.weight is F64 [32], and must be F32 or BF16"),
        (change_tensor("model.layers.0.mlp.up_proj.weight", torch.t), "up_proj.weight is F32 [32, 96], and must be"),
        (change_header, "model.safetensors: cannot be read ("),
        (pickle_only, "has no model.safetensors; save the model with save_pretrained(safe_serialization=True)"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99), "cannot be read ("),
        (lambda folder: (folder / "config.json").write_text("[1"), "config.json: cannot be read ("),
        (lambda folder: (folder / "config.json").write_text("[" * 10**5), "cannot be read (nested too deeply)"),
        (lambda folder: (folder / "config.json").write_bytes(b" " * 2**21), "cannot be read (has 2097152 bytes"),
    ],
)  # fmt: skip
def test_what_normlab_cannot_represent_is_one_line(
    damage: Callable[[Path], object], message: str, llama: Path, run_command: Command
) -> None:
    damage(llama)
    code, out, err = run_command("verify", str(llama))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_verify_prints_the_class_and_the_overrides(
    llama: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "all_checks_of_run", lambda config: iter(()))
    os.symlink(llama, tmp_path / "link")
    code, out, err = run_command("verify", "link")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == (
        "ok    model link: is a LlamaForCausalLM  model=llama_nano norm=rmsnorm_llama placement=pre model.depth=2 "
        "model.width=32 model.heads=4 model.mlp_width=96 model.context=24 norm.eps=1e-06 model.rope_theta=10000.0 "
        "model.tie_embeddings=false"
    )
    (tmp_path / "empty").mkdir()
    code, _, err = run_command("verify", "empty")
    assert (code, err.count("\n")) == (2, 1)
    assert "no runs in empty: train one with `normlab train`" in err


def test_a_run_needs_the_model_and_the_tokenizer_of_the_folder(llama: Path) -> None:
    folder = ModelFolder.open(str(llama))
    fitting = [*folder.overrides, "norm.unit_offset=true", "norm.rounding=scale_then_cast", "model.context=8"]
    folder.check(config_of(*fitting), CHARS)
    for overrides, message in (
        (["norm=layernorm"], "holds another model than norm.name=layernorm; set model=llama_nano norm=rmsnorm_llama"),
        (["model.width=64"], "holds another model than model.width=64; set"),
        (["norm=rmsnorm_simple"], "than norm.gain=false; set"),
        (["model.context=48"], "than model.context=48 (at most 24); set"),
    ):
        with pytest.raises(NormlabError) as error:
            folder.check(config_of(*folder.overrides, *overrides), CHARS)
        assert message in str(error.value)
    with pytest.raises(NormlabError) as error:
        folder.check(folder.config, BytesTokenizer())
    assert f"is not the tokenizer of train.start_from={llama}; set data.tokenizer={llama / 'tokenizer.json'}" in str(
        error.value
    )
    folder.check(folder.config, tokenizer := SubwordTokenizer("x", (llama / "tokenizer.json").read_text()))
    assert tokenizer.vocab_size == VOCAB + 1
    change(eos_token_id=None)(llama)
    with pytest.raises(NormlabError, match="eos_token_id=None: is no token"):
        ModelFolder.open(str(llama)).check(folder.config, tokenizer)


def test_a_unit_offset_and_a_shorter_context_compute_the_same(tmp_path: Path) -> None:
    """The token after each document, which the folder lacks, has the weights of the token after a text."""
    config = config_of("model=gpt2_nano", "norm=layernorm")
    write_folder(tmp_path, class_of(config), config, model := randomised(config), CHARS, "")
    folder = ModelFolder.open(str(tmp_path))
    other = config_of(*folder.overrides, "norm.unit_offset=true", "model.context=8")
    tokenizer = SubwordTokenizer("x", (tmp_path / "tokenizer.json").read_text())
    again = build_model(other, tokenizer.vocab_size).eval()
    again.load_state_dict(folder.read(other, tokenizer), strict=False)
    tokens = torch.arange(16).view(2, 8)
    tokens[0, 3] = CHARS.end_of_document
    with torch.no_grad():
        logits = again(tokens.where(tokens != CHARS.end_of_document, tokenizer.end_of_document))
        torch.testing.assert_close(logits[..., :VOCAB], model(tokens), rtol=0, atol=1e-4)
        assert torch.equal(logits[..., VOCAB], logits[..., CHARS.end_of_document])


def test_a_model_of_the_hub(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only JSON and safetensors are downloaded."""
    asked = []

    def download(repository: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append((repository, allow_patterns))
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert ModelFolder.open("hf://some/model").native.name == "LlamaForCausalLM"
    assert weights_sha256("hf://some/model") == hashlib.sha256((llama / "model.safetensors").read_bytes()).hexdigest()
    files = ["config.json", "tokenizer.json", "model*.safetensors", "model.safetensors.index.json"]
    assert asked == [("some/model", [*files, "adapter_config.json"])] * 2


@pytest.mark.parametrize("make", [os.mkfifo, sparse, linked_from_outside])
def test_weights_are_checked_before_they_are_hashed(
    make: Callable[[Path], object], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_sha256", lambda _: pytest.fail("hashed first"))
    replaced("model.safetensors", make)(llama)
    with pytest.raises(NormlabError, match=r"model\.safetensors: cannot be read"):
        weights_sha256(str(llama))


@pytest.mark.parametrize("make", [os.mkfifo, sparse, linked_from_outside, Path.mkdir])
def test_a_tokenizer_of_the_folder_is_a_file_of_the_folder(make: Callable[[Path], object], llama: Path) -> None:
    folder = ModelFolder.open(str(llama))
    replaced("tokenizer.json", make)(llama)
    with pytest.raises(NormlabError, match=r"tokenizer\.json: cannot be read"):
        folder.check(folder.config, CHARS)


def test_the_hash_is_of_the_content(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    first = weights_sha256(str(llama))
    assert weights_sha256(str(copy)) == first
    change_tensor("model.norm.weight", torch.neg)(copy)
    assert weights_sha256(str(copy)) != first
