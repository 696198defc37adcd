"""The report of an evaluation of images: JSON in the form of all benchmarks, tables, and a page
with pictures.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from mmldlm.evaluation.report import (
    FigureTable,
    Report,
    Row,
    arm_details,
    claim,
    claims_section,
    conditions_section,
    gain_verdict,
    measured_rows,
    note_elements,
    print_claims,
)
from mmldlm.evaluation.statistics import Estimate
from mmldlm.observe.pages.elements import Column, Element, picture, section, table
from mmldlm.observe.pages.page import titled_page
from mmldlm.utils.screen import open_console

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

    def tables(self) -> list[FigureTable]:
        """Return the tables that have figures."""
        nearest = ("nearest_training_image", "nearest training")
        untrained = ("untrained_random_gates", "untrained")
        second = f"guidance {self.conditions['guidance']:g}"
        found = [
            ("captions written from images (i2t)", CAPTION_ROWS,
             [("model", "model"), nearest, untrained]),
            ("clean images predicted from noisy ones", X0_ROWS, [("model", "model"), untrained]),
            ("codes of images, given captions", CODE_ROWS,
             [("model", "model"), ("code_frequencies", "frequencies alone"), untrained]),
            ("images made from captions (t2i)", PICTURE_ROWS,
             [("guidance_1", "guidance 1"), ("guidance_2", second), untrained]),
        ]  # fmt: skip
        tables = [
            FigureTable(
                title=f"{title}: {self.conditions['num_images']} unseen images, +- one standard"
                " error",
                heading=title[0].upper() + title[1:],
                caption="\N{PLUS-MINUS SIGN} is one standard error over images.",
                rows=measured_rows(rows, self.arms.get(columns[0][0], {}).__contains__),
                columns=[
                    (heading, self.arms[arm]) for arm, heading in columns if arm in self.arms
                ],
                min_width=len("-0.0001 +- 0.0001"),
            )
            for title, rows, columns in found
        ]
        return [table for table in tables if table.rows]

    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""
        details = arm_details(self.arms) | {"examples": self.examples}
        return {"conditions": self.conditions, "claims": self.claims, "details": details}

    def page(self) -> str:
        """Return the report as a page for a browser, one file with its pictures inside."""
        conditions = self.conditions
        title = f"Evaluation on {conditions['num_images']} unseen images of {conditions['store']}"
        figures = [table.section() for table in self.tables()]
        caption = "Fixed bounds of the quickstart for glyphs."
        parts = [*note_elements(conditions), self._picture_section(), *figures]
        parts += [claims_section(caption, self.claims, {}), conditions_section(conditions)]
        return titled_page(title, [self.verdict], parts)

    def _picture_section(self) -> Element:
        columns = [Column("caption", False), *(Column(name, False) for name in self.pictures)]
        has_text = bool(self.examples) and "written" in self.examples[0]
        rows = []
        for number, example in enumerate(self.examples):
            pictures = [
                _picture(images[number], example["caption"]) for images in self.pictures.values()
            ]
            rows.append(
                (example["caption"], *pictures, *([example["written"]] if has_text else []))
            )
        columns += [Column("caption written from the real image", False)] * has_text
        caption = "Spread evenly over the unseen images, not chosen by quality."
        return section("Pictures", table(caption, columns, rows))

    def show(self, console=None) -> None:
        """Print the figures, the claims and the examples."""
        console = console or open_console()
        for figures in self.tables():
            figures.show(console)
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


def _picture(image: np.ndarray, caption: str) -> Element:
    """Return an image [S, S, C] uint8 as an element with its bytes inside."""
    from PIL import Image

    shown = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    factor = max(1, _SIDE // shown.width)
    shown = shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    shown.save(buffer, format="PNG")
    return picture(buffer.getvalue(), caption, width=shown.width, height=shown.height)
