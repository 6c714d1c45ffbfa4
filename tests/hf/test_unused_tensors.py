"""A tensor that the model of config.json does not take has its values, or the folder is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from normlab.base.errors import StoreError
from normlab.data.tokenizers import SubwordTokenizer
from normlab.hf import checks
from normlab.hf.classes import class_of
from normlab.hf.export import write_folder
from normlab.hf.folder import ModelFolder, weights_sha256
from normlab.hf.tokenizer import END_OF_DOCUMENT
from normlab.model.init import build_model
from support.run_folders import Command
from support.transformers_folders import CHARS, change, change_tensor
from support.transformers_models import CONTEXT, VOCAB, config_of, randomised

TOKENS = torch.arange(CONTEXT).view(1, -1)
ROTATION = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
ANGLES = "model.layers.1.self_attn.rotary_emb.inv_freq"
MASK = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
MODELS = {
    "llama": ("model=llama_nano", "norm=rmsnorm"),
    "tied": ("model=llama_nano", "norm=rmsnorm", "model.tie_embeddings=true"),
    "gpt2": ("model=gpt2_nano", "norm=layernorm"),
}


def saved(model: str, folder: Path) -> Path:
    config = config_of(*MODELS[model])
    write_folder(folder, class_of(config), config, randomised(config), CHARS, "")
    return folder


def logits_here(folder: Path) -> Tensor:
    opened = ModelFolder.open(str(folder))
    model = build_model(opened.config, VOCAB).eval()
    weights = opened.read(opened.config, CHARS)
    model.load_state_dict(weights, strict=not opened.config.model.tie_embeddings)
    with torch.no_grad():
        return model(TOKENS)


def logits_in_transformers(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def add(name: str, values: Tensor) -> Callable[[Path], None]:
    return change_tensor(name, lambda _: values)


def add_head(factor: float) -> Callable[[Path], None]:
    """Return a function that adds the embeddings times a factor as the head."""

    def write(folder: Path) -> None:
        embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        add("lm_head.weight", factor * embeddings)(folder)

    return write


def nan_everywhere(folder: Path) -> None:
    """Write NaN into the embeddings, and add them as the head."""
    change_tensor("model.embed_tokens.weight", lambda rows: rows * torch.nan)(folder)
    add_head(1.0)(folder)


def split(second: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    """Return a function that moves the weights to the first of two files; the second has what `second` returns."""

    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        index = {}
        for number, tensors in enumerate((weights, second(weights)), 1):
            name = f"model-{number:05}-of-00002.safetensors"
            save_file(tensors, folder / name, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return write


def index_names(*names: str) -> Callable[[Path], None]:
    """Return a function that writes an index with these files."""

    def write(folder: Path) -> None:
        split(lambda weights: {})(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))

    return write


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("model", "add_tensors"),
    [
        ("tied", add_head(1.0)),
        ("gpt2", add("transformer.h.1.attn.bias", MASK)),
        ("gpt2", add("transformer.h.1.attn.bias", MASK.bool())),
        ("gpt2", add("transformer.h.1.attn.masked_bias", torch.tensor(-1e4))),
        ("llama", add(ANGLES, ROTATION)),
        ("llama", add(ANGLES, ROTATION.bfloat16())),
        ("llama", add(ANGLES, ROTATION.half())),
        ("llama", add("model.layers.0.mlp.up_proj.bias", torch.zeros(96))),
        ("llama", add("model.norm.bias", torch.zeros(32))),
        ("llama", split(lambda weights: {"model.norm.weight": weights["model.norm.weight"]})),
    ],
)
def test_a_tensor_with_the_values_of_the_model_changes_nothing(
    model: str, add_tensors: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = saved(model, tmp_path / "model")
    expected = logits_here(folder)
    add_tensors(folder)
    assert torch.equal(logits_here(folder), expected)
    torch.testing.assert_close(logits_in_transformers(folder), expected, rtol=0, atol=1e-4)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("model", "damage", "message"),
    [
        ("tied", add_head(1.125), "the model in config.json has, embed_tokens.weight (tie_word_embeddings=true)"),
        ("tied", add_head(1.125), "; set tie_word_embeddings=false in config.json, or delete lm_head.weight if it is"),
        ("tied", add_head(torch.nan), "its tensor lm_head.weight has NaN (not a number); choose another model"),
        ("tied", nan_everywhere, "its tensor lm_head.weight has NaN (not a number); choose another model"),
        ("llama", change(tie_word_embeddings=True), "its tensor lm_head.weight differs by up to "),
        ("tied", add("lm_head.weight", torch.zeros(64, 32)), "lm_head.weight is F32 [64, 32], and the model in"),
        ("gpt2", add("transformer.h.1.attn.bias", torch.ones_like(MASK)), "h.1.attn.bias differs by up to 1 from what"),
        ("gpt2", add("transformer.h.1.attn.masked_bias", torch.tensor(0.0)), "has, -1e4; choose another model"),
        ("gpt2", add("transformer.h.1.attn.masked_bias", torch.tensor(False)), "has, -1e4; choose another model"),
        ("llama", add(ANGLES, 5000.0 ** (-torch.arange(0, 8, 2) / 8)), "has, rope_theta=10000; choose another model"),
        ("llama", add(ANGLES, ROTATION[:2]), "is F32 [2], and the model in config.json has rope_theta=10000 [4]"),
        ("gpt2", add("transformer.rotary_emb.inv_freq", ROTATION), "rotary_emb.inv_freq is not one of the model in"),
        ("llama", add("model.layers.0.self_attn.q_proj.bias", torch.full((32,), 0.5)), "must be 0; it is up to 0.5"),
        ("llama", add("model.norm.bias", torch.full((32,), torch.nan)), "norm.bias has NaN (not a number); choose"),
        ("llama", split(lambda weights: {"model.norm.weight": 2 * weights["model.norm.weight"]}), "twice, with two"),
        ("llama", split(lambda weights: {"norm.weight": weights["model.norm.weight"].half()}), "twice, with two"),
        ("llama", index_names("../model.safetensors"), "index.json: names '../model.safetensors', which is no file of"),
        ("llama", index_names("model-00009-of-00009.safetensors"), "-00009.safetensors, which is missing"),
        ("llama", index_names(), "index.json: has no weight_map; save the model with save_pretrained"),
        ("llama", lambda folder: (folder / "adapter_config.json").write_text("{}"), "does not add an adapter to"),
    ],
)  # fmt: skip
def test_another_tensor_is_refused_by_name(
    model: str, damage: Callable[[Path], object], message: str, run_command: Command, tmp_path: Path
) -> None:
    damage(saved(model, tmp_path / "model"))
    code, out, err = run_command("verify", str(tmp_path / "model"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_transformers_does_not_read_the_files_that_the_index_leaves_out(llama: Path) -> None:
    """Files of an earlier save may be left."""
    expected = logits_here(llama)
    split(lambda weights: {})(llama)
    before = weights_sha256(str(llama))
    save_file({"model.norm.weight": torch.zeros(32)}, llama / "model-00003-of-00003.safetensors")
    assert weights_sha256(str(llama)) == before
    assert torch.equal(logits_here(llama), expected)
    torch.testing.assert_close(logits_in_transformers(llama), expected, rtol=0, atol=1e-4)


def test_a_head_of_its_own_is_read_if_config_json_says_so(tmp_path: Path) -> None:
    """What the message about it says to do gives the model of transformers."""
    folder = saved("tied", tmp_path / "model")
    add_head(1.125)(folder)
    with pytest.raises(StoreError, match="lm_head"):
        logits_here(folder)
    change(tie_word_embeddings=False)(folder)
    torch.testing.assert_close(logits_here(folder), logits_in_transformers(folder), rtol=0, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("lacks_end", [False, True])
def test_the_loss_with_a_padded_vocabulary_differs_as_the_warning_says(
    lacks_end: bool, run_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if the tokenizer has no end of a document, for which a run adds a token."""
    monkeypatch.setattr(checks, "all_checks_of_run", lambda config: iter(()))
    folder = saved("llama", tmp_path / "model")
    change(vocab_size=VOCAB + 3, eos_token_id=5)(folder)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        change_tensor(name, lambda rows: torch.cat([rows, rows[7:10]]))(folder)
    if lacks_end:
        definition = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(definition.replace(END_OF_DOCUMENT, "<|other|>"))
    code, _, err = run_command("verify", str(folder))
    assert code == 0
    assert f"warning: {folder}: has vocab_size={VOCAB + 3}, and its tokenizer {VOCAB} of these tokens; normlab" in err
    assert "drops the 3 rows without a token, so each loss is lower than that of transformers by -ln(1 - p)" in err
    assert (
        "the embedding of token 5, which the softmax then has twice, so that each loss is ln(1 + p)" in err
    ) == lacks_end

    opened = ModelFolder.open(str(folder))
    tokenizer = SubwordTokenizer.pretrained("x", (folder / "tokenizer.json").read_text())
    model = build_model(opened.config, tokenizer.vocab_size).eval()
    model.load_state_dict(opened.read(opened.config, tokenizer))
    theirs = logits_in_transformers(folder).double().softmax(-1)
    with torch.no_grad():
        ours = model(TOKENS).double().softmax(-1)
    expected = 1 - theirs[..., VOCAB:].sum(-1)
    if lacks_end:
        expected += theirs[..., 5]
    torch.testing.assert_close(theirs[..., 8] / ours[..., 8], expected, rtol=1e-4, atol=0)
    (folder / "tokenizer.json").write_text(definition_of_more_tokens(folder))
    code, _, err = run_command("verify", str(folder))
    assert (code, f"has a token {VOCAB + 3}, and its model vocab_size={VOCAB + 3}; choose a model" in err) == (2, True)


def definition_of_more_tokens(folder: Path) -> str:
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["model"]["vocab"]["more"] = VOCAB + 3
    return json.dumps(definition)
