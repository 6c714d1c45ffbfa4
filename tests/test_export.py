"""Exported models: transformers computes the same logits, text and tokens; read again, they have the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from normlab.base.errors import ConfigError
from normlab.config.compose import compose_run
from normlab.data.tokenizer_sources import train_bpe
from normlab.data.tokenizers import BytesTokenizer, CharsTokenizer, Tokenizer
from normlab.hf.classes import CLASSES, NativeClass, class_of
from normlab.hf.export import write_folder
from normlab.hf.folder import ModelFolder
from normlab.hf.tokenizer import END_OF_DOCUMENT
from normlab.model.init import build_model
from normlab.training.start import train
from support.run_folders import Command
from support.tolerance import float32_as_float64
from support.transformers_models import CONTEXT, VOCAB, config_of, randomised

TEXT = "def f(x):\n    return 'café' + x\n"
CHARS = CharsTokenizer("".join(chr(33 + index) for index in range(VOCAB - 2)))
"""As many tokens as the models of these tests."""
ROOT = 32**0.5
VARIANTS = {
    "GPT2LMHeadModel": (
        "",
        "model.tie_embeddings=false norm.bias=false model.bias=false",
        "norm.gain=false norm.eps=1e-3",
    ),
    "LlamaForCausalLM": ("", "model.tie_embeddings=true model.rope_theta=500", "norm=rmsnorm_gemma norm.eps=1e-3"),
    "Qwen3ForCausalLM": ("", "norm=rmsnorm_simple"),
    "Olmo2ForCausalLM": ("", "norm.unit_offset=true model.heads=2"),
    "Olmo3ForCausalLM": ("norm.eps=1e-5",),
    "Gemma2ForCausalLM": (
        f"model.embed_scale={ROOT} model.attn_softcap=0.3 model.logit_softcap=2",
        f"model.embed_scale={ROOT} model.tie_embeddings=false norm.unit_offset=false",
    ),
    "Gemma3ForCausalLM": (
        f"model.embed_scale={ROOT}",
        f"model.embed_scale={ROOT} norm=rmsnorm_simple model.depth=3",
    ),
    "Gemma4ForCausalLM": (
        f"model.embed_scale={ROOT} model.qk_scale={8**0.25} model.logit_softcap=2",
        f"model.embed_scale={ROOT} model.qk_scale={8**0.25} norm.unit_offset=true model.tie_embeddings=false",
    ),
}
"""Models of each class that differ in its free options."""


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("native", "overrides"),
    [(native, overrides) for native in CLASSES for overrides in VARIANTS[native.name]],
    ids=lambda value: getattr(value, "name", value),
)
def test_transformers_computes_the_same(native: NativeClass, overrides: str, tmp_path: Path) -> None:
    """Logits in float64, and the likeliest text, token for token."""
    config = config_of(*native.overrides.split(), *overrides.split())
    assert class_of(config).overrides == native.overrides  # two classes compute the same
    model = randomised(config)
    with torch.no_grad():
        for gain in (weight for name, weight in model.named_parameters() if name.endswith("gain")):
            gain.copy_((gain * 2**12).round() / 2**12)  # so that adding or subtracting 1 rounds nothing
    write_folder(tmp_path / "model", native, config, model, CHARS, "")
    folder = ModelFolder.open(str(tmp_path / "model"))
    again = build_model(folder.config, VOCAB).eval()
    again.load_state_dict(folder.read(folder.config, CHARS), strict=not config.model.tie_embeddings)
    in_float32 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert type(in_float32).__name__ == native.name
    with float32_as_float64():  # also the frequencies of RoPE, which no file has
        loaded: Any = type(in_float32)(in_float32.config).double().eval()
    loaded.load_state_dict(in_float32.state_dict())
    model = model.double()
    tokens = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), float32_as_float64():
        expected = model(tokens)
        assert expected.std() > 0.3
        torch.testing.assert_close(again.double()(tokens), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(loaded(tokens, use_cache=False).logits, expected, rtol=0, atol=1e-10)
        ours = tokens[:1, :4]
        for _ in range(CONTEXT - 4):
            ours = torch.cat([ours, model(ours)[:, -1].argmax(-1, keepdim=True)], dim=1)
        options = {"do_sample": False, "max_length": CONTEXT, "eos_token_id": None, "pad_token_id": 0}
        assert loaded.generate(tokens[:1, :4], **options).tolist() == ours.tolist()


@pytest.mark.parametrize(
    "tokenizer",
    [
        BytesTokenizer(),
        CharsTokenizer("".join(sorted(set(TEXT)))),
        CharsTokenizer("\n ()cdfx\ufffd"),
        train_bpe([TEXT * 9], 280),
    ],
    ids=["bytes", "chars", "unknown chars", "bpe"],
)
def test_tokens_are_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    native = next(each for each in CLASSES if each.name == "LlamaForCausalLM")
    config = config_of(*native.overrides.split())
    write_folder(tmp_path / "model", native, config, randomised(config), tokenizer, "")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = tokenizer.encode(TEXT).tolist()
    assert loaded.encode(TEXT, add_special_tokens=False) == expected
    assert loaded.decode(expected).replace("<|unknown|>", "\ufffd") == tokenizer.decode(expected)
    assert loaded.convert_tokens_to_ids(END_OF_DOCUMENT) == loaded.eos_token_id == tokenizer.end_of_document
    assert len(loaded) == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("overrides", "nearest", "reason"),
    [
        ("norm=layernorm model=llama_nano", "LlamaForCausalLM", "the model differs from it in norm.name=layernorm"),
        ("model=llama_nano placement=deepnorm", "LlamaForCausalLM", "differs from it in placement.name=deepnorm"),
        (
            "model=llama_nano placement=peri",
            "Gemma2ForCausalLM",
            "model.embed_scale=5.656854249492381, not 1; train a model",
        ),
        ("norm=layernorm placement.embedding_norm=true", "GPT2LMHeadModel", "in placement.embedding_norm=true"),
    ],
)
def test_a_model_of_no_class_is_refused(overrides: str, nearest: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        class_of(config_of(*overrides.split()))
    assert f"the nearest is {nearest}: " in str(error.value)
    assert reason in str(error.value)


def test_the_card_is_about_the_exported_checkpoint(overrides: list[str], tmp_path: Path, run_command: Command) -> None:
    options = ["norm=rmsnorm", "model=llama_nano", "train.steps=4", "train.checkpoint_every=2"]
    run = train(compose_run([*overrides, *options]), trackers=[]).folder
    newest = sorted((run.path / "checkpoints").iterdir())[-1]
    (newest / "manifest.json").unlink()
    code, _, err = run_command("export", str(run.path), "-o", str(tmp_path / "model"))
    assert (code, "using the previous checkpoint" in err) == (0, True)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "training: 2 updates" in card
    assert "this is its checkpoint of step 2" in card
    assert "validation loss" not in card


def test_command(overrides: list[str], tmp_path: Path, run_command: Command) -> None:
    """The card names the run; an existing folder and a model of no class are left alone."""
    run = train(compose_run([*overrides, "norm=rmsnorm", "model=llama_nano", "train.steps=2"]), trackers=[]).folder
    folder = tmp_path / "out" / "model"
    code, out, err = run_command("export", str(run.path), "-o", str(folder))
    assert (code, err, out.splitlines()[-1]) == (0, "", str(folder))
    files = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    card = (folder / "README.md").read_text()
    assert run.run_id in card
    assert "norm=rmsnorm placement=pre" in card
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert "normlab" not in str(type(transformers.AutoModelForCausalLM.from_pretrained(folder)))
    code, _, err = run_command("export", str(run.path), "-o", str(folder))
    assert (code, err.count("\n")) == (2, 1)
    assert "exists; give the name of a new folder" in err
    other = train(compose_run([*overrides, "norm=dyt", "model=llama_nano", "train.steps=2"]), trackers=[]).folder
    code, _, err = run_command("export", str(other.path), "-o", str(tmp_path / "other"))
    assert (code, err.count("\n")) == (2, 1)
    assert "norm.name=dyt" in err
    assert not (tmp_path / "other").exists()
