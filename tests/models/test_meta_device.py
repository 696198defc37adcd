"""Counting a model's parameters takes no weights and not torch's compiler."""

import subprocess
import sys

import torch

from mmldlm.models import MultimodalMMDiT
from mmldlm.models.meta_device import meta_device
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.plain import PlainTransformer
from tests.support.plain_models import IDS, configured

COUNT = """
import sys
from mmldlm.tasks.registry import find_task, load_config
OWN = {"image_codes": ["model.num_codes=8"]}
for task in ("translation", "ar", "corrector", "image_codes"):
    names = ("vocab_size", "latent_dim", "pad_token_id", "eos_token_id", "mask_token_id")
    words = [f"task={task}", *(f"model.{name}={20 - index}" for index, name in enumerate(names))]
    words += OWN.get(task, [])
    config = load_config(None, None, words)
    assert sum(find_task(config.task).parameter_counts(config).values()) > 1000
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_names_and_shapes_are_those_of_the_model():
    mmdit = ModelConfig(hidden_size=48, n_heads=3, n_blocks=2, max_seq_len=40, **IDS)
    plain = configured("adaln")
    for kind, config in ((MultimodalMMDiT, mmdit), (PlainTransformer, plain)):
        with meta_device():
            found = kind(config)
        expected = kind(config)
        assert all(tensor.is_meta for tensor in found.state_dict().values())
        shapes = [
            {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
            for model in (found, expected)
        ]
        assert shapes[0] == shapes[1]


def test_initializations_are_back_after_it():
    with meta_device():
        pass
    assert torch.nn.Linear(4, 4).weight.std() > 0


def test_counting_does_not_load_the_compiler():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
