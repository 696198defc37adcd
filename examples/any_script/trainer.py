"""A Hugging Face Trainer that knows nothing of mmldlm but its heartbeat: a linear model.

mmldlm launch --hostfile H -- examples/any_script/trainer.py --steps 100
"""

import argparse

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import mmldlm


class Heartbeat(TrainerCallback):
    """Tells `mmldlm launch` of every step, and of evaluations, which take longer."""

    def on_step_end(self, args, state, control, **more):
        mmldlm.heartbeat(state.global_step)

    on_prediction_step = on_step_end


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x).squeeze(1) - labels).square().mean()}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", default="trainer_output")
options = parser.parse_args()

torch.manual_seed(0)
data = [{"x": x, "labels": x.sum()} for x in torch.randn(512, 8)]
arguments = TrainingArguments(
    options.output,
    max_steps=options.steps,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=10,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
Trainer(Regression(), arguments, train_dataset=data, callbacks=[Heartbeat()]).train()
