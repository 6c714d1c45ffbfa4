"""The process of one rank: `python -m normlab.training.rank JSON`, started by `launch.py`.

JSON holds the validated config, so no rank composes it again, and the folder in which the ranks meet and write their
errors. The environment holds the rank and the number of ranks.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from normlab.system.openmp import limit_spinning

TIMEOUT = timedelta(hours=1)
"""Longest wait of a rank for the others: rank 0 may write a large checkpoint to a slow disk."""

ORPHAN_S = 10
"""Seconds that a rank has for its checkpoint when its parent is gone; another run may get its device at any time."""


def main(content: Mapping[str, Any]) -> int:
    from normlab.base.errors import (
        DISK_REFUSED,
        OUT_OF_MEMORY,
        DiskError,
        NormlabError,
        OutOfMemoryError,
        is_out_of_memory,
    )

    try:
        return _train(content)
    except DiskError as error:
        _report(content, str(error))
        return DISK_REFUSED
    except NormlabError as error:
        _report(content, str(error))
        return OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else 2
    except Exception as error:
        traceback.print_exc(file=sys.__stderr__)
        _report(content, f"{type(error).__name__}: {error}")
        return OUT_OF_MEMORY if is_out_of_memory(error) else 1


def _train(content: Mapping[str, Any]) -> int:
    import torch
    import torch.distributed as dist

    from normlab.config.recorded import load_config
    from normlab.tracking.background import wait_for_followers
    from normlab.training.machine import num_threads, resolve, resolve_device
    from normlab.training.start import train_pack, train_replica

    config = load_config(content["config"])
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    # The device of this rank: a GPU, or its share of the threads.
    gpu, backend = None, "gloo"
    if resolve_device(config) == "cuda":
        gpu, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(gpu)
    else:
        torch.set_num_threads(max(1, num_threads() // count))
    settings = resolve(config)

    # With its GPU, NCCL connects here and not in the first step, and a barrier need not guess the GPU.
    dist.init_process_group(
        backend, init_method=f"file://{content['folder']}/ranks", rank=rank, world_size=count, timeout=TIMEOUT,
        device_id=gpu,
    )  # fmt: skip

    # Rank 0 trains as the process of a run on one device does; the others have its state and write nothing.
    if rank:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):  # rank 0 prints the warnings
            received = train_replica(config, settings)
    else:
        received = train_pack([config], settings=settings, pack=content["pack"], only_first_signal=True)[0].signal
        wait_for_followers()

    # The end.
    with contextlib.suppress(RuntimeError):  # the process that started the ranks may be gone, and the group with it
        dist.barrier()  # a rank that leaves earlier is an error for the others
        dist.destroy_process_group()
    if received:
        return 128 + received
    return 0


def _report(content: Mapping[str, Any], message: str) -> None:
    """Write an error where the process that started the ranks finds it."""
    with contextlib.suppress(OSError):
        Path(content["folder"], f"error_{os.environ['RANK']}").write_text(message)


def _stop_with_parent(parent: int) -> None:
    """Stop this process when its parent is gone; kill it after a grace period."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_S)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    limit_spinning()
    threading.Thread(target=_stop_with_parent, args=(os.getppid(),), name="normlab parent", daemon=True).start()
    code = main(json.loads(sys.argv[1]))
    if 0 < code < 128:  # the process group may wait for ranks that are gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
