"""The report of an evaluation of images: JSON in the form of all benchmarks, tables, and a page
with pictures.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmldlm.evaluation.report import (
    Label,
    Report,
    ReportTable,
    Row,
    arm_details,
    claim,
    claims_table,
    figure_table,
    gain_verdict,
)
from mmldlm.evaluation.statistics import Estimate
from mmldlm.observe.pages.elements import Column, Element, picture, section, table

# The figures, in order.
CAPTION_ROWS = (
    Row(
        "nelbo_right",
        "NELBO, nats/token",
        3,
        "Surprise at a caption, given its image. Lower is better.",
    ),
    Row("nelbo_shuffled", "  another image", 3, "The same, given another image."),
    Row("nelbo_null", "  none (learned null)", 3, "The same, given no image."),
    Row(
        "gain_null",
        "  gain: none - right",
        3,
        "What the image tells about its caption. 0: it is ignored.",
    ),
    Row(
        "gain_shuffled",
        "  gain: another - right",
        3,
        "What the right image tells beyond any other image.",
    ),
    Row("exact", "exact caption", 3, "Share of captions that are right word by word."),
    Row(
        "exact_up_to_pixels",
        "  up to equal pixels",
        3,
        "The same; names of images of equal pixels or one group count.",
    ),
    Row(
        "exact_up_to_pixels_shuffled",
        "  another's caption",
        3,
        "The same, of captions written from another image.",
    ),
    Row(
        "f1_right",
        "set-F1 of words",
        3,
        "Overlap of the sets of words of written and right caption, 0 to 1.",
    ),
    Row(
        "f1_gap", "  right - another's", 3, "Less that of the caption written from another image."
    ),
    Row(
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
        Row(
            f"x0_error_{t}_right",
            f"x0 error at t = {int(t[1:]) / 100:g}",
            3,
            "Error of the predicted clean image.",
        ),
        Row(
            f"x0_error_{t}_gain_null",
            "  gain: none - right",
            4,
            "What the caption tells; paired, with the same noise.",
        ),
        Row(
            f"x0_error_{t}_gain_shuffled",
            "  gain: another - right",
            4,
            "What the right caption tells beyond another.",
        ),
    )
)
CODE_ROWS = (
    Row(
        "code_bits_right",
        "bits per code",
        3,
        "Bound of the surprise at an image, given its caption. Lower is better.",
    ),
    Row("code_bits_shuffled", "  another caption", 3, "The same, given another caption."),
    Row("code_bits_null", "  none (learned null)", 3, "The same, given no caption."),
    Row(
        "code_bits_gain_null",
        "  gain: none - right",
        3,
        "What the caption tells; paired, with the same masks.",
    ),
    Row(
        "code_bits_gain_shuffled",
        "  gain: another - right",
        3,
        "What the right caption tells beyond another.",
    ),
)
PICTURE_ROWS = (
    Row(
        "recall_at_1",
        "recall@1",
        3,
        "Share of made images nearer to their own than to any other unseen image.",
    ),
    Row("recall_at_5", "recall@5", 3, "Share of made images whose own is among the five nearest."),
    Row(
        "image_cosine",
        "cosine with the real image",
        3,
        "After subtracting the mean training image.",
    ),
    Row(
        "image_cosine_gap",
        "  right - another caption",
        3,
        "Less that of the image made from another caption.",
    ),
    Row(
        "pixel_mse",
        "mean squared error of pixels",
        3,
        "Of values in -1 .. 1, against the real image.",
    ),
    Row(
        "pixel_mse_ratio",
        "  right / another caption",
        3,
        "Over the MSE of the image made from another caption.",
    ),
    Row(
        "seam_ratio",
        "seam ratio",
        3,
        "Mean step between pixels across patch borders over that inside.",
    ),
    Row(
        "seam_ratio_over_real",
        "  over that of real images",
        3,
        "Above 1: borders of patches are visible.",
    ),
    Row(
        "copy_ratio",
        "copy check: distance made / real",
        3,
        "To the nearest training image. Well below 1: memorized.",
    ),
    Row(
        "identical_copies",
        "  identical to a training image",
        3,
        "Share; unseen images may equal training images, too.",
    ),
    Row(
        "clip_score",
        "CLIP score",
        2,
        "100 x cosine of made image and caption, by the CLIP model named. At least 0.",
    ),
    Row(
        "clip_score_real",
        "  real images: ceiling",
        2,
        "The same of the real images and their captions.",
    ),
    Row(
        "clip_score_real_shuffled",
        "  real, another caption: floor",
        2,
        "Of real images and captions of others.",
    ),
    Row(
        "fid",
        "FID",
        2,
        (
            "Distance of Gaussians of features, made and real. Only for models of equal n and"
            " features."
        ),
    ),
    Row(
        "kid",
        "KID x 1000",
        3,
        "Squared MMD of features, made and real; unbiased, so about 0 for equal distributions.",
    ),
)
CONTROLS = ("untrained", "untrained_random_gates")
# Pixels of a picture on the page; small ones are enlarged without smoothing.
_SIDE = 64


@dataclass
class ImageReport(Report):
    """The results of an evaluation of images.

    Attributes:
        conditions: Conditions of the measurement.
        arms: Name -> figure -> estimate, of `model`, `guidance_1`, `guidance_2` (made images), the
            untrained controls, and `nearest_training_image`.
        examples: Captions, and what was written for their images.
        pictures: Column -> images of the examples. [n, S, S, C] uint8
    """

    conditions: dict[str, Any]
    arms: dict[str, dict[str, Estimate]]
    examples: list[dict[str, Any]]
    pictures: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def _made(self) -> dict[str, Estimate]:
        """The figures of made images that claims are about: with guidance, if it was measured."""
        return self.arms.get("guidance_2") or self.arms.get("guidance_1", {})

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The claims that apply to this model's modes."""
        model, made, claims = self.arms["model"], self._made, []
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

    @property
    def title(self) -> str:
        conditions = self.conditions
        return f"Evaluation on {conditions['num_images']} unseen images of {conditions['store']}"

    @property
    def verdict(self) -> str:
        """Whether the model uses images and captions."""
        model, made = self.arms["model"], self._made
        found = []
        if "gain_shuffled" in model:
            found.append(gain_verdict(model["gain_shuffled"], "image", "another image"))
        if "recall_at_5" in made:
            found.append(
                f"{made['recall_at_5'].value:.0%} of the images made from captions have their own"
                f" among the five nearest of {self.conditions['num_images']}"
            )
        return "; ".join(found) or "the model neither reads images nor makes them"

    def largest_control(self) -> float:
        """Return the largest gain of an untrained model, in standard errors: 0 but for chance."""
        found = [self.arms[name] for name in CONTROLS]
        keys = ("gain_shuffled", "image_cosine_gap")
        return max(
            (arm[key].in_standard_errors for arm in found for key in keys if key in arm),
            default=0.0,
        )

    def tables(self) -> list[ReportTable]:
        """Return the tables that have figures, and those of claims and samples."""
        nearest = ("nearest_training_image", "nearest training")
        untrained = ("untrained_random_gates", "untrained")
        second = f"guidance {self.conditions['guidance']:g}"
        found = (
            ("captions written from images (i2t)", CAPTION_ROWS,
             [("model", "model"), nearest, untrained]),
            ("clean images predicted from noisy ones", X0_ROWS, [("model", "model"), untrained]),
            ("codes of images, given captions", CODE_ROWS,
             [("model", "model"), ("code_frequencies", "frequencies alone"), untrained]),
            ("images made from captions (t2i)", PICTURE_ROWS,
             [("guidance_1", "guidance 1"), ("guidance_2", second), untrained]),
        )  # fmt: skip
        tables = [
            self._figures(
                heading,
                rows,
                [(name, self.arms[arm]) for arm, name in columns if arm in self.arms],
            )
            for heading, rows, columns in found
        ]
        tables = [shown for shown in tables if shown.rows]
        tables.append(claims_table("Fixed bounds of the quickstart for glyphs.", self.claims, {}))
        if self.examples and "written" in self.examples[0]:
            tables.append(_samples(self.examples))
        return tables

    def _figures(
        self, heading: str, rows: Sequence[Row], arms: Sequence[tuple[str, Mapping[str, Estimate]]]
    ) -> ReportTable:
        meanings = {
            "nearest training": (
                "no model; the caption of the training image with the nearest pixels"
            ),
            "frequencies alone": "no model; how often each code occurs in the training images",
            "untrained": (
                "same config, fresh weights, zero layers at random,"
                f" {self.conditions['num_control_images']} of the images"
            ),
        }
        legend = {name: meanings[name] for name, _ in arms if name in meanings}
        heading = f"{heading}: {self.conditions['num_images']} unseen images"
        return figure_table(
            heading[0].upper() + heading[1:],
            "+- is one standard error over images.",
            rows,
            arms,
            legend,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""
        details = arm_details(self.arms) | {"examples": self.examples}
        return {"conditions": self.conditions, "claims": self.claims, "details": details}

    def illustrations(self) -> list[Element]:
        """Return the table of the pictures of the examples."""
        columns = [Column("caption", False), *(Column(name, False) for name in self.pictures)]
        rows = [
            (
                example["caption"],
                *(
                    _picture(images[number], example["caption"])
                    for images in self.pictures.values()
                ),
            )
            for number, example in enumerate(self.examples)
        ]
        caption = "Spread evenly over the unseen images, not chosen by quality."
        return [section("Pictures", table(caption, columns, rows))]


def _samples(examples: Sequence[Mapping[str, Any]]) -> ReportTable:
    rows = [
        (Label(example["caption"]), example["written"], f"{example['set_f1']:.2f}")
        for example in examples
    ]
    columns = [Column("caption", False), Column("written from the image", False), Column("set-F1")]
    caption = "Spread evenly over the unseen images, not chosen by quality."
    return ReportTable("Captions", caption, columns, rows)


def _picture(image: np.ndarray, caption: str) -> Element:
    """Return an image [S, S, C] uint8 as an element with its bytes inside."""
    from PIL import Image

    shown = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    factor = max(1, _SIDE // shown.width)
    shown = shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    shown.save(buffer, format="PNG")
    return picture(buffer.getvalue(), caption, width=shown.width, height=shown.height)
