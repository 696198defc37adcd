"""A loop of accelerate that knows nothing of mmldlm but its heartbeat: a linear model.

mmldlm launch --hostfile H -- examples/any_script/accelerate_loop.py --steps 100
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import mmldlm

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

# `mmldlm launch` takes the place of `accelerate launch`: the ranks and their addresses are there.
accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
x = torch.randn(4 * options.steps * accelerator.num_processes, 8)
model = torch.nn.Linear(8, 1)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4),
)
for step, (inputs, target) in enumerate(loader, 1):
    loss = (model(inputs) - target).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mmldlm.heartbeat(step)
    accelerator.print(f"step {step}: loss {loss.item():.4f}", flush=True)
accelerator.end_training()
