"""The report of an evaluation of images: JSON in the form of all benchmarks, tables, and a page
with pictures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmldlm.evaluation.measured_rows import measured_rows
from mmldlm.evaluation.report import cell, claim, print_claims, write_report
from mmldlm.evaluation.statistics import Estimate
from mmldlm.utils.screen import open_console

# (key, label, digits, meaning) of the rows, in order.
CAPTION_ROWS = (
    (
        "nelbo_right",
        "NELBO, nats/token",
        3,
        "Surprise at a caption, given its image. Lower is better.",
    ),
    ("nelbo_shuffled", "  another image", 3, "The same, given another image."),
    ("nelbo_null", "  none (learned null)", 3, "The same, given no image."),
    (
        "gain_null",
        "  gain: none - right",
        3,
        "What the image tells about its caption. 0: it is ignored.",
    ),
    (
        "gain_shuffled",
        "  gain: another - right",
        3,
        "What the right image tells beyond any other image.",
    ),
    ("exact", "exact caption", 3, "Share of captions that are right word by word."),
    (
        "exact_up_to_pixels",
        "  up to equal pixels",
        3,
        "The same; names of images of equal pixels or one group count.",
    ),
    (
        "exact_up_to_pixels_shuffled",
        "  another's caption",
        3,
        "The same, of captions written from another image.",
    ),
    (
        "f1_right",
        "set-F1 of words",
        3,
        "Overlap of the sets of words of written and right caption, 0 to 1.",
    ),
    ("f1_gap", "  right - another's", 3, "Less that of the caption written from another image."),
    (
        "length_right",
        "length right",
        3,
        "Share of captions with the right number of tokens; exact match needs it.",
    ),
)
_TIMES = ("t100", "t90", "t75")
X0_ROWS = tuple(
    row
    for t in _TIMES
    for row in (
        (
            f"x0_error_{t}_right",
            f"x0 error at t = {int(t[1:]) / 100:g}",
            3,
            "Error of the predicted clean image.",
        ),
        (
            f"x0_error_{t}_gain_null",
            "  gain: none - right",
            4,
            "What the caption tells; paired, with the same noise.",
        ),
        (
            f"x0_error_{t}_gain_shuffled",
            "  gain: another - right",
            4,
            "What the right caption tells beyond another.",
        ),
    )
)
CODE_ROWS = (
    (
        "code_bits_right",
        "bits per code",
        3,
        "Bound of the surprise at an image, given its caption. Lower is better.",
    ),
    ("code_bits_shuffled", "  another caption", 3, "The same, given another caption."),
    ("code_bits_null", "  none (learned null)", 3, "The same, given no caption."),
    (
        "code_bits_gain_null",
        "  gain: none - right",
        3,
        "What the caption tells; paired, with the same masks.",
    ),
    (
        "code_bits_gain_shuffled",
        "  gain: another - right",
        3,
        "What the right caption tells beyond another.",
    ),
)
PICTURE_ROWS = (
    (
        "recall_at_1",
        "recall@1",
        3,
        "Share of made images nearer to their own than to any other unseen image.",
    ),
    ("recall_at_5", "recall@5", 3, "Share of made images whose own is among the five nearest."),
    (
        "image_cosine",
        "cosine with the real image",
        3,
        "After subtracting the mean training image.",
    ),
    (
        "image_cosine_gap",
        "  right - another caption",
        3,
        "Less that of the image made from another caption.",
    ),
    (
        "pixel_mse",
        "mean squared error of pixels",
        3,
        "Of values in -1 .. 1, against the real image.",
    ),
    (
        "pixel_mse_ratio",
        "  right / another caption",
        3,
        "Over the MSE of the image made from another caption.",
    ),
    (
        "seam_ratio",
        "seam ratio",
        3,
        "Mean step between pixels across patch borders over that inside.",
    ),
    (
        "seam_ratio_over_real",
        "  over that of real images",
        3,
        "Above 1: borders of patches are visible.",
    ),
    (
        "copy_ratio",
        "copy check: distance made / real",
        3,
        "To the nearest training image. Well below 1: memorized.",
    ),
    (
        "identical_copies",
        "  identical to a training image",
        3,
        "Share; unseen images may equal training images, too.",
    ),
    (
        "clip_score",
        "CLIP score",
        2,
        "100 x cosine of made image and caption, by the CLIP model named. At least 0.",
    ),
    (
        "clip_score_real",
        "  real images: ceiling",
        2,
        "The same of the real images and their captions.",
    ),
    (
        "clip_score_real_shuffled",
        "  real, another caption: floor",
        2,
        "Of real images and captions of others.",
    ),
    (
        "fid",
        "FID",
        2,
        (
            "Distance of Gaussians of features, made and real. Only for models of equal n and"
            " features."
        ),
    ),
    (
        "kid",
        "KID x 1000",
        3,
        "Squared MMD of features, made and real; unbiased, so about 0 for equal distributions.",
    ),
)
CONTROLS = ("untrained", "untrained_random_gates")
Row = tuple[str, str, int, str]


@dataclass
class ImageReport:
    """The results of an evaluation of images.

    Attributes:
        conditions: how it was measured.
        arms: name -> figure -> estimate, of `model`, `guidance_1`, `guidance_2` (made images), the
            untrained controls, and `nearest_training_image`.
        examples: captions, and what was written.
        pictures: column -> images [n, S, S, C] uint8 of the examples.
    """

    conditions: dict[str, Any]
    arms: dict[str, dict[str, Estimate]]
    examples: list[dict[str, Any]]
    pictures: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The claims that apply to this model's modes."""
        model, made, claims = self.arms["model"], self.arms.get("guidance_2", {}), []
        for source, key, name, op, bound in (
            (model, "gain_null", "i2t_gain_null_nats", ">=", 0.8),
            (model, "f1_gap", "i2t_f1_right_minus_shuffled", ">=", 0.30),
            (model, "exact_up_to_pixels", "i2t_exact_up_to_pixels", ">=", 0.35),
            (made, "recall_at_5", "t2i_recall_at_5", ">=", 0.50),
            (made, "pixel_mse_ratio", "t2i_pixel_error_right_over_shuffled", "<=", 0.55),
            (made, "seam_ratio_over_real", "seam_ratio_over_real", "<=", 1.3),
        ):
            if key in source:
                claims.append(claim(name, source[key].value, op, bound))
        return [*claims, claim("untrained_in_standard_errors", self.largest_control(), "<=", 2.0)]

    def largest_control(self) -> float:
        """Return the largest gain of an untrained model, in standard errors: 0 but for chance."""
        found = [self.arms[name] for name in CONTROLS]
        keys = ("gain_shuffled", "image_cosine_gap")
        return max(
            (arm[key].in_standard_errors for arm in found for key in keys if key in arm),
            default=0.0,
        )

    def tables(self) -> list[tuple[str, tuple[Row, ...], list[tuple[str, str]]]]:
        """Return title, rows and (arm, heading) of the columns of each table that has figures."""
        floors = (
            ("nearest_training_image", "nearest training"),
            ("untrained_random_gates", "untrained"),
        )
        found = [
            ("captions written from images (i2t)", CAPTION_ROWS, [("model", "model"), *floors]),
            ("clean images predicted from noisy ones", X0_ROWS, [("model", "model"), floors[1]]),
            ("codes of images, given captions", CODE_ROWS,
             [("model", "model"), ("code_frequencies", "frequencies alone"), floors[1]]),
            ("images made from captions (t2i)", PICTURE_ROWS,
             [("guidance_1", "guidance 1"), ("guidance_2", self._second()), floors[1]]),
        ]  # fmt: skip
        kept = [
            (
                title,
                tuple(measured_rows(rows, self.arms.get(columns[0][0], {}).__contains__)),
                columns,
            )
            for title, rows, columns in found
        ]
        return [table for table in kept if table[1]]

    def _second(self) -> str:
        return f"guidance {self.conditions['guidance']:g}"

    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""
        details: dict[str, Any] = {
            arm: {name: estimate.as_dict() for name, estimate in found.items()}
            for arm, found in self.arms.items()
        }
        return {
            "conditions": self.conditions,
            "claims": self.claims,
            "details": details | {"examples": self.examples},
        }

    def write(self, path: str | os.PathLike) -> None:
        """Write the JSON atomically."""
        write_report(path, self.as_dict())

    def page(self) -> str:
        """Return the report as a page for a browser."""
        from mmldlm.evaluation.image_page import image_page

        return image_page(self)

    def show(self, console=None) -> None:
        """Print the figures, the claims and the examples."""
        from rich.box import SIMPLE
        from rich.table import Table

        console, count = console or open_console(), self.conditions["num_images"]
        for title, rows, columns in self.tables():
            table = Table(
                title=f"{title}: {count} unseen images, +- one standard error", box=SIMPLE
            )
            table.add_column("measure", overflow="fold")
            for _, heading in columns:
                table.add_column(
                    heading, justify="right", no_wrap=True, min_width=len("-0.0001 +- 0.0001")
                )
            for key, label, digits, _ in rows:
                table.add_row(
                    label, *(cell(self.arms.get(arm, {}).get(key), digits) for arm, _ in columns)
                )
            console.print(table)
        control = self.conditions["num_control_images"]
        console.print(
            f"untrained: same config, fresh weights, zero layers at random, {control} of the"
            " images.\nnearest training: no model; the caption of the training image with the"
            " nearest pixels."
        )
        if "code_frequencies" in self.arms:
            console.print(
                "frequencies alone: no model; how often each code occurs in the training images."
            )
        for note in self.conditions["notes"]:
            console.print(f"note: {note}")
        print_claims(self.claims, console)
        if self.examples and "written" in self.examples[0]:
            table = Table(
                title="unseen images: their captions, and what the model wrote", box=SIMPLE
            )
            for heading in ("caption", "written", "set-F1"):
                table.add_column(
                    heading, overflow="fold", justify="right" if heading == "set-F1" else "left"
                )
            for example in self.examples[:10]:
                table.add_row(example["caption"], example["written"], f"{example['set_f1']:.2f}")
            console.print(table)
