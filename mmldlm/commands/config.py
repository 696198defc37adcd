"""`mmldlm config`: print the resolved config, the batch arithmetic and the parameter counts."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mmldlm.config.load import all_keys, allowed_words, to_yaml
from mmldlm.config.schema import Config
from mmldlm.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm config` to those of `train`."""
    parser.add_argument(
        "--keys", action="store_true", help="list every key with its default, its allowed values and its meaning"
    )
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks, for the batch arithmetic")


def main(args: argparse.Namespace, parse_config: Callable[[argparse.Namespace], Config]) -> int:
    """Print the config; with data.latent_data_root set, also check it against the data."""
    if args.keys:
        _print_keys()
        return EXIT_DONE
    config = parse_config(args)
    if config.data.latent_data_root is not None or config.data.mixture is not None:
        from mmldlm.data.batching.run_data import open_data

        config = open_data(config).config
    print(to_yaml(config), end="")
    training = config.training
    per_step = training.train_batch_size * training.grad_accum_steps * args.world_size
    print(
        f"\n# global batch {per_step} = {training.train_batch_size} per rank x {training.grad_accum_steps} accumulated "
        f"x {args.world_size} rank(s)"
    )
    _print_parameters(config)
    return EXIT_DONE


def _print_keys() -> None:
    for key, default, text in all_keys():
        values = allowed_words(key)
        choice = f"  ({' | '.join(values)})" if values else ""
        print(f"{key} = {default}{choice}\n    {' '.join(text.split())}")


def _print_parameters(config: Config) -> None:
    if config.model.latent_dim is None or config.model.vocab_size is None:
        print(
            "# parameters: set data.latent_data_root (or model.latent_dim, vocab_size and the token ids) to count them"
        )
        return
    import torch

    from mmldlm.models import MultimodalMMDiT

    with torch.device("meta"):
        model = MultimodalMMDiT(config.model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    print(f"# parameters {sum(sizes.values()):,}")
    for group, names in model.parameter_groups().items():
        print(f"#   {group:7s}{sum(sizes[name] for name in names):>15,}")
