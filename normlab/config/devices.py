"""Divide the batches of a run among its devices.

Every device has the same number of sequences of each batch. A norm with statistics over the batch has the same
micro-batches on several devices as on one, each divided among the devices. For other norms the loss does not depend on
micro-batches: each device takes consecutive sequences, in as few micro-batches as are no larger than those of a single
device. `RunConfig.validate` checks that the batches can be divided.

Shapes: B batch.
"""

from __future__ import annotations

from normlab.config.schema import RunConfig


def micro_batches(config: RunConfig) -> int:
    """Return the number of micro-batches per step on each device."""
    train = config.train
    if config.devices == 1 or config.norm.batch_statistics:
        return train.accumulation
    sequences, largest = train.batch_size // config.devices, train.batch_size // train.accumulation
    return next(n for n in range(1, sequences + 1) if sequences % n == 0 and sequences // n <= largest)


def rows_of_device(config: RunConfig, index: int) -> list[int]:
    """Return the sequences of each batch that a device takes, as indices into the B sequences, in order."""
    size, count = config.train.batch_size, config.devices
    groups = config.train.accumulation if config.norm.batch_statistics else 1
    group, rows = size // groups, size // groups // count
    return [first + index * rows + row for first in range(0, size, group) for row in range(rows)]
