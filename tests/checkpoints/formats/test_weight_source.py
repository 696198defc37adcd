"""Named tensors of a checkpoint: ties and renamings."""

from __future__ import annotations

from pathlib import Path

from mmldlm.checkpoints.formats.weight_source import TensorInfo, WeightSource


def source_of(**shapes: tuple[int, ...]) -> WeightSource:
    source = WeightSource(Path("x"))
    source.tensors = {
        name: TensorInfo(name, "float32", shape, "trainable") for name, shape in shapes.items()
    }
    return source


def test_tensors_without_elements_are_not_tied():
    """conversion-trials P5: DeepSpeed lists all of them as shared, whatever their shapes."""
    source = source_of(a=(0,), b=(0, 5), c=(2,), d=(2,))
    source.mark_tied({"b": "a", "d": "c"}, source.path)
    assert source.tensors["b"].alias_of is None and source.tensors["d"].alias_of == "c"


def test_renaming_keeps_ties_and_drops_other_names():
    source = source_of(a=(2,), b=(3,), counter=())
    source.tensors["tied"] = TensorInfo("tied", "float32", (2,), "alias", "a")
    source.parts, source.moments = {"a": [], "b": []}, {"exp_avg": {"b": []}}
    source.rename({"a": "x", "b": "y", "tied": "z"})
    assert set(source.tensors) == {"x", "y", "z"} and source.tensors["z"].alias_of == "x"
    assert set(source.parts) == {"x", "y"} and set(source.moments["exp_avg"]) == {"y"}
