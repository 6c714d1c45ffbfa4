"""Estimate a lower bound on the peak memory of an eager step from its config, for a single run and for a pack.

Three moments may be the peak: the end of the forward pass, the start of the backward pass, and the update. The tests
hold the bound against the live tensors of real steps: the peak is at least the bound, and at most `PEAK_FACTOR` times.

Not counted: biases and norms, statistics except for their copies of weights and of observed tensors, workspaces of
kernels, fragmentation, the memory that a CUDA graph keeps between its steps, the copy of the state for checkpoints, the
corpus and the process itself.

Shapes: R runs, B sequences of a micro-batch, T context, D model width, H heads, M width of the MLP, V vocabulary.
"""

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

from normlab.base.errors import ConfigError
from normlab.catalogue.sites import parts_of
from normlab.catalogue.statistics.registry import NEEDS_PARAMETER_COPY, STATISTICS
from normlab.catalogue.statistics.statistic import CORE
from normlab.config.norms import PlacedNorm
from normlab.config.schema import RunConfig
from normlab.system import cgroup

VOCAB_SIZE = 257
"""Assumed vocabulary: bytes. The vocabulary of another tokenizer is unknown before its text is read."""
PEAK_FACTOR = 2
"""The tensors of a step take at most this many times the estimate, for the shapes that the tests measure."""
LARGE_LOGITS = 2**26
"""Values of one run's logits in a micro-batch above which they are computed in chunks, and values of one chunk of all
runs: 256 MiB in float32. Smaller logits are computed at once."""
STACK_BYTES = {"cpu": 2**21, "cuda": 5 * 2**25}
"""Most bytes of observed tensors that are stacked for their statistics, by device. It limits the memory of the stack,
and that of the tensors that autograd does not keep; on a GPU, larger tensors take longer than the start of a kernel."""
MOST_CHUNKS = 16
"""Most chunks of a micro-batch, because a compiled head repeats the code for each. Chunks are larger then."""
INSIDE = (*parts_of("qk"), "v", *parts_of("inner"))
"""Sites inside sub-layers."""
BRANCH_SITES = (*INSIDE, *parts_of("output"))
"""Sites whose norms have inputs in the dtype of autocast."""
ALIGNMENT = 8
"""Each tensor of stacked runs is padded to a multiple of this many numbers: kernels read 16 bytes at once, 8 numbers in
bfloat16."""


class MemoryEstimate(NamedTuple):
    """Lower bounds on the bytes of a run, or of a pack, on each of its devices."""

    state: int
    """During the update: weights, gradients, moments, the copy that measured steps make, temporaries of a pack."""
    batch: int
    """What a micro-batch adds to the weights and moments, from the forward pass to the start of the backward pass."""
    peak: int


def estimate(
    config: RunConfig,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    compiled: bool = False,
    vocab_size: int = VOCAB_SIZE,
    runs: int = 1,
) -> MemoryEstimate:
    """Return lower bounds on the bytes of a run, or of a pack of such runs.

    Args:
        device: cpu or cuda; a pack on a CPU, and attention with a softcap, keep the attention weights, (R, B, H, T, T).
        precision: fp32, tf32, bf16 or fp16; the last two are for autocast, whose values have 2 bytes.
        compiled: Whether the blocks are compiled: compiled code may compute some values again.
    """
    model, train = config.model, config.train
    assert model.mlp_width is not None  # resolved
    sequences = train.batch_size // config.devices // config.micro_batches
    tokens = sequences * model.context
    size = 2 if precision in ("bf16", "fp16") else 4
    # Weights are float32 in every precision, and padded only where they are stacked.
    multiple = ALIGNMENT if runs > 1 else 1
    weights = 4 * runs * num_weights(config, vocab_size, multiple)
    embeddings = 4 * runs * num_embeddings(config, vocab_size, multiple)
    # For a single run, the kernel of a GPU computes again what the gain multiplies. In a pack the gain is multiplied
    # outside of the kernel, so that this tensor is kept.
    keeps_normalised = runs > 1 or device == "cpu"
    blocks = _saved_by_blocks(config, tokens, size, compiled=compiled, keeps_normalised=keeps_normalised)
    if (runs > 1 and device == "cpu" and not compiled) or model.attn_softcap is not None:
        blocks += model.depth * sequences * model.heads * model.context**2 * size
    saved = runs * (blocks + 8 * sequences * (model.context + 1))
    if size == 2 and not compiled:
        # The copies of the weights in autocast's dtype live as long.
        saved += weights // 2
    moments = config.optim.of_group("matrices").kept * (weights - embeddings)
    moments += config.optim.of_group("embed").kept * embeddings
    stacked = _stacked(config, runs * tokens, runs * blocks, STACK_BYTES[device])
    batch = saved + max(stacked, _logits(config, runs, tokens, vocab_size, compiled=compiled))
    if config.micro_batches > 1:
        # The sums of the gradients of all micro-batches live beside those of one.
        batch += weights
    # During the update: the weights and their gradients, and further copies.
    copies = 2
    if config.stats.names(CORE) & set(NEEDS_PARAMETER_COPY):
        copies += 1
    if runs > 1:
        copies += 1
    if config.eval.ema is not None:
        copies += 1
    state = copies * weights + moments
    return MemoryEstimate(state, batch, max(state, weights + moments + batch))


def _saved_by_blocks(config: RunConfig, tokens: int, size: int, *, compiled: bool, keeps_normalised: bool) -> int:
    """Return the bytes of a run that its blocks save for the backward pass, but for the attention weights.

    In each block they are the inputs of both sub-layers, q, k, v and the attention output; the MLP before and after its
    nonlinearity, for swiglu also gate and product; the input of each norm, and what its gain multiplies; and what the
    wiring keeps.

    Args:
        tokens: Tokens of a micro-batch.
        size: Bytes of a number of autocast.
        compiled: As in `estimate`.
        keeps_normalised: Whether a norm with a gain keeps what the gain multiplies, as the kernels of some do not.
    """
    model, placement = config.model, config.placement
    assert model.mlp_width is not None  # resolved
    products = 2 if model.mlp == "swiglu" else 1
    # Compiled code may compute the nonlinearity again in the backward pass, and this is a lower bound.
    stages = 1 if compiled else 2
    inputs = 1 if compiled or placement.is_parallel else 2
    saved = tokens * size * model.depth * ((4 + inputs) * model.width + products * stages * model.mlp_width)
    if compiled:
        return saved
    # In float32, in which norms compute and the stream is in every precision.
    kept = model.depth * placement.kept_numbers(model.depth, model.width)
    of_sub_layers = 0
    for placed, numbers in _norms_in_blocks(config):
        if placed.site in parts_of("input"):
            of_sub_layers += 1
        if placed.site in BRANCH_SITES and getattr(placed.norm, "compute", "fp32") == "input":
            saved += tokens * size * numbers
        elif not (placement.is_parallel and placed.site == "input_mlp"):  # its input is that of `input_attn`
            kept += numbers
        if keeps_normalised and placed.norm.keeps_normalised:
            # Options may round it to the dtype of the input.
            saved += tokens * (size if placed.site in BRANCH_SITES else 4) * numbers
    # A norm keeps the input of its sub-layer. Without a norm the sub-layer does, unless autocast copies it.
    readers = 2 * model.depth if size == 4 else of_sub_layers
    kept += readers * placement.kept_with_input(model.width)
    return saved + tokens * 4 * kept


def _norms_in_blocks(config: RunConfig) -> Iterator[tuple[PlacedNorm, int]]:
    """Yield each norm in the blocks that is not `none`, and how many numbers of a token it normalises."""
    for placed in config.placed_norms:
        if placed.layer is None or placed.norm.is_identity:
            continue
        yield placed, math.prod(placed.shape)


def _stacked(config: RunConfig, tokens: int, saved: int, most: int) -> int:
    """Return how many bytes more than the `saved` ones of its blocks a measured step has, for its statistics.

    The observed tensors of as many blocks as fit into `most` bytes are copied into stacks, in float32: the stream that
    enters a block, what each sub-layer adds to it, the output of each norm, each of several streams and their sum.
    A kurtosis needs a copy of the streams; the cosines of several streams and their sum need one of the sum beside each
    stream, and the products.

    Args:
        tokens: Tokens of a micro-batch of all runs.
    """
    model, in_tensors = config.model, config.placement.streams_in_tensors
    observed = {STATISTICS[name].of for name in config.stats.names(CORE)}
    vectors = in_tensors[0] * len(observed & {"resid", "attn", "mlp"})
    streams = sum(in_tensors)
    if "streams" in observed and streams > 1:
        vectors += 3 * streams + 1
    elif "resid" in observed:
        vectors += in_tensors[0]
    block = 4 * tokens * vectors * model.width
    if "norm" in observed:
        for placed, numbers in _norms_in_blocks(config):
            # No other observed tensor is the input of a norm inside a sub-layer.
            vectors = 2 if placed.site in INSIDE else 1
            block += 4 * tokens * vectors * numbers // model.depth
    blocks = min(model.depth, most // max(block, 1))
    # While the last full stack is computed, the blocks behind it have not run and have saved nothing.
    remaining = model.depth % blocks if blocks else 0
    return max(blocks * block - saved * remaining // model.depth, 0)


def _logits(config: RunConfig, runs: int, tokens: int, vocab_size: int, *, compiled: bool) -> int:
    """Return the bytes of the logits and their gradients, in the forward or the backward pass, whichever has more."""
    logits = 4 * runs * tokens * vocab_size
    forward, backward = 2 * logits, 3 * logits
    if tokens * vocab_size > LARGE_LOGITS:
        # The gradients of the head are computed in the forward pass, chunk by chunk.
        chunk = max(LARGE_LOGITS // (runs * vocab_size), -(-tokens // MOST_CHUNKS))
        head = 4 * runs * config.model.width * (tokens + vocab_size)
        forward, backward = head + 3 * 4 * runs * chunk * vocab_size, head
    if compiled:
        forward, backward = forward // 4, backward // 4
    return max(forward, backward)


def num_weights(config: RunConfig, vocab_size: int = VOCAB_SIZE, multiple: int = 1) -> int:
    """Return the number of weights of a validated config, without biases and norms.

    Each matrix is padded to a multiple of `multiple` numbers.
    """
    model = config.model
    assert model.mlp_width is not None  # resolved
    matrices = [(model.depth, model.attn_outputs), (model.mlp_matrices * model.depth, model.mlp_width)]
    return num_embeddings(config, vocab_size, multiple) + _padded(matrices, model.width, multiple)


def num_embeddings(config: RunConfig, vocab_size: int = VOCAB_SIZE, multiple: int = 1) -> int:
    """Return the number of weights of the embeddings and the head, as `num_weights`."""
    model = config.model
    tables = sum(map(model.has_value_embed, range(model.depth)))
    # Of the tokens, and the head.
    tables += 1 if model.tie_embeddings else 2
    matrices = [(tables, vocab_size), (model.positions == "learned", model.context)]
    return _padded(matrices, model.width, multiple)


def _padded(matrices: list[tuple[int, int]], width: int, multiple: int) -> int:
    return sum(count * -(-rows * width // multiple) * multiple for count, rows in matrices)


def check_fits(config: RunConfig, needed: MemoryEstimate, available: int, owner: str) -> None:
    """Check that a run fits into the `available` bytes of their `owner`.

    Raises:
        ConfigError: The message names the memory needed, the memory available and what to lower.
    """
    if needed.peak <= available:
        return
    model, train = config.model, config.train
    if needed.state > available:
        options = f"model.depth={model.depth} model.width={model.width} model.mlp_width={model.mlp_width}"
        remedy = "lower model.depth or model.width"
    else:
        options = f"train.batch_size={train.batch_size} model.context={model.context} model.depth={model.depth}"
        remedy = "raise train.accumulation, or lower train.batch_size or model.context"
    raise ConfigError(
        f"{options}: needs at least {format_size(needed.peak)} of memory, and {owner} has {format_size(available)}; "
        f"{remedy}"
    )


def available_bytes() -> int:
    """Return the bytes of memory for this process: physical memory, or less in a cgroup."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [*cgroup.limits("memory", "memory.max"), *cgroup.limits("memory", "memory.limit_in_bytes")]
    return min([available, *(int(limit) for limit in limits if limit != "max")])


def format_size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # Three digits: 1,000 of a unit and more are written in the next one.
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} PiB"
