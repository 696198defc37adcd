"""Checkpoints in another layout, stage and world size: the same bits, and their own programs go on
from them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmldlm.checkpoints import output_folder
from mmldlm.checkpoints.commit import begin
from mmldlm.checkpoints.convert import convert_state
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.registry import read_optimizer_metadata
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.inspect import compare
from mmldlm.checkpoints.locate import locate_checkpoint
from mmldlm.errors import MmldlmError, UserError
from tests.support.convert_command import command
from tests.support.helpers import ROOT, read_log, run_ranks

CHAIN = [("zero3", 4), ("dcp", 1), ("universal", None), ("zero2", 2)]
SOURCES = [
    "z2_bf16",
    "z1_bf16opt",
    "z2_robin",
    "z2_elastic",
    "z3_bf16",
    "z3_subgroups",
    "z2_fp32",
    "z3_fp16",
    "z0_bf16",
    "z0_bf16_named",
    "z0_muon",
    "z1_muon",
    "z3_muon",
]


def open_all(path: Path) -> WeightSource:
    return open_source(path, with_moments=True).weights


def assert_same(a: Path, b: Path, num_moments: int = 2) -> None:
    """Every weight, buffer and moment is the same bits, and every name means the same."""
    with open_all(a) as one, open_all(b) as two:
        found = compare(one, two)
        assert not found.any and not found.dtypes, found
        assert len(one.moments) == len(two.moments) == num_moments
        kinds = [
            {name: (info.kind, info.alias_of) for name, info in source.tensors.items()}
            for source in (one, two)
        ]
        assert kinds[0] == kinds[1]


def facts_of(path: Path):
    opened = open_source(path, with_moments=True)
    with opened.weights:
        return read_optimizer_metadata(opened)


# -- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SOURCES)
def test_round_trip(zero_dir, tmp_path, case):
    """zero -> zero3@4 -> dcp@1 -> universal -> zero2@2, each equal to the first, and its groups
    and settings too.
    """
    source = zero_dir / case
    before = facts_of(source)
    path = source
    for number, (target, world) in enumerate(CHAIN):
        if target == "universal" and case == "z2_elastic":
            # elastic checkpoints keep no settings, which DeepSpeed's universal loader needs
            continue
        out = tmp_path / str(number)
        summary = convert_state(path, out, target, world, verify=True)
        assert summary.num_tensors + summary.num_aliases == 14
        assert_same(source, out)
        path = out
    after = facts_of(path)
    assert (before.steps, before.compute_dtype) == (after.steps, after.compute_dtype)
    assert [group.settings for group in before.groups] == [
        group.settings for group in after.groups
    ]
    assert [group.names for group in before.groups] == [group.names for group in after.groups]
    if not case.startswith("z0"):  # ZeRO-0's optimizer has no scaler of that kind
        assert before.optimizer["loss_scaler"] == after.optimizer["loss_scaler"]
        assert before.optimizer["loss_scaler"]["state"]["dynamic"] is ("fp16" in case)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("world", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("target", ["zero1", "zero2", "zero3", "fsdp"])
def test_any_world_size(zero_dir, tmp_path, target, world):
    """40 ranks: most hold nothing, or padding alone."""
    convert_state(zero_dir / "z3_muon", tmp_path / "out", target, world)
    assert_same(zero_dir / "z3_muon", tmp_path / "out")
    with open_all(tmp_path / "out") as written:
        assert written.world_size == (world if target != "fsdp" else None)


@pytest.mark.parametrize("folder", ["fsdp", "plain", "fsdp_muon", "plain_muon"])
def test_fsdp_and_ddp_become_zero_and_return(fsdp_dir, tmp_path, folder):
    run = run_of(tmp_path / "run", fsdp_dir / folder, {"applied_steps": 3})
    path = run
    for number, (target, world) in enumerate(
        [("zero2", 3), ("universal", None), ("fsdp", 2), ("ddp", None)]
    ):
        convert_state(path, tmp_path / str(number), target, world, verify=True)
        assert_same(run, tmp_path / str(number))
        path = tmp_path / str(number)
        if target == "zero2":
            # DCP and model.pt do not say with what precision the forward pass ran.
            assert not list((locate_checkpoint(path) / "engine" / "zero").glob("bf16_*"))


def test_sub_groups_hold_one_group_each(zero_dir, tmp_path):
    """However large they may be: a flat tensor of Muon's matrices has another state than one of
    AdamW's.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    convert_state(zero_dir / "z2_muon", tmp_path / "out", "zero3", 1, sub_group_size=10**9)
    file = next((tmp_path / "out").rglob("*optim_states.pt"))
    saved = torch.load(file, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1], [2]]
    assert [group["muon"] for group in saved["param_groups"]] == [True, False, False]
    assert ["exp_avg_sq" in saved["state"][flat] for flat in range(3)] == [False, True, True]


@pytest.mark.parametrize("target", ["zero1", "zero3", "ddp", "fsdp"])
def test_before_the_first_step_there_are_no_moments(zero_dir, tmp_path, target):
    convert_state(zero_dir / "z2_step0", tmp_path / "out", target, 2)
    assert_same(zero_dir / "z2_step0", tmp_path / "out", num_moments=0)


def test_weights_alone_go_to_model_pt_and_dcp(fsdp_dir, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    truth = torch.load(fsdp_dir / "truth.pt", weights_only=True)["weight"]
    out = tmp_path / "out"
    assert command(fsdp_dir / "fsdp", out, "--to", "model.pt") == 0
    state = torch.load(out / "model.pt", weights_only=True, mmap=True)
    assert (
        set(state) == set(truth)
        and state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    )
    for name, tensor in truth.items():
        wanted = tensor.float() if tensor.dtype == torch.bfloat16 and name != "lows" else tensor
        assert state[name].dtype == wanted.dtype and torch.equal(state[name], wanted), name
    assert (
        command(
            fsdp_dir / "fsdp",
            out,
            "--to",
            "model.pt",
            "--dtype",
            "bf16",
            "--only",
            "wide.*",
            "--force",
        )
        == 0
    )
    low = torch.load(out / "model.pt", weights_only=True)
    assert set(low) == {"wide.weight", "wide.bias"} and torch.equal(
        low["wide.bias"], truth["wide.bias"].bfloat16()
    )
    # Nobody knows what was trained in it: DCP of the weights alone, and no training checkpoint.
    convert_state(fsdp_dir / "bare", tmp_path / "dcp", "dcp", 2)
    with (
        open_source(tmp_path / "dcp").weights as written,
        open_source(fsdp_dir / "bare").weights as source,
    ):
        assert not compare(source, written).any
    with pytest.raises(UserError, match="trained"):
        convert_state(fsdp_dir / "bare", tmp_path / "zero", "zero2", 2)


# -- the programs that load them ------------------------------------------------------------------


def test_deepspeed_resumes_from_them(zero_dir, tmp_path):
    """Four ranks, models of another seed: masters, frozen weights, buffers, moments and the next
    losses.
    """
    jobs = []

    def job(
        case: str,
        stage: int,
        *through: tuple[str, int | None],
        is_universal: bool = False,
        **more: int,
    ) -> None:
        path = zero_dir / case
        for number, (target, world) in enumerate(through):
            path = convert_path(path, tmp_path / f"{len(jobs)}_{number}", target, world)
        out = convert_path(
            path,
            tmp_path / str(len(jobs)),
            "universal" if is_universal else f"zero{stage}",
            4,
            **more,
        )
        tag = "universal" if is_universal else "zero"
        facts = {"folder": str(out), "tag": tag, "stage": stage, "universal": is_universal, **more}
        jobs.append({**facts, "like": str(zero_dir / case)})

    def convert_path(path: Path, out: Path, target: str, world: int | None, **more: int) -> Path:
        convert_state(path, out, target, world, **more)
        return out

    job("z2_bf16", 3)
    job("z2_bf16", 2, ("zero3", 4), ("dcp", 1), ("universal", None))
    job("z2_robin", 1)
    job("z3_subgroups", 3, sub_group_size=20)
    job("z3_bf16", 2)
    job("z2_bf16", 2, is_universal=True)
    job("z3_bf16", 3, is_universal=True)
    job("z2_bf16", 2, ("dcp", 1), is_universal=True)
    job("z2_fp16", 3)
    job("z3_fp16", 2, ("dcp", 1), ("universal", None))
    job("z2_muon", 3, ("dcp", 1), ("universal", None))
    job("z3_muon", 3, sub_group_size=20)
    job("z3_muon", 2, ("zero2", 3), is_universal=True)  # not from ZeRO-3: see _optimizer_metadata
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = run_ranks(4, ROOT / "tests" / "support" / "load_zero.py", str(tmp_path / "jobs.json"))
    assert done.stdout.count("loaded") == len(jobs), done.stdout[-3000:]


def test_torch_loads_our_dcp(zero_dir, fsdp_dir, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    for source, world in ((fsdp_dir / "fsdp", 3), (zero_dir / "z3_bf16", 2)):
        out = tmp_path / source.name
        convert_state(source, out, "dcp", world)
        dcp_to_torch_save(out, tmp_path / "all.pt")
        state = torch.load(tmp_path / "all.pt", weights_only=True)
        with open_all(source) as expected:
            assert set(state["model"]) == set(expected.tensors)
            for name, info in expected.tensors.items():
                flat = expected.read(info.alias_of or name).reshape(-1).view(np.uint8)
                assert (
                    state["model"][name]
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                    == flat.tobytes()
                )
            for what, table in expected.moments.items():
                for name in table:
                    chunks = np.concatenate(list(expected.iter_chunks(name, what)))
                    assert np.array_equal(state["optim"][what][name].flatten().numpy(), chunks), (
                        what,
                        name,
                    )


@pytest.mark.parametrize("case", ["z2_bf16", "z2_muon"])
def test_torchs_optimizer_loads_our_file(zero_dir, tmp_path, case):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tests.support.elementwise_muon import ElementwiseMuon, with_muon
    from tests.support.make_zero import MUON, build_model, parameter_groups

    convert_state(zero_dir / case, tmp_path / "out", "ddp")
    model = build_model(torch)
    model.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1.0)
    if case == "z2_muon":
        groups = with_muon(parameter_groups(model), [model.get_parameter(name) for name in MUON])
        optimizer = ElementwiseMuon(groups, lr=1.0)
    state = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    names = [name for group in state["param_names"] for name in group]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    of = dict(model.named_parameters())
    assert all(of[name] is parameter for name, parameter in zip(names, parameters, strict=True))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state[parameter]
            assert kept["step"] == 2 and kept["exp_avg"].any()
            assert ("exp_avg_sq" in kept) is not group.get("muon", False)
            if "exp_avg_sq" in kept:
                assert torch.equal(kept["exp_avg_sq"], parameter.detach() ** 2 + 0.25)
    assert [group["weight_decay"] for group in optimizer.param_groups][-2:] == [0.1, 0.0]
    assert [(group.get("muon"), group.get("lr_factor")) for group in optimizer.param_groups][
        0
    ] == ((True, 8.0) if case == "z2_muon" else (None, None))


# -- checkpoints of mmldlm ------------------------------------------------------------------------


# What a manifest says of the weights in any format: their figures, and that skips came before.
KEPT = {"evaluation": {"l2t_nelbo": 2.5}, "consecutive_skips": 3}


def run_of(run_dir: Path, engine_folder: Path, state: dict) -> Path:
    """A run with one committed checkpoint, as mmldlm writes it around an engine's files."""
    pending = begin(run_dir, 7)
    shutil.copytree(engine_folder, pending.path / "engine")
    (pending.path / "training_state.json").write_text(json.dumps(state))
    (pending.path / "tokenizer").mkdir()
    (pending.path / "tokenizer" / "tokenizer.json").write_text("{}")
    for rank in range(2):
        (pending.path / f"rng_state_rank{rank}.pt").write_bytes(bytes([rank]))
    pending.commit(engine="somebody", world_size=2, **KEPT)
    return run_dir


def test_a_run_stays_a_run(fsdp_dir, tmp_path):
    run = run_of(tmp_path / "run", fsdp_dir / "fsdp", {"applied_steps": 3})
    convert_state(run, tmp_path / "out", "zero3", 1)
    folder = locate_checkpoint(tmp_path / "out" / "latest")  # checks the manifest's sizes
    assert folder == locate_checkpoint(tmp_path / "out") and folder.name == "step_00000007"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["engine"], manifest["world_size"]) == ("deepspeed ZeRO-3", 1)
    assert {name: manifest[name] for name in KEPT} == KEPT
    assert (folder / "tokenizer" / "tokenizer.json").is_file() and (
        folder / "rng_state_rank0.pt"
    ).is_file()
    assert not (folder / "rng_state_rank1.pt").exists()
    assert json.loads((folder / "training_state.json").read_text()) == {"applied_steps": 3}
    with (
        open_source(run, with_ema=True).weights as a,
        open_source(tmp_path / "out", with_ema=True).weights as b,
    ):
        a.use_ema(), b.use_ema()
        assert not compare(a, b).any
    told = json.loads((tmp_path / "out" / "converted.json").read_text())
    assert (told["to"], told["from"]["step"]) == ("zero3", 7)


def test_a_changed_file_beside_the_weights_is_not_vouched_for(fsdp_dir, tmp_path):
    run = run_of(tmp_path / "run", fsdp_dir / "fsdp", {"applied_steps": 3})
    path = locate_checkpoint(run) / "engine" / "ema_rank0.pt"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="ema_rank0.pt"):
        convert_state(run, tmp_path / "out", "zero3", 1)
    assert not list(tmp_path.glob("out*"))


THROUGH_ALL = [
    ("zero3", 4),
    ("fsdp", 3),
    ("universal", None),
    ("ddp", None),
    ("zero1", 3),
    ("zero2", 2),
]


def test_training_resumes_from_the_end_of_a_chain(store, tmp_path):
    """Every engine's own checkpoint through every format, with AdamW and Muon: the very losses
    afterwards.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.support.engine_worker import CONVERTED

    worker = ROOT / "tests" / "support" / "engine_worker.py"

    def launch_all(*words: str) -> None:
        for world in CONVERTED:
            done = run_ranks(world, worker, "converted", str(store), str(tmp_path), *words)
            assert done.returncode == 0, done.stdout[-4000:]

    launch_all()
    names = [name for cases in CONVERTED.values() for name in cases]
    for name in names:
        first = path = tmp_path / f"{name}_straight" / "checkpoints" / "step_00000002"
        for number, (target, world) in enumerate(THROUGH_ALL):
            convert_state(path, tmp_path / f"{name}_{number}", target, world, sub_group_size=2000)
            path = tmp_path / f"{name}_{number}"
        path = path.rename(tmp_path / f"{name}_converted")
        convert_state(path, tmp_path / f"{name}_dcp", "dcp", 2)
        assert_same(first, tmp_path / f"{name}_dcp")
        kinds = [
            [group.settings.get("muon") for group in facts_of(path).groups]
            for path in (first, path)
        ]
        assert kinds == [[True, False, False] if "muon" in name else [None, None]] * 2
    launch_all("resumed")
    for name in names:
        straight, resumed = (
            {record["step"]: record["loss"] for record in read_log(tmp_path, f"{name}_{part}")}
            for part in ("straight", "resumed")
        )
        assert set(resumed) == {3, 4} and all(
            resumed[step] == straight[step] for step in resumed
        ), name
        ends = [
            tmp_path / f"{name}_{part}" / "checkpoints" / "step_00000004"
            for part in ("straight", "resumed")
        ]
        assert_same(*ends)
        with (
            open_source(ends[0], with_ema=True).weights as a,
            open_source(ends[1], with_ema=True).weights as b,
        ):
            a.use_ema(), b.use_ema()
            assert not compare(a, b).any


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["zero3", "dcp", "universal", "ddp", "model.pt"])
@pytest.mark.parametrize("what", ["weight", "moment"])
def test_a_flipped_bit_is_refused_and_nothing_is_left(zero_copy, tmp_path, target, what):
    folder = zero_copy("z3_bf16")
    with open_all(folder) as source:
        parts = (
            source.parts["wide.weight"]
            if what == "weight"
            else source.moments["exp_avg_sq"]["wide.weight"]
        )
        place = parts[0].file.position_of(parts[0].ref, parts[0].start)
    path = parts[0].file.path
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    if what == "moment" and target == "model.pt":
        convert_state(folder, tmp_path / "out", target, 2)  # it reads no moments
        return
    with pytest.raises(UserError, match=path.name):
        convert_state(folder, tmp_path / "out", target, 2)
    assert not list(tmp_path.glob("out*"))


def test_another_optimizer_is_refused(zero_copy, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    folder = zero_copy("z2_bf16")
    for path in folder.glob("*optim_states.pt"):
        saved = torch.load(path, weights_only=False)
        for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        torch.save(saved, path)
    with pytest.raises(UserError, match="amsgrad"):
        convert_state(folder, tmp_path / "out", "zero3", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"aliases": {"a": ["b"]}},
        {"aliases": ["a", "b"]},
        {"buffer_names": [["a"]]},
        {"buffer_names": 3},
    ],
)
def test_names_of_another_kind_beside_an_optimizer(tmp_path, change):
    """They ended in a traceback: lists and numbers in the place of names."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weights = {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}
    state = {"state": {}, "param_groups": [{"params": [0, 1]}], "param_names": [["a", "b"]]}
    (tmp_path / "in").mkdir()
    torch.save(weights, tmp_path / "in" / "model.pt")
    torch.save({**state, **change}, tmp_path / "in" / "optimizer.pt")
    if "aliases" in change:
        with pytest.raises(UserError, match="optimizer.pt"):
            convert_state(tmp_path / "in", tmp_path / "out", "zero2", 2)
    else:  # as if no buffers were named
        assert convert_state(tmp_path / "in", tmp_path / "out", "zero2", 2).num_parameters == 8


@pytest.mark.parametrize("change", [{"steps": "three"}, {"compute_dtype": "int64"}])
def test_a_step_count_or_dtype_of_another_kind(tmp_path, change):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "in").mkdir()
    torch.save({"a": torch.ones(2, 2)}, tmp_path / "in" / "model.pt")
    state = {"state": {}, "param_groups": [{"params": [0]}], "param_names": [["a"]]}
    torch.save(state, tmp_path / "in" / "optimizer.pt")
    convert_state(tmp_path / "in", tmp_path / "dcp", "dcp", 2)
    path = tmp_path / "dcp" / "trainable.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match="trainable.json"):
        convert_state(tmp_path / "dcp", tmp_path / "out", "zero2", 2)


def test_a_full_disk_leaves_nothing(zero_dir, tmp_path, monkeypatch):
    def full(*args) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MmldlmError, match="No space left"):
        convert_state(zero_dir / "z2_bf16", tmp_path / "out", "zero3", 4)
    monkeypatch.undo()
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="free space"):
        convert_state(zero_dir / "z2_bf16", tmp_path / "out", "zero3", 4)
    assert not list(tmp_path.iterdir())


def test_what_an_interrupted_conversion_left_is_cleared(zero_dir, tmp_path):
    partial = tmp_path / "out.partial"
    shutil.copytree(zero_dir / "z2_bf16" / "zero", partial / "zero")
    with pytest.raises(UserError, match="earlier conversion"):
        # Without the marker it may be somebody's training.
        convert_state(zero_dir / "z2_bf16", tmp_path / "out", "zero3", 4)
    (partial / "converted.json").write_text("{}")
    convert_state(zero_dir / "z2_bf16", tmp_path / "out", "zero3", 4)
    assert not partial.exists()
    assert_same(zero_dir / "z2_bf16", tmp_path / "out")


def test_force_replaces_a_conversion_and_no_training(zero_dir, fsdp_dir, tmp_path):
    out = tmp_path / "out"
    convert_state(zero_dir / "z2_bf16", out, "zero3", 4)
    convert_state(zero_dir / "z2_bf16", out, "ddp", force=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "converted.json", "deepspeed.pt", "model.pt", "optimizer.pt",
    ]  # fmt: skip
    run = run_of(tmp_path / "run", fsdp_dir / "fsdp", {"applied_steps": 3})
    for precious in (run, shutil.copytree(fsdp_dir / "plain", tmp_path / "plain")):
        with pytest.raises(UserError, match="will not be deleted"):
            convert_state(zero_dir / "z2_bf16", precious, "zero2", force=True)


@pytest.mark.parametrize("to", ["universal", "ddp"])
def test_the_space_of_copied_files_is_checked_too(zero_dir, tmp_path, monkeypatch, to):
    (tmp_path / "engine").mkdir()
    shutil.copytree(zero_dir / "z2_bf16" / "zero", tmp_path / "engine" / "zero")
    run = run_of(tmp_path / "run", tmp_path / "engine", {"applied_steps": 3})
    needed = []
    monkeypatch.setattr(output_folder, "check_space", lambda parent, size: needed.append(size))
    convert_state(run, tmp_path / "out", to)
    step = tmp_path / "out" / "checkpoints" / "step_00000007"
    written = {path: path.stat().st_size for path in step.rglob("*") if path.is_file()}
    # What no plan has: the manifest, and small records of the optimizer.
    others = {"manifest.json", "optimizer_state.pt", "latest_universal", "step.pt", "deepspeed.pt"}
    assert needed == [sum(size for path, size in written.items() if path.name not in others)]


def test_dry_run_tells_the_files_and_reads_the_moments(zero_copy, tmp_path, capsys):
    folder = zero_copy("z3_bf16")
    before = sorted(tmp_path.rglob("*"))
    assert command(folder, "--dry-run", "--to", "zero2", "--world", "3") == 0
    told = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    convert_state(folder, tmp_path / "out", "zero2", 3)
    files = list((tmp_path / "out" / "zero").iterdir())
    assert f"{len(files)} files, {sum(path.stat().st_size for path in files):,} bytes" in told
    with open_all(folder) as source:
        part = source.moments["exp_avg"]["wide.weight"][0]
        place = part.file.position_of(part.ref, part.start)
    data = bytearray(part.file.path.read_bytes())
    data[place] ^= 1
    part.file.path.write_bytes(data)
    with pytest.raises(UserError, match=part.file.path.name):
        command(folder, "--dry-run", "--to", "zero2")


@pytest.mark.parametrize("target", ["zero2", "zero3"])
def test_fp16_gets_the_loss_scaler_that_deepspeed_begins_with(zero_dir, tmp_path, target):
    """Not the static one of scale 1 of a bf16 run, which DeepSpeed would prefer to its own."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    command(zero_dir / "z2_bf16", tmp_path / "out", "--to", target, "--dtype", "fp16")
    paths = sorted((tmp_path / "out").rglob("*optim_states.pt"))
    assert paths
    for path in paths:
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
        assert vars(saved["loss_scaler"]) == vars(DynamicLossScaler(2**16, 1000, 1, 2, False))
        assert saved["dynamic_loss_scale"] is True


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "zero3", "--ema"),
        ("--to", "zero3", "--shard-size", "1GB"),
        ("--to", "ddp", "--world", "2"),
        ("--to", "ddp", "--dtype", "bf16"),
        ("--to", "fsdp", "--dtype", "fp16"),
        ("--to", "dcp", "--dtype", "fp32"),
        ("--to", "universal", "--dtype", "fp16"),
        ("--world", "2"),
        ("--to", "zero3", "--world", "0"),
        ("--to", "zero2", "--sub-group-size", "1000"),
        ("--sub-group-size", "1000"),
    ],
)
def test_options_that_a_target_does_not_heed(zero_dir, tmp_path, words):
    with pytest.raises((UserError, SystemExit)):
        # argparse refuses a number out of its range itself.
        command(zero_dir / "z2_bf16", tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())
