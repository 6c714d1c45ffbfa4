import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from normlab.base.errors import DataError
from normlab.data.batches import Batches, validation_windows

MASK = (1 << 64) - 1


def philox4x64(counter: int, key: int) -> list[int]:
    """Return one block of Philox4x64-10 (Salmon et al. 2011), in plain integers."""
    c = [counter >> 64 * i & MASK for i in range(4)]
    k = [key & MASK, key >> 64]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [p1 >> 64 ^ c[1] ^ k[0], p1 & MASK, p0 >> 64 ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def memmap(folder: Path, tokens: np.ndarray) -> np.memmap:
    path = folder / "tokens.bin"
    path.write_bytes(tokens.tobytes())
    return np.memmap(path, tokens.dtype, mode="r")


def random_tokens(count: int, dtype: str = "<u2") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, count).astype(dtype)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("context", [1, 2, 128])
def test_batches_are_windows_with_targets_one_token_later(tmp_path: Path, dtype: str, context: int) -> None:
    tokens = memmap(tmp_path, random_tokens(5000, dtype))
    batches = Batches(tokens, context, 16, 3, "cpu")
    for step in (0, 1, 10**12):
        x_BT, y_BT = batches.batch(step)
        assert x_BT.shape == y_BT.shape == (16, context)
        assert x_BT.dtype == y_BT.dtype == torch.int64
        assert x_BT.is_contiguous()
        assert y_BT.is_contiguous()
        for start, x_T, y_T in zip(batches.starts(step)[0], x_BT, y_BT, strict=True):
            assert x_T.tolist() == tokens[start : start + context].tolist()
            assert y_T.tolist() == tokens[start + 1 : start + context + 1].tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**100])
@pytest.mark.parametrize("step", [0, 7, 2**40])
def test_starts_are_philox(seed: int, step: int) -> None:
    blocks = (philox4x64((step << 128) + block, seed) for block in (1, 2))  # numpy increments first
    expected = [(override >> 11) * 999 >> 53 for override in itertools.chain(*blocks)][:6]
    assert Batches(random_tokens(1007), 8, 6, seed, "cpu").starts(step).tolist() == [expected]


def test_batch_depends_only_on_seed_and_step() -> None:
    tokens = random_tokens(10_000)
    first, second = Batches(tokens, 32, 8, 5, "cpu"), Batches(tokens, 32, 8, 5, "cpu")
    forwards = [first.batch(step) for step in range(20)]
    backwards = [second.batch(step) for step in reversed(range(20))][::-1]
    for (x, y), (again_x, again_y) in zip(forwards, backwards, strict=True):
        assert torch.equal(x, again_x)
        assert torch.equal(y, again_y)
    different = [forwards[0][0], forwards[1][0], Batches(tokens, 32, 8, 6, "cpu").batch(0)[0]]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(different, 2))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seeds", [[5], [5, 6, 7], [5, 6, 5, 5]])
def test_stacked_runs_get_the_batches_of_single_runs(seeds: list[int], on_device: bool) -> None:
    tokens = random_tokens(10_000)
    stacked, alone = Batches(tokens, 32, 8, seeds, "cpu"), [Batches(tokens, 32, 8, seed, "cpu") for seed in seeds]
    if on_device:
        stacked.keep_on_device()
    for step in range(3):
        for all_runs, *of_runs in zip(stacked.batch(step), *(each.batch(step) for each in alone), strict=True):
            assert torch.equal(all_runs, torch.stack(of_runs))
            assert all_runs.is_contiguous()


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_tokens_on_the_device_give_the_same_batches(dtype: str) -> None:
    tokens = np.concatenate([random_tokens(3000, dtype), np.array([0, 32767, 32768, 65535], dtype)])
    from_disk, from_device = (Batches(tokens, 16, 64, 1, "cpu") for _ in range(2))
    from_device.keep_on_device()
    for step in range(50):
        for a, b in zip(from_disk.batch(step), from_device.batch(step), strict=True):
            assert torch.equal(a, b)
            assert b.is_contiguous()
            assert b.dtype == torch.int64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_gpu_and_cpu_get_the_same_batches(
    tmp_path: Path, dtype: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = memmap(tmp_path, random_tokens(100_000, dtype))
    if not fits:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * tokens.nbytes, 1 << 40))
    before = torch.cuda.memory_allocated()
    on_cpu, on_gpu = (Batches(tokens, 64, 16, 1, device) for device in ("cpu", "cuda"))
    assert (torch.cuda.memory_allocated() >= before + tokens.nbytes) == fits
    for step in range(50):
        for a, b in zip(on_cpu.batch(step), on_gpu.batch(step), strict=True):
            assert b.device.type == "cuda"
            assert torch.equal(a, b.cpu())


def test_shortest_corpus_has_one_window() -> None:
    x_BT, y_BT = Batches(np.arange(5, dtype="<u2"), 4, 3, 0, "cpu").batch(9)
    assert x_BT.tolist() == [[0, 1, 2, 3]] * 3
    assert y_BT.tolist() == [[1, 2, 3, 4]] * 3
    x_NT, y_NT = validation_windows(np.arange(5, dtype="<u2"), 4, 64)
    assert x_NT.tolist() == [[0, 1, 2, 3]]
    assert y_NT.tolist() == [[1, 2, 3, 4]]


def test_error_for_a_corpus_shorter_than_the_context_says_what_to_do() -> None:
    short = np.arange(4, dtype="<u2")
    with pytest.raises(DataError, match=r"4 training tokens .*model\.context=4.*smaller model\.context.*more text"):
        Batches(short, 4, 2, 0, "cpu")
    with pytest.raises(DataError, match=r"4 validation tokens .*model\.context=4.*data\.val_fraction"):
        validation_windows(short, 4, 2)


@pytest.mark.parametrize("context", [1, 7, 128])
@pytest.mark.parametrize("sequences", [1, 2, 5, 64])
@pytest.mark.parametrize("extra", [0, 1, 6, 300, 100_000])
def test_validation_windows_are_evenly_spaced(context: int, sequences: int, extra: int) -> None:
    tokens = np.arange(context + 1 + extra, dtype="<u4")
    x_NT, y_NT = validation_windows(tokens, context, sequences)
    assert x_NT.shape == y_NT.shape
    assert 1 <= len(x_NT) == min(sequences, (len(tokens) - 1) // context)
    assert torch.equal(y_NT, x_NT + 1)
    assert torch.equal(x_NT, x_NT[:, :1] + torch.arange(context))
    starts = x_NT[:, 0]
    gaps = starts.diff()
    assert starts[0] == 0
    if len(starts) > 1:
        assert y_NT[-1, -1] == tokens[-1]
        assert gaps.min() >= context  # no overlap
        assert gaps.max() - gaps.min() <= 1  # evenly
    assert x_NT.is_contiguous()
    assert y_NT.is_contiguous()


def test_tokens_stay_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # a sparse file of 8 GiB
    tracemalloc.start()
    batches = Batches(np.memmap(path, "<u2", mode="r"), 128, 16, 0, "cpu")
    batches.batch(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
