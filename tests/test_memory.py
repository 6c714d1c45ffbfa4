"""The memory estimate of a run or a pack, held against the tensors that are alive during its steps."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from normlab.base.errors import ConfigError
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.config import memory
from normlab.config.compose import compose_run
from normlab.data.corpus import open_corpus
from normlab.model import chunked_loss
from normlab.store.runs import RunFolder
from normlab.training.build import build_parts
from normlab.training.loop import Loop
from normlab.training.machine import apply, resolve
from normlab.training.training_run import TrainingRun
from support.peak_bytes import PeakBytes
from support.small_run import small_run
from support.small_steps import norm_in


@pytest.mark.parametrize(
    ("overrides", "available", "message"),
    [
        ("model.width=4096 model.heads=4", 2**40, None),
        ("model.width=4096 model.heads=4", 2**30, "model.width=4096 .* the GPU has 1 GiB; lower model.depth"),
        ("train.batch_size=65536 model=gpt2_nano", 2**32, "size=65536 .* the GPU has 4 GiB; raise train.accumulation"),
        ("train.batch_size=65536 model=gpt2_nano train.accumulation=64", 2**32, None),
    ],
)
def test_error_names_the_options_to_lower(overrides: str, available: int, message: str | None) -> None:
    config = compose_run(overrides.split())
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        memory.check_fits(config, memory.estimate(config), available, "the GPU")


WITH_STREAMS = [name for name, entry in load_placements().items() if not entry.has_switches]
"""The placements that make several streams from the embeddings."""
ACTIVATIONS = "model.depth=4 model.width=64 model.heads=2 model.context=64 train.batch_size=8"
"""Most of the memory is what blocks keep for the backward pass."""
OPTIONS = [
    "hyper_connections placement.dynamic=false",
    "hyper_connections placement.dynamic=false placement.streams=16",
    "hyper_connections placement.streams=16 norm=layernorm",
    "hyper_connections norm=none",
    "hyper_connections norm.at.streams=none",
    "hyper_connections norm.at.input=none",
    "identity_hc placement.streams=16",
    "identity_hc placement.variant=hy4 norm=none",
    "mhc placement.iterations=1",
    "mhc placement.iterations=100 placement.streams=2",
    "mhc placement.iterations=2 placement.streams=16",
    "mhc placement.variant=transformers_5_8_0",
    "mhc placement.variant=megatron",
    "mhc placement.variant=untransposed norm=none",
    "gated_residual placement.rank=1 placement.streams=16",
    "gated_residual placement.rank=256 norm=layernorm",
    "gated_residual norm=none",
    "attn_res placement.every=4",
    "attn_res norm=none",
    "siamese norm=layernorm",
    "siamese norm.at.streams=none",
    "ngpt norm=none model.mlp=swiglu",
    "pre placement.residual_affine=true",
    "peri placement.residual_affine=true placement.branch_warmup=10",
    "pre placement.branch_warmup=10 placement.branch_factor=0.5",
    "peri norm.at.output=layernorm norm.at.input_mlp=none",
    "sub_ln norm.gain=false norm.compute=input",
    "parallel_two_norms norm=layernorm",
]
"""Options that change what a block keeps."""
SMALL = "model.depth=2 model.width=64 model.heads=2 model.context=64 train.batch_size=8"
SHAPES = [
    "model=gpt2_nano",
    "model=gpt2_tiny train.batch_size=1 optim=sgd",
    "model=gpt2_tiny train.batch_size=1 stats=off",
    "model=gpt2_tiny train.accumulation=2",
    "model=gpt2_tiny model.context=256",
    "model=llama_nano train.batch_size=32",
    "model=llama_tiny precision=bf16 model.context=256",
    "model.width=9 model.heads=3 model.mlp_width=11",
]
"""The state, the activations, the logits or the attention weights take the most."""


def peak_of(overrides: str, runs: int) -> tuple[int, memory.MemoryEstimate]:
    """Return the most bytes of live tensors in steps of a run or a pack, and the estimate."""
    config = compose_run([*small_run(Path("nowhere")), *overrides.split()])
    configs = [compose_run([*small_run(Path("nowhere")), *overrides.split(), f"seed={seed}"]) for seed in range(runs)]
    settings, corpus = resolve(config), open_corpus(config.data)
    apply(settings)
    training_runs = [TrainingRun(each, RunFolder("nowhere")) for each in configs]
    loop = Loop(training_runs, settings, build_parts(training_runs, settings, corpus))
    with PeakBytes() as counted:
        counted.add(*loop.state.runner.params.values(), *loop.state.runner.buffers.values())
        counted.add(*(tensor for moments in loop.state.step.optimizer.moments.values() for tensor in moments.values()))
        for step in (0, 1, 2):
            loop.take_step(step)
    return counted.peak, settings.memory_of(config, corpus.tokenizer.vocab_size, runs)


def assert_close_lower_bound(overrides: str, runs: int) -> None:
    peak, estimated = peak_of(overrides, runs)
    assert estimated.peak <= peak <= memory.PEAK_FACTOR * estimated.peak, f"{peak / estimated.peak:.2f}"


@pytest.mark.few(1)
@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("overrides", SHAPES)
def test_estimate_is_a_close_lower_bound(overrides: str, runs: int) -> None:
    assert_close_lower_bound(overrides, runs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("norm", load_norms())
def test_estimate_holds_for_every_norm(norm: str, runs: int) -> None:
    assert_close_lower_bound(f"{SMALL} norm={norm}", runs)


@pytest.mark.few(2)
@pytest.mark.parametrize("placement", WITH_STREAMS)
def test_estimate_holds_for_streams(placement: str) -> None:
    assert_close_lower_bound(f"{ACTIVATIONS} model.depth=2 placement={placement}", runs=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "runs"), [("fp32", 1), ("bf16", 3)])
@pytest.mark.parametrize("placement", [*(f"{name} {norm_in(name, 'rmsnorm')}" for name in load_placements()), *OPTIONS])
def test_estimate_holds_for_every_placement(placement: str, precision: str, runs: int) -> None:
    assert_close_lower_bound(f"{ACTIVATIONS} placement={placement} precision={precision}", runs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides", ["placement=siamese", "placement=hyper_connections", "stats=off", "norm=gatednorm"]
)
def test_tensors_that_are_stacked_for_statistics_are_counted(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU stacks those of many blocks; here also those of some of the blocks, and of none."""
    for most in (2**26, 2**23, 2**22):
        monkeypatch.setitem(memory.STACK_BYTES, "cpu", most)
        assert_close_lower_bound(f"{ACTIVATIONS} {overrides}", runs=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("runs", [1, 3])
def test_estimate_of_logits_in_chunks(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, chunked_loss):
        monkeypatch.setattr(module, "LARGE_LOGITS", 2**17)
    overrides = "model=gpt2_nano train.batch_size=64 model.depth=1"
    peak, estimated = peak_of(overrides, runs)
    assert estimated.peak <= peak <= memory.PEAK_FACTOR * estimated.peak
    monkeypatch.setattr(memory, "LARGE_LOGITS", 2**26)
    whole = peak_of(overrides, runs)[1]
    assert whole.peak > 1.3 * estimated.peak


def test_attention_of_a_pack_on_a_cpu_is_counted_and_on_a_gpu_fused() -> None:
    # A norm that keeps the same on both.
    config = compose_run(["model=gpt2_124m", "train.batch_size=16", "norm=layernorm"])
    on_cpu, on_gpu = (memory.estimate(config, device=device, runs=4).peak for device in ("cpu", "cuda"))
    assert on_cpu - on_gpu == 4 * 12 * (16 * 12 * 1024**2) * 4
    alone = (memory.estimate(config, device=device) for device in ("cpu", "cuda"))
    assert len({*alone}) == 1
