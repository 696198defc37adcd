"""Draw with matplotlib: without a display, without formulas in names, and into files that appear
whole.

matplotlib is imported by the calls, not by this module: few commands need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import atomic_file
from mmldlm.utils.formatting import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_BACKEND = "MPLBACKEND"


def import_matplotlib() -> ModuleType:
    """Import matplotlib, whatever backend the environment names: a notebook's is often not
    installed here.
    """
    given = os.environ.get(_BACKEND)
    os.environ[_BACKEND] = "agg"  # read by the import
    try:
        import matplotlib
    finally:
        if given is None:
            del os.environ[_BACKEND]
        else:
            os.environ[_BACKEND] = given
    return matplotlib


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches; not of pyplot, which keeps figures in memory."""
    import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike, dpi: int = 130) -> None:
    """Write a figure atomically in the format of the path's suffix, with titles, labels and
    legends as they are.

    Between dollar signs matplotlib would read a formula.

    Raises:
        UserError: an image of an unknown kind.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in (known := figure.canvas.get_supported_filetypes()):
        expected = f"an image: a name that ends in .{', .'.join(sorted(known))}"
        raise UserError(expected, str(path), "give the file another name")
    for text in _given_texts(figure):
        text.set_parse_math(False)
        text.set_text(printable(text.get_text()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        figure.savefig(file, dpi=dpi, format=kind)


def _given_texts(figure: Figure) -> Iterator[Text]:
    """Yield the texts that callers have set; those of ticks are matplotlib's own, with formulas
    such as 10^-3.
    """
    yield from figure.texts
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        if (legend := axes.get_legend()) is not None:
            yield from legend.get_texts()
