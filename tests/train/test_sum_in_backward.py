"""The gradients that ranks sum in the backward pass are the sums of the ranks' own gradients, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RANK = """
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from normlab.system.ranks import sum_in_backward

rank, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
torch.manual_seed(0)
params = {name: torch.randn(7, 7, requires_grad=True) for name in ("tied", "first", "second", "unused")}
params["gain"] = torch.randn(7, requires_grad=True)
segments = [
    {name: params[name] for name in names} for names in (["tied"], ["first", "unused"], ["second"], [], ["gain"])
]


def gradients(x):
    y = x @ params["tied"]
    for name in ("first", "second"):
        y = (y @ params[name]).tanh()
    loss = ((y * params["gain"]) @ params["tied"].mT).square().mean()
    return torch.autograd.grad(loss, list(params.values()), materialize_grads=True)


saved, sums = {}, {}
for micro_batch in range(2):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * rank + micro_batch))
    own = dict(zip(params, gradients(x)))
    if micro_batch:
        with sum_in_backward(segments, sums) as in_backward:
            gradients(x)
        saved |= {f"sum/{name}": view for each in in_backward for name, view in each.wait().items()}
    sums = {name: sums[name] + own[name] for name in own} if sums else own
saved |= {f"own/{name}": tensor for name, tensor in sums.items()}
assert all(torch.equal(own[name], again) for name, again in zip(params, gradients(x)))  # no hook is left
save_file({name: tensor.clone() for name, tensor in saved.items()}, f"{folder}/{rank}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.process)])
def test_gradients_of_ranks(count: int, tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(count), tmp_path]) for rank in range(count)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * count
    saved = [load_file(tmp_path / str(rank)) for rank in range(count)]
    names = {name.partition("/")[2] for name in saved[0]}
    assert names == {"tied", "first", "second", "unused", "gain"}
    for name in names:
        for rank in saved[1:]:
            assert torch.equal(rank[f"sum/{name}"], saved[0][f"sum/{name}"])
        expected = torch.stack([rank[f"own/{name}"] for rank in saved]).sum(0)
        if count == 2:
            assert torch.equal(saved[0][f"sum/{name}"], expected)
        else:  # the order of summation is that of the backend
            torch.testing.assert_close(saved[0][f"sum/{name}"], expected)
