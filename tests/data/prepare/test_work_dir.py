"""The work folder: one launch at a time, and errors that name differing options."""

from __future__ import annotations

import pytest

from mmldlm.data.prepare import pipeline
from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.prepare.work_dir import RULES, WorkDir, check_output_free
from mmldlm.errors import UserError


@pytest.mark.usefixtures("need_minilm")
def test_only_one_preparation_at_a_time(corpus_file, tmp_path):
    work = WorkDir(tmp_path / "s", TaskQueue())
    work.open({"options": {}}, force=False)
    with pytest.raises(UserError, match="no other preparation"):
        pipeline.prepare(PrepareOptions(str(tmp_path / "s"), str(corpus_file), force=True))


@pytest.mark.usefixtures("need_minilm")
def test_a_complete_store_leaves_the_work_of_a_launch_that_replaces_it(corpus_file, tmp_path):
    options = PrepareOptions(str(tmp_path / "s"), str(corpus_file))
    pipeline.prepare(options)
    work = WorkDir(tmp_path / "s", TaskQueue())
    work.open({"options": {}}, force=False)
    pipeline.prepare(options)
    assert work.read_plan() == {"options": {}}
    work.remove()
    (tmp_path / "s.work").mkdir()
    pipeline.prepare(options)
    assert not (tmp_path / "s.work").exists()


def test_differences_are_reported_with_both_values(tmp_path):
    def plan(name, **options):
        identity = PrepareOptions("", name, **options).identity()
        return {"options": identity, "shards": [1], "corpus": {"train": [f"txt:{name}"]}}

    work = WorkDir(tmp_path / "store", TaskQueue())
    work.open(plan("a.txt", text_field="body"), force=False)
    with pytest.raises(UserError) as error:
        work.open(plan("b.txt", max_tokens=30, latents_per_text=2), force=False)
    for part in (
        "CORPUS was a.txt, now b.txt",
        "--text-field was body, now not given",
        "--max-tokens was 62, now 30",
        "--latents-per-text was 1, now 2",
        "the corpus had txt:a.txt, has txt:b.txt",
    ):
        assert part in error.value.found, error.value.found
    assert "seed" not in error.value.found


def test_work_by_other_rules_is_not_mixed_with_new_work(tmp_path):
    plan = {"options": {}, "corpus": {}, "shards": [1]}
    WorkDir(tmp_path / "s", TaskQueue()).open(plan, force=False)
    with pytest.raises(UserError, match="another version of mmldlm(.|\n)*--force"):
        WorkDir(tmp_path / "s", TaskQueue()).open(plan | {"rules": RULES}, force=False)
    assert not WorkDir(tmp_path / "s", TaskQueue()).open(plan | {"rules": RULES}, force=True)


def test_a_damaged_plan_is_named_and_force_discards_its_work(tmp_path):
    plan = {"options": {}, "corpus": {}}
    WorkDir(tmp_path / "s", TaskQueue()).open(plan, force=False)
    (tmp_path / "s.work" / "plan.json").write_text("{", encoding="utf-8")
    (tmp_path / "s.work" / "000000").touch()
    work = WorkDir(tmp_path / "s", TaskQueue())
    with pytest.raises(UserError, match="plan.json(.|\n)*--force"):
        work.open(plan, force=False)
    assert not work.open(plan, force=True)
    assert work.read_plan() == plan and not (tmp_path / "s.work" / "000000").exists()


def test_work_without_a_plan_is_not_resumed(tmp_path):
    """It may be of other options."""
    (tmp_path / "s.work").mkdir()
    (tmp_path / "s.work" / "000000").touch()
    assert not WorkDir(tmp_path / "s", TaskQueue()).open({"options": {}}, force=False)
    assert not (tmp_path / "s.work" / "000000").exists()


def test_a_store_with_other_files_in_its_folder_is_not_deleted(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "manifest.json").write_text('{"files": {"train/text.npy": {}}}')
    check_output_free(tmp_path, force=True)
    (tmp_path / "texts.txt").write_text("the corpus itself")
    with pytest.raises(UserError, match="found: +texts.txt"):
        check_output_free(tmp_path, force=True)
