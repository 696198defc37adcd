"""Options that only latents of values read."""

from __future__ import annotations

from mmldlm.errors import UserError
from mmldlm.tasks.image_text.config import ImageTextConfig

# (section, keys): all keys where none is named.
_OF_VALUES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("latent_diffusion", ()),
    (
        "loss",
        (
            "latent_loss",
            "normalize_eps",
            "latent_loss_clamp",
            "latent_weight_clip",
            "latent_prediction_clamp",
            "latent_target_clamp",
            "allow_scale_free_latent_loss",
        ),
    ),
    ("training", ("t2l_pure_noise", "l2t_condition_noise", "l2t_condition_timestep")),
    ("model", ("latent_predictions", "scale_noisy_latents")),
    ("data", ("shift_pixels", "shift_only_i2t")),
)


def refuse_options_of_values(config: ImageTextConfig) -> None:
    """Check that nothing is set away from its default that a store of codes does not read.

    Raises:
        UserError: names all such keys.
    """
    found = []
    for name, keys in _OF_VALUES:
        section = getattr(config, name)
        fields = type(section).model_fields
        for key in keys or fields:
            value = getattr(section, key)
            if value != fields[key].default:
                found.append(f"{name}.{key}={value}")
    if found:
        raise UserError(
            "options that a store of codes reads: its ids are masked, neither noised, weighted nor"
            " shifted",
            ", ".join(found),
            "drop them, start from --config-name image_text_discrete, or prepare with --latents"
            " pixels",
        )
