"""A loop of DeepSpeed that knows nothing of mmldlm but its heartbeat: a linear model under ZeRO-2.

mmldlm preflight --hostfile H -- examples/any_script/deepspeed_loop.py
mmldlm launch --hostfile H -- examples/any_script/deepspeed_loop.py --steps 100
"""

import argparse
import os
import sys
import time

import deepspeed
import torch

import mmldlm

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--die-at", type=int, help="step at which the last rank ends with an error")
parser.add_argument("--hang-at", type=int, help="step at which the last rank does nothing more")
args = parser.parse_args()

deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(1, args.steps + 1):
    if step == args.die_at and rank == world_size - 1:
        sys.exit("a fault of this rank")
    if step == args.hang_at and rank == world_size - 1:
        time.sleep(86_400)
    x = torch.randn(4, 8, device=engine.device)
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    mmldlm.heartbeat(step)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
