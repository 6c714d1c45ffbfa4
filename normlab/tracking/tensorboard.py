"""A run's numbers in TensorBoard's format, in the folder `tensorboard` of the run: `tensorboard --logdir results/runs`.

The files are written anew from the record at each start, so they never have a step twice. The wall time of a step is
the time at which it was written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normlab.errors import ConfigError
from normlab.tracking.payloads import Payload
from normlab.tracking.uploads import TENSORBOARD, Upload


class TensorBoardRun:
    """A run in TensorBoard's files, with the methods of `WandbRun` that the follower calls.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise ConfigError("tensorboard is not installed: pip install tensorboard") from None
        shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
        self._writer = EventFileWriter(str(folder / TENSORBOARD), flush_secs=1)
        self.next_step = 0
        self.upload = Upload(where=TENSORBOARD)

    def log(self, step: int, payload: Payload) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=key, simple_value=value) for key, value in payload.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self.next_step = step + 1

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        del summary, state
        self._writer.close()
