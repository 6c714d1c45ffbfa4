"""Divide the batches of a run among its devices.

Every device has as many sequences of each batch. A norm with statistics over the batch has the same micro-batches on
several devices as on one, each divided among the devices. For other norms the loss does not depend on micro-batches:
each device takes consecutive sequences, in as few micro-batches as fit into the memory of one on a single device.

Shapes: B batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.errors import ConfigError

if TYPE_CHECKING:
    from normlab.config.schema import RunConfig


def check_devices(config: RunConfig) -> None:
    """Check that the batches of a run can be divided among its devices.

    Raises:
        ConfigError: The number of devices does not divide the batch (the micro-batch, for a norm with statistics over
            it), or the norm does not synchronise its statistics.
    """
    count, train, norm = config.devices, config.train, config.norm
    if count == 1:
        return
    if not norm.batch_statistics:
        if train.batch_size % count:
            raise ConfigError(
                f"devices={count}: does not divide train.batch_size={train.batch_size}; choose a number that does"
            )
        return
    if not norm.synchronised:
        raise ConfigError(
            f"devices={count}: norm={norm.label} takes statistics over the batch and does not synchronise them between "
            "devices; use devices=1, or call normlab.ranks.moments_over_ranks in the norm and set synchronised = True"
        )
    micro_batch = train.batch_size // train.accumulation
    if micro_batch % count:
        raise ConfigError(
            f"devices={count}: norm={norm.label} takes statistics over a micro-batch of {micro_batch} sequences, which "
            f"{count} does not divide; choose another number, train.batch_size or train.accumulation"
        )


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
