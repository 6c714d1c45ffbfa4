"""Windows of tokens for training and validation.

A training batch is a pure function of (seed, step). So there is no data loader and no state to save, and a resumed run
reads the same batches as an undisturbed one.

Shapes: N tokens or windows, S seeds, B batch, T context; `...R` marks an axis that only stacked runs have.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from normlab.base.errors import DataError

MAX_MEMORY_SHARE = 1 / 8
"""Largest share of a GPU's free memory that a copy of the training tokens may take."""

CHUNK = 1 << 26
"""Tokens that are copied to a GPU at once."""

SIGNED = {2: torch.int16, 4: torch.int32}
"""Signed dtype that holds the bits of a token of 2 or 4 bytes; torch cannot index most unsigned dtypes."""


class Batches:
    """Batches of training windows, drawn uniformly with replacement: of one run, or of R stacked runs.

    Stacked runs read all their windows from one copy of the tokens, in as many operations as a single run.

    Args:
        context: Tokens in a window, T.
        batch_size: Windows in a batch, B.
        seeds: Key of the generator: one for a single run, or one for each stacked run.
        rows: The windows of each batch to return; all of them by default.

    Raises:
        DataError: Fewer than context + 1 tokens.
    """

    def __init__(
        self,
        tokens_N: np.ndarray,
        context: int,
        batch_size: int,
        seeds: int | Sequence[int],
        device: torch.device | str,
        rows: Sequence[int] | None = None,
    ) -> None:
        if len(tokens_N) <= context:
            raise DataError(
                f"data: {len(tokens_N)} training tokens are fewer than model.context={context} plus one; "
                "choose a smaller model.context or more text (a larger data.max_tokens, if that is set)"
            )
        self.batch_size, self.device = batch_size, torch.device(device)
        seed_by_run = [seeds] if isinstance(seeds, int) else list(seeds)
        self._seeds = list(dict.fromkeys(seed_by_run))
        self._generators = [np.random.Philox(key=seed) for seed in self._seeds]
        # To make a generator takes longer than to set its state.
        self._start_states: list[Any] = [generator.state for generator in self._generators]
        self._is_stacked = not isinstance(seeds, int)
        # Runs with one seed share its windows, which are read once.
        self._seed_index_R: torch.Tensor | None = None
        if seed_by_run != self._seeds:
            self._seed_index_R = torch.tensor([self._seeds.index(seed) for seed in seed_by_run])
        self._rows = None if rows is None else np.array(rows)
        self._num_starts = len(tokens_N) - context
        self._offsets_T = np.arange(context + 1)
        self._tokens_N = np.asarray(tokens_N)  # indexing a memmap costs more than the copy
        self._windows = np.lib.stride_tricks.sliding_window_view(self._tokens_N, context + 1)
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None
        """The tokens (N,) and the offsets (T + 1,), if the tokens fit on a GPU."""
        self._loaded: torch.Tensor | None = None
        """On the device: the starts (S, B) of a step if the tokens are there, else its windows (S, B, T + 1)."""
        if self.device.type == "cuda":
            if self._seed_index_R is not None:
                self._seed_index_R = self._seed_index_R.to(self.device)
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            if self._tokens_N.nbytes < MAX_MEMORY_SHARE * free_bytes:
                self.keep_on_device()

    def keep_on_device(self) -> None:
        """Copy the tokens to the device, before the first step; the constructor does so on a GPU with enough memory."""
        offsets_T = torch.from_numpy(self._offsets_T).to(self.device)
        self._on_device = _copy_to(self._tokens_N, self.device), offsets_T

    def starts(self, step: int) -> np.ndarray:
        """Return the start of each window of a step, (S, B) with S different seeds: uniform over 0..N - T - 1.

        The step is the upper half of the 256-bit counter of Philox4x64, so the draws of two steps cannot overlap. NumPy
        guarantees the raw output of Philox across versions, but not the output of `Generator.integers`, so the scaling
        is done here.
        """
        raw_SB = np.empty((len(self._seeds), self.batch_size), np.uint64)
        for raw_B, generator, state in zip(raw_SB, self._generators, self._start_states, strict=True):
            # The counter's words from low to high: the third one is the lower word of the upper half.
            state["state"]["counter"][2] = step
            generator.state = state
            raw_B[:] = generator.random_raw(self.batch_size)
        # The upper 53 bits are a fraction of 0 to 1 that float64 holds exactly.
        return ((raw_SB >> 11) * 2.0**-53 * self._num_starts).astype(np.int64)

    def load(self, step: int) -> None:
        """Copy to the device what `read` needs for a step: one copy from the host, always into the same memory."""
        starts_SB = self.starts(step)
        if self._rows is not None:
            starts_SB = starts_SB[:, self._rows]
        source = starts_SB
        if self._on_device is None:
            source = self._windows[starts_SB].astype(np.int64)
        if self._loaded is None:
            self._loaded = torch.empty(source.shape, dtype=torch.int64, device=self.device)
        send_to(self._loaded, torch.from_numpy(source))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets (one token later) of the loaded step, both (...R, B, T), int64, on the device.

        B is the number of `rows`, if they are given.
        """
        assert self._loaded is not None, "load() comes first"
        windows = self._loaded
        if self._on_device is not None:
            tokens_N, offsets_T = self._on_device
            narrow = tokens_N[windows[..., None] + offsets_T]
            windows = narrow.long() & ((1 << 8 * narrow.element_size()) - 1)  # undoes the sign extension
        if not self._is_stacked:
            windows = windows[0]
        elif self._seed_index_R is not None:
            windows = windows.index_select(0, self._seed_index_R)
        context = windows.shape[-1] - 1
        return windows.narrow(-1, 0, context).contiguous(), windows.narrow(-1, 1, context).contiguous()

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.load(step)
        return self.read()


def send(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device of a tensor of the host, without waiting for a GPU."""
    return send_to(torch.empty_like(source, device=device), source)


def send_to(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of the host into a target on a device, without waiting for a GPU; return the target."""
    if target.device.type == "cuda":
        source = source.pin_memory()  # only from pinned memory does the copy run asynchronously
    return target.copy_(source, non_blocking=True)


def validation_windows(tokens_N: np.ndarray, context: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of evenly spaced windows, both (N, T), int64, on the CPU.

    The windows span the text from the first token to the last. N is `sequences`, or the number of windows that fit
    without overlap if that is smaller, so that no target is counted twice.

    Raises:
        DataError: Fewer than context + 1 tokens.
    """
    if len(tokens_N) <= context:
        raise DataError(
            f"data: {len(tokens_N)} validation tokens are fewer than model.context={context} plus one; "
            "choose a smaller model.context, more text (a larger data.max_tokens, if that is set) or a larger "
            "data.val_fraction"
        )
    # The first window starts at 0 and the last one at `last`; `count - 1` steps lie between them.
    last = len(tokens_N) - context - 1
    count = min(sequences, last // context + 1)
    starts_N = np.arange(count) * last // max(count - 1, 1)
    windows = np.asarray(tokens_N)[starts_N[:, None] + np.arange(context + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def _copy_to(tokens_N: np.ndarray, device: torch.device) -> torch.Tensor:
    signed = np.dtype(f"<i{tokens_N.itemsize}")
    on_device_N = torch.empty(len(tokens_N), dtype=SIGNED[tokens_N.itemsize], device=device)
    for start in range(0, len(tokens_N), CHUNK):
        chunk = np.array(tokens_N[start : start + CHUNK]).view(signed)  # a copy, because torch needs a writable array
        on_device_N[start : start + CHUNK] = torch.from_numpy(chunk)
    return on_device_N
