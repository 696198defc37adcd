"""Which parts of names are those of torch's wrappers."""

from __future__ import annotations

import pytest

from mmldlm.checkpoints.formats.wrapper_names import prefix_to_match, remove_wrappers


@pytest.mark.parametrize(
    "names, modules, expected",
    [
        (["module.a.w", "module.b.w"], None, None),
        (["module.w"], {"", "module"}, None),
        (["module.a.w", "b.w"], None, None),
        (["module._orig_mod.a.w", "module._orig_mod.w"], None, ["a.w", "w"]),
        (["_orig_mod.module.module.w"], None, ["module.w"]),
        (
            ["_orig_mod.module.w"],
            {"", "_orig_mod", "_orig_mod.module", "_orig_mod.metrics"},
            ["module.w"],
        ),
        (["n_averaged", "module.w"], None, ["w"]),
        (["n_averaged", "w"], None, None),
        (["n_averaged"], None, None),
        (["layers.0._checkpoint_wrapped_module.w", "head.w"], None, ["layers.0.w", "head.w"]),
        (["_fsdp_wrapped_module._fpw_module.w"], None, ["w"]),
        (["_orig_mod.w", "w"], None, None),
        (["my_orig_mod.w"], None, None),
    ],
)
def test_wrappers_are_removed_by_evidence(names, modules, expected):
    found = remove_wrappers(names, modules)
    assert list(found.names.values()) == (names if expected is None else expected)
    assert bool(found.notes) == (
        expected is not None or all(name.startswith("module.") for name in names)
    )


def test_a_child_with_siblings_is_not_a_wrapper():
    assert not remove_wrappers(["module.w"], {"", "module", "metrics"}).notes


def test_the_names_of_a_model_decide():
    assert prefix_to_match(["module.a", "module.b"], {"a", "b"}) == "module."
    assert prefix_to_match(["module.a", "module.b"], {"module.a", "a"}) == ""
    assert prefix_to_match(["x.a"], {"a"}) == ""
