"""Windows of tokens for training and validation.

A training batch is a pure function of (seed, step): there is no loader, no state to save, and a run that is
resumed sees what it would have seen.

Shapes: N tokens or windows, B batch, T context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from normlab.errors import DataError

SHARE_OF_MEMORY = 1 / 8
"""Tokens are kept on a GPU where they take less than this share of its free memory."""

CHUNK = 1 << 26
"""Tokens that are copied to a GPU at once."""

SIGNED = {2: torch.int16, 4: torch.int32}
"""torch can index few unsigned tensors: by bytes a token, the signed type that its bits are kept as."""


class Batches:
    """Batches of training windows, drawn uniformly from all that fit, with replacement.

    Args:
        tokens_N: The training tokens.
        context: Tokens in a window, T.
        batch_size: Windows in a batch, B.
        seed: Key of the generator.
        device: Where batches are wanted.

    Raises:
        DataError: Fewer than context + 1 tokens.
    """

    def __init__(
        self, tokens_N: np.ndarray, context: int, batch_size: int, seed: int, device: torch.device | str
    ) -> None:
        if len(tokens_N) <= context:
            raise DataError(
                f"data: {len(tokens_N)} training tokens cannot fill model.context={context} and one more; "
                "choose a smaller model.context or give it more text (data.max_tokens, where that is set)"
            )
        self.batch_size, self.seed, self.device = batch_size, seed, torch.device(device)
        self._num_starts = len(tokens_N) - context
        self._offsets_T = np.arange(context + 1)
        self._tokens_N = np.asarray(tokens_N)  # a plain array: indexing a memmap costs more than the copying
        self._on_device_N: torch.Tensor | None = None
        if self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            if self._tokens_N.nbytes < SHARE_OF_MEMORY * free_bytes:
                self.keep_on_device()

    def keep_on_device(self) -> None:
        """Copy the tokens to the device, where `batch` then reads them. A GPU with room does it by itself."""
        self._on_device_N = _copy_to(self._tokens_N, self.device)

    def starts(self, step: int) -> np.ndarray:
        """Where the windows of a step start, (B,): uniform over 0..N - T - 1.

        Philox4x64 counts in 256 bits. The step stands in the upper 128, so steps cannot overlap, and the
        draws of a step count in the lower. Its raw output is what NumPy promises never to change; what it
        makes of it (`Generator.integers`) may change with a version, so the scaling is done here.
        """
        generator = np.random.Philox(key=self.seed, counter=int(step) << 128)
        uniform_B = (generator.random_raw(self.batch_size) >> 11) * 2.0**-53
        return (uniform_B * self._num_starts).astype(np.int64)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a step, both (B, T), int64, on the device: targets are one token later."""
        starts_B = self.starts(step)
        if self._on_device_N is None:
            windows = self._tokens_N[starts_B[:, None] + self._offsets_T].astype(np.int64)
            return self._send(windows[:, :-1].copy()), self._send(windows[:, 1:].copy())
        narrow = self._on_device_N[self._send(starts_B[:, None] + self._offsets_T)]
        windows = narrow.long() & ((1 << 8 * narrow.element_size()) - 1)  # undoes the sign that it was given
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _send(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # so that the host need not wait for the copy
        return tensor.to(self.device, non_blocking=True)


class StackedBatches:
    """The batches of several runs, stacked: those of each run, shape (R, B, T)."""

    def __init__(self, batches: Sequence[Batches]) -> None:
        # Runs of one seed see the same windows, which are then cut out once.
        self._distinct = list(dict.fromkeys(batches))
        self._which_R = [self._distinct.index(own) for own in batches]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a step, both (R, B, T), int64, on the device."""
        pairs = [own.batch(step) for own in self._distinct]
        tokens, targets = (torch.stack([pairs[which][side] for which in self._which_R]) for side in (0, 1))
        return tokens, targets


def validation_windows(tokens_N: np.ndarray, context: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fixed windows, evenly spaced from the first token to the last.

    As many as are asked for, but no more than fit without overlap: no target is counted twice, and a longer
    list would say nothing new.

    Returns:
        Tokens and targets, both (N, T), int64, on the CPU; targets are one token later.

    Raises:
        DataError: Fewer than context + 1 tokens.
    """
    if len(tokens_N) <= context:
        raise DataError(
            f"data: {len(tokens_N)} validation tokens cannot fill model.context={context} and one more; "
            "choose a smaller model.context, give it more text (data.max_tokens, where that is set), or hold out more "
            "with data.val_fraction"
        )
    last = len(tokens_N) - context - 1
    count = min(sequences, last // context + 1)
    starts_N = np.arange(count) * last // max(count - 1, 1)
    windows = np.asarray(tokens_N)[starts_N[:, None] + np.arange(context + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def _copy_to(tokens_N: np.ndarray, device: torch.device) -> torch.Tensor:
    signed = np.dtype(f"<i{tokens_N.itemsize}")
    on_device_N = torch.empty(len(tokens_N), dtype=SIGNED[tokens_N.itemsize], device=device)
    for start in range(0, len(tokens_N), CHUNK):
        chunk = np.array(tokens_N[start : start + CHUNK]).view(signed)  # a copy: torch wants it writable
        on_device_N[start : start + CHUNK] = torch.from_numpy(chunk)
    return on_device_N
