"""Estimate a lower bound on the peak memory of an eager step from its config, for a single run and for a pack.

Three moments may be the peak: the end of the forward pass, the start of the backward pass, and the update. The tests
hold the bound against the live tensors of real steps: the peak is at least the bound, and at most `PEAK_FACTOR` times.

Not counted: biases and norms, statistics except for their copy of the weights, workspaces of kernels, fragmentation,
the memory that a CUDA graph keeps between its steps, the copy of the state for checkpoints, the corpus and the process
itself.

Shapes: R runs, B sequences of a micro-batch, T context, D model width, H heads, M width of the MLP, V vocabulary.
"""

import os
from typing import NamedTuple

from normlab.base.errors import ConfigError
from normlab.catalogue.placements.base import projects
from normlab.catalogue.statistics.registry import NEEDS_PARAMETER_COPY
from normlab.catalogue.statistics.statistic import CORE
from normlab.config.schema import RunConfig
from normlab.system import cgroup

VOCAB_SIZE = 257
"""Assumed vocabulary: bytes. The vocabulary of another tokenizer is unknown before its text is read."""
PEAK_FACTOR = 2
"""Most times the estimate that the tensors of a step take, for the shapes that the tests measure."""
LARGE_LOGITS = 2**26
"""Values of one run's logits in a micro-batch above which they are computed in chunks, and values of one chunk of all
runs: 256 MiB in float32. Smaller logits are computed at once."""
MOST_CHUNKS = 16
"""Most chunks of a micro-batch, because a compiled head repeats the code for each. Chunks are larger then."""
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
    layer = _saved_by_layer(config, sequences, size, compiled=compiled)
    if (runs > 1 and device == "cpu" and not compiled) or model.attn_softcap is not None:
        layer += sequences * model.heads * model.context**2 * size
    saved = runs * (model.depth * layer + 8 * sequences * (model.context + 1))
    if size == 2 and not compiled:
        # The copies of the weights in autocast's dtype live as long.
        saved += weights // 2
    moments = config.optim.of_group("matrices").kept * (weights - embeddings)
    moments += config.optim.of_group("embed").kept * embeddings
    batch = saved + _logits(config, runs, tokens, vocab_size, compiled=compiled)
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


def _saved_by_layer(config: RunConfig, sequences: int, size: int, *, compiled: bool) -> int:
    """Return the bytes of a run that a block saves for the backward pass, but for the attention weights.

    They are the input of the sub-layers, q, k, v and the attention output, 5 D; one value more for each norm or
    normalised sum; the MLP before and after its nonlinearity, for swiglu also gate and product.

    Args:
        size: Bytes of a number of autocast.
        compiled: As in `estimate`.
    """
    model, placement = config.model, config.placement
    assert model.mlp_width is not None  # resolved
    has_norms = projects(placement) or any(not placed.norm.is_identity for placed in config.placed_norms)
    numbers = 5 * model.width
    if has_norms and not compiled:
        numbers += 2 * model.width
    products = 2 if model.mlp == "swiglu" else 1
    # Compiled code may compute the nonlinearity again in the backward pass, and this is a lower bound.
    stages = 1 if compiled else 2
    numbers += products * stages * model.mlp_width
    tokens = sequences * model.context
    saved = tokens * size * numbers
    if not compiled:
        saved += tokens * 4 * placement.kept_numbers(model.depth, model.width)
    return saved


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
    mlp_matrices = 3 if model.mlp == "swiglu" else 2
    matrices = [(model.depth, model.attn_outputs), (mlp_matrices * model.depth, model.mlp_width)]
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
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} PiB"
