"""Data-parallel training on two processes: the gradients of one process that has the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")

WORKER = '''
import sys
import torch
import torch.distributed as dist
import multihead as mh

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Layer(torch.nn.Module):
    """Self-attention with every kind of parameter: projections, a bias, slopes and sinks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.project = torch.nn.Linear(12, 3 * 12, dtype=torch.float64)
        self.bias = torch.nn.Parameter(torch.randn(4, 7, 7, dtype=torch.float64))
        self.slopes = torch.nn.Parameter(torch.rand(4, dtype=torch.float64))
        self.sinks = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 4, 3)).movedim(-3, 0).transpose(2, 3)
        seen = mh.observe(
            query, key, value, causal=True, bias=self.bias, alibi_slopes=self.slopes, sinks=self.sinks,
            statistics=mh.Statistics("entropy"),
        )
        return seen.output, seen.entropy


torch.set_num_threads(1)
layer = Layer()
batch = torch.randn(4, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(layer)
else:
    model = layer
output, entropy = model(batch.chunk(world)[rank])
(output.sin().mean() + 0.1 * entropy.mean()).backward()
torch.save([x.grad for x in layer.parameters()], f"{folder}/{world}.{rank}")
if world > 1:
    dist.destroy_process_group()
'''


def test_gradients_on_two_processes_are_those_of_one(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(tmp_path)], env=environment, stderr=subprocess.PIPE
        )
        for rank, world in ((0, 1), (0, 2), (1, 2))
    ]
    for run in runs:
        _, error = run.communicate(timeout=120)
        assert run.returncode == 0, error.decode()
    alone, first, second = (torch.load(tmp_path / name) for name in ("1.0", "2.0", "2.1"))
    assert all(x.abs().max() > 1e-6 for x in alone)
    torch.testing.assert_close(first, alone, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
