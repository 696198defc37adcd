"""A resume's source: every range of every state is bit-equal to the live engine's, whoever saved
it.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mmldlm.checkpoints.convert import convert_state
from mmldlm.checkpoints.files import file_io, torch_file
from mmldlm.checkpoints.files.dtypes import bf16_to_fp32
from mmldlm.checkpoints.formats.deepspeed_reader import ZeroCheckpoint
from mmldlm.checkpoints.resume import open_training_state
from mmldlm.errors import UserError
from tests.support.make_zero import CASES, MUON

# Without the names of the parameters ZeRO-0 in fp32 cannot be carried on; "steps" 0 has no
# moments.
UNNAMED = ("z0_fp32",)
STEPPED = [case for case in CASES if case not in UNNAMED and CASES[case].get("steps", 2)]
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def whole(reader, name: str, what: str) -> np.ndarray:
    return reader.read(name, what, 0, int(np.prod(reader.shape(name), dtype=int)))


def check_ranges(reader, name: str, what: str, expected: np.ndarray) -> None:
    """The whole tensor, and ranges as ranks of other world sizes would ask for them."""
    flat = expected.reshape(-1)
    assert np.array_equal(whole(reader, name, what), flat), (name, what)
    for world_size in (2, 3, 5):
        share = -(-flat.size // world_size)
        for start in range(0, flat.size, share):
            count = min(share, flat.size - start)
            got = reader.read(name, what, start, count)
            assert got.dtype == np.float32 and np.array_equal(got, flat[start : start + count]), (
                name,
                what,
                start,
            )


def open_on_another_rank(folder):
    """Open what rank 0 has opened and shared."""
    with open_training_state(folder) as reader:
        return pickle.loads(pickle.dumps(reader))


def check_zero(folder, case: str) -> None:
    """Weights against the live engine's, the second moment against the mark that make_zero put
    into the live one.
    """
    truth = np.load(folder / case / "truth.npz")
    index = json.loads((folder / case / "truth.json").read_text())
    with open_on_another_rank(folder / case) as reader:
        assert set(reader.names) == set(index) and reader.has_moments and not reader.has_ema
        assert reader.stage == CASES[case]["stage"]
        matrices = MUON if CASES[case].get("muon") else ()
        for name in reader.names:
            kind = "buffer" if name in ("counts", "flag", "mean") else "trainable"
            assert reader.kind(name) == ("frozen" if name.startswith("frozen.") else kind), name
            assert list(reader.shape(name)) == index[name]["shape"]
            if kind == "buffer" or name.startswith("frozen."):
                raw, dtype, shape = reader.read_tensor(name)
                assert raw.tobytes() == truth[name].tobytes() and dtype == index[name]["dtype"]
                continue
            weight = whole(reader, name, "weight")
            if not CASES[case].get("zero", {}).get("round_robin_gradients"):
                # See make_zero.live_values.
                assert weight.tobytes() == truth[name].tobytes(), name
            check_ranges(reader, name, "weight", weight)
            assert reader.moments_of(name) == (
                ("exp_avg",) if name in matrices else ("exp_avg", "exp_avg_sq")
            )
            if name in matrices:
                with pytest.raises(KeyError, match="exp_avg_sq"):
                    reader.read(name, "exp_avg_sq", 0, 1)
            else:
                check_ranges(reader, name, "exp_avg_sq", weight * weight + np.float32(0.25))
            first = whole(reader, name, "exp_avg")
            assert np.isfinite(first).all() and first.any(), name
            check_ranges(reader, name, "exp_avg", first)
        reader.finish()


@pytest.mark.parametrize("case", STEPPED)
def test_zero_at_world_2(zero_dir, case):
    if CASES[case].get("exclude_frozen"):
        index = json.loads((zero_dir / case / "truth.json").read_text())
        assert not any(name.startswith("frozen.") for name in index)
    check_zero(zero_dir, case)


@pytest.mark.parametrize("world_size", [1, 4])
def test_zero_at_other_world_sizes(zero_world_dir, world_size):
    folder = zero_world_dir(world_size)
    for case in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        check_zero(folder, case)


@pytest.mark.parametrize("case", ["z1_fp32", "z2_fp32", "z3_fp32"])
def test_first_moments_are_those_of_plain_adamw(zero_dir, case):
    """ZeRO-0 saves whole tensors by name: the same training must have left the same moments, to
    rounding.
    """
    with (
        open_training_state(zero_dir / "z0_fp32_named") as plain,
        open_training_state(zero_dir / case) as sharded,
    ):
        for name in plain.names:
            if plain.kind(name) == "trainable":
                expected = whole(plain, name, "exp_avg")
                np.testing.assert_allclose(
                    whole(sharded, name, "exp_avg"), expected, rtol=1e-4, atol=1e-8
                )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_before_the_first_step(zero_dir, stage):
    case = f"z{stage}_step0"
    truth = np.load(zero_dir / case / "truth.npz")
    with open_training_state(zero_dir / case) as reader:
        assert not reader.has_moments
        assert whole(reader, "wide.weight", "weight").tobytes() == truth["wide.weight"].tobytes()
        with pytest.raises(KeyError, match="exp_avg"):
            reader.read("wide.weight", "exp_avg", 0, 1)


def test_frozen_weights_are_widened(zero_dir):
    truth = np.load(zero_dir / "z3_bf16" / "truth.npz")["frozen.weight"].view(np.uint16)
    with open_training_state(zero_dir / "z3_bf16") as reader:
        check_ranges(reader, "frozen.weight", "weight", bf16_to_fp32(truth))


def test_wrong_questions(zero_dir):
    with open_training_state(zero_dir / "z2_bf16") as reader:
        for start, count in ((0, 66), (-1, 2), (64, 2), (0, -1)):
            with pytest.raises(ValueError, match="wide.weight"):
                reader.read("wide.weight", "weight", start, count)
        for name, what in (
            ("nothing", "weight"),
            ("wide.weight", "momentum"),
            ("wide.weight", "ema"),
            ("mean", "ema"),
        ):
            with pytest.raises(KeyError):
                reader.read(name, what, 0, 1)
        with pytest.raises(ValueError, match="read_tensor"):
            reader.read("counts", "weight", 0, 3)
        assert reader.read("flag", "weight", 0, 1) == 1.0
        assert reader.read("wide.weight", "weight", 65, 0).size == 0


def test_unnamed_parameters_are_refused(zero_dir):
    with pytest.raises(UserError, match="init_from"):
        open_training_state(zero_dir / "z0_fp32")


def test_imports_neither_torch_nor_deepspeed(zero_dir, fsdp_dir):
    code = (
        "import sys; from mmldlm.checkpoints.resume import open_training_state\nfor path in"
        " sys.argv[1:]:\n    with open_training_state(path) as r: [r.read(n, 'weight', 0, 1) for n"
        " in r.names if n != 'counts']\nprint([m for m in ('torch', 'deepspeed', 'transformers')"
        " if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(zero_dir / "z2_bf16"), str(fsdp_dir / "fsdp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# -- FSDP2, single, ddp ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder, truth_file",
    [
        ("fsdp", "truth.pt"),
        ("plain", "plain.pt"),
        ("fsdp_muon", "truth_muon.pt"),
        ("plain_muon", "plain_muon.pt"),
    ],
)
def test_torch_engines(fsdp_dir, folder, truth_file):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    truth = torch.load(fsdp_dir / truth_file, weights_only=True)
    with open_on_another_rank(fsdp_dir / folder) as reader:
        assert set(reader.names) == set(truth["weight"]) and reader.has_moments and reader.has_ema
        kinds = {name: reader.kind(name) for name in reader.names}
        assert {n for n, k in kinds.items() if k == "buffer"} == {
            "counts",
            "flag",
            "scale",
            "lows",
        }
        assert {n for n, k in kinds.items() if k == "frozen"} == {"frozen.weight", "frozen.bias"}
        assert {n for n, k in kinds.items() if k == "trainable"} == {
            *truth["exp_avg"],
            "head.weight",
        }
        assert reader.owner("head.weight") == "embed.weight"
        for name in truth["exp_avg"]:
            assert reader.moments_of(name) == tuple(
                what for what in ("exp_avg", "exp_avg_sq") if name in truth[what]
            )
        assert ("wide.weight" in truth["exp_avg_sq"]) is ("muon" not in folder)
        for what in ("weight", "exp_avg", "exp_avg_sq", "ema"):
            for name, tensor in truth[what].items():
                assert reader.shape(name) == tuple(tensor.shape)
                if what == "weight" and kinds[name] in ("buffer", "frozen"):
                    raw, dtype, shape = reader.read_tensor(name)
                    back = (
                        torch.from_numpy(raw.view(np.uint8))
                        .view(getattr(torch, dtype))
                        .reshape(shape)
                    )
                    assert back.dtype == tensor.dtype and torch.equal(back, tensor), name
                else:
                    check_ranges(reader, name, what, tensor.float().numpy())
        reader.finish()


def test_fsdp_before_the_first_step(fsdp_dir):
    with open_training_state(fsdp_dir / "step0") as reader:
        assert not reader.has_moments and reader.has_ema
        weight = whole(reader, "wide.weight", "weight")
        check_ranges(reader, "wide.weight", "ema", weight * np.float32(0.5) + np.float32(0.25))


def opened_by_a_rank(folder, world_size: int, monkeypatch) -> int:
    """Return how many files a rank in the middle opens for its rows or slices of everything."""
    with open_training_state(folder) as reader:
        shared = pickle.dumps(reader)
    opened, original = [], file_io.open_descriptor

    def counting(path, *args):
        opened.append(path)
        return original(path, *args)

    with monkeypatch.context() as patch, pickle.loads(shared) as reader:
        patch.setattr(file_io, "open_descriptor", counting)
        for name in reader.names:
            count = int(np.prod(reader.shape(name), dtype=int))
            share = -(-count // world_size)
            start = min(world_size // 2 * share, count)
            for what in ("weight", *reader.moments_of(name)):
                reader.read(name, what, start, min(share, count - start))
        reader.finish()
    return len(opened)


@pytest.mark.parametrize("target", ["zero2", "zero3", "fsdp"])
def test_a_rank_opens_only_the_files_that_it_needs(zero_dir, tmp_path, monkeypatch, target):
    """Rank 0 opens those of all, and shares what it found: the number does not grow."""
    opened = []
    for world_size in (4, 16, 64):
        out = tmp_path / f"{world_size}"
        convert_state(zero_dir / "z3_bf16", out, target, world_size, fsync=False)
        opened.append(opened_by_a_rank(out, world_size, monkeypatch))
    assert max(opened) <= 8, opened


def test_a_rank_that_sees_another_file_refuses_it(zero_copy):
    folder = zero_copy("z3_bf16")
    with open_training_state(folder) as reader:
        shared = pickle.dumps(reader)
    path = folder / OPTIM.format(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pickle.loads(shared) as reader, pytest.raises(UserError, match="rank_1.*\n.*ends at"):
        whole(reader, "wide.weight", "weight")


def test_a_rank_reads_only_its_share(tmp_path, monkeypatch):
    """The last 1/64 of a weight: about 1/64 of the bytes, and no more memory than that."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    values = torch.arange(1 << 20, dtype=torch.float32)
    torch.save({"w": values}, tmp_path / "model.pt")
    state = {"state": {}, "param_groups": [{"params": [0]}], "param_names": [["w"]]}
    torch.save(state, tmp_path / "optimizer.pt")
    read = []
    original = torch_file.read_exactly
    monkeypatch.setattr(
        torch_file,
        "read_exactly",
        lambda path, fd, view, at: (read.append(len(view)), original(path, fd, view, at))[1],
    )
    with open_training_state(tmp_path) as reader:
        opened = sum(read)
        got = reader.read("w", "weight", 63 << 14, 1 << 14)
        reader.finish()
    assert np.array_equal(got, values[63 << 14 :].numpy())
    assert opened < 10_000 and sum(read) - opened == 4 << 14


def test_more_files_than_the_usual_limit(fsdp_dir):
    """A universal checkpoint, or one of many ranks, has thousands of files; the soft limit is
    raised, not met.
    """
    code = (
        "import resource, sys; from mmldlm.checkpoints.files.torch_file import"
        " TorchFile\nhard ="
        " resource.getrlimit(resource.RLIMIT_NOFILE)[1]\nresource.setrlimit(resource.RLIMIT_NOFILE,"  # noqa: E501
        " (40, hard))\nfiles = [TorchFile(sys.argv[1]) for _ in range(60)]\nprint(len(files))"
    )
    command = [sys.executable, "-c", code, str(fsdp_dir / "plain" / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "60", done.stderr


# -- EMA ------------------------------------------------------------------------------------------


def ema_folder(fsdp_dir, tmp_path):
    folder = tmp_path / "engine"
    shutil.copytree(fsdp_dir / "fsdp", folder)
    return folder


def test_an_average_with_a_gap_is_refused(fsdp_dir, tmp_path):
    folder = ema_folder(fsdp_dir, tmp_path)
    (folder / "ema_rank1.pt").unlink()
    with pytest.raises(UserError, match="(?s)ema_rank.*none of element 20"):
        open_training_state(folder)


def test_replicas_of_the_average_may_overlap(fsdp_dir, tmp_path):
    folder = ema_folder(fsdp_dir, tmp_path)
    shutil.copy(folder / "ema_rank1.pt", folder / "ema_rank3.pt")
    with open_training_state(fsdp_dir / "fsdp") as one, open_training_state(folder) as two:
        for name in ("wide.weight", "row"):
            assert np.array_equal(whole(one, name, "ema"), whole(two, name, "ema"))


@pytest.mark.parametrize(
    "entry",
    [
        {"start": 60, "shape": [13, 5]},
        {"start": -1, "shape": [13, 5]},
        {"start": 0, "shape": [5, 13]},
        {"shape": [13, 5]},
    ],
)
def test_fragments_that_do_not_fit_are_refused(fsdp_dir, tmp_path, entry):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    folder = ema_folder(fsdp_dir, tmp_path)
    torch.save({"wide.weight": {**entry, "values": torch.zeros(10)}}, folder / "ema_rank2.pt")
    with pytest.raises(UserError, match="ema_rank2.pt"):
        open_training_state(folder)


# -- faults ---------------------------------------------------------------------------------------


def states_of(path) -> list[bytes]:
    with open_training_state(path) as reader:
        got = []
        for name in reader.names:
            if reader.kind(name) == "trainable":
                got += [
                    whole(reader, name, what).tobytes()
                    for what in ("weight", *reader.moments_of(name))
                ]
            else:
                got.append(reader.read_tensor(name)[0].tobytes())
        reader.finish()
    return got


@pytest.mark.parametrize("case", ["z1_bf16", "z3_bf16"])
def test_a_rank_file_of_another_step_is_refused(zero_dir, zero_copy, case):
    folder = zero_copy(case)
    later = zero_dir / f"z{case[1]}_later" / "zero"
    source = later if later.is_dir() else zero_dir / "z2_later" / "zero"
    shutil.copy(source / OPTIM.format(1), folder / OPTIM.format(1))
    with pytest.raises(UserError, match="_states.pt"):
        open_training_state(folder)


def rewrite(path, change) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    state = torch.load(path, weights_only=False)  # a file that this test made
    change(state["optimizer_state_dict"])
    torch.save(state, path)


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda inner: inner["base_optimizer_state"]["state"].pop(1), "step|tensor 1"),
        (lambda inner: inner["base_optimizer_state"]["state"][0].pop("exp_avg_sq"), "exp_avg_sq"),
        (lambda inner: inner["base_optimizer_state"]["state"].clear(), "step|optimizer state"),
        (
            lambda inner: inner["base_optimizer_state"]["state"][0].update(
                exp_avg=inner["base_optimizer_state"]["state"][0]["exp_avg"][:-5].clone()
            ),
            "elements of exp_avg",
        ),
        # A second moment in a group of Muon's: settings and states are not of one save.
        (
            lambda inner: inner["base_optimizer_state"]["param_groups"][0].update(muon=True),
            "exp_avg_sq of tensor 0",
        ),
    ],
)
def test_optimizer_state_that_does_not_add_up(zero_copy, change, word):
    folder = zero_copy("z2_bf16")
    rewrite(folder / OPTIM.format(1), change)
    with pytest.raises(UserError, match=word) as caught:
        open_training_state(folder)
    assert OPTIM.format(1) in str(caught.value)
    with (
        ZeroCheckpoint.open(folder)
        if word == "elements of exp_avg"
        else open_training_state(zero_copy("z1_bf16"))
    ):
        pass  # the weights alone, and a whole checkpoint, still open


def relabel(folder, muon: bool) -> None:
    """Change the settings of all groups of a DCP folder, a universal checkpoint or an
    optimizer.pt.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if (folder / "trainable.json").exists():
        facts = json.loads((folder / "trainable.json").read_text())
        for group in facts["groups"]:
            group["settings"]["muon"] = muon
        (folder / "trainable.json").write_text(json.dumps(facts))
        return
    path = folder / ("zero/optimizer_state.pt" if (folder / "zero").is_dir() else "optimizer.pt")
    state = torch.load(path, weights_only=True)
    for group in state["param_groups"]:
        group["muon"] = muon
    torch.save(state, path)


@pytest.mark.parametrize("name", ["fsdp_muon", "plain_muon", "z2_muon"])
def test_second_moments_fit_the_settings(zero_dir, fsdp_dir, tmp_path, name):
    """A weight of AdamW without one is damaged, and so is one of Muon that has it."""
    for muon, word in (
        (False, "no .*exp_avg_sq|exp_avg_sq.pt of"),
        (True, "exp_avg_sq of .*Muon"),
    ):
        folder = tmp_path / str(muon) / "universal"
        if name == "z2_muon":
            convert_state(zero_dir / name, folder.parent, "universal")
        else:
            shutil.copytree(fsdp_dir / name, folder)
        with open_training_state(folder) as reader:
            assert (reader.moments_of("wide.weight"), len(reader.moments_of("wide.bias"))) == (
                ("exp_avg",),
                2,
            )
        relabel(folder, muon)
        with pytest.raises(UserError, match=word):
            open_training_state(folder)


@pytest.mark.parametrize("name", ["z2_bf16", "z3_bf16", "z3_muon", "fsdp", "fsdp_muon", "plain"])
def test_damaged_anywhere(zero_dir, fsdp_dir, tmp_path, name):
    """Bits flipped and files cut: refused by name, or the very same state.

    Ranged reading leaves parts of a record unproven (the manifest is checked before); one rank
    that reads all in the order of the names reads every record from its start to its end, so here
    nothing passes.
    """
    folder = tmp_path / "engine"
    shutil.copytree(zero_dir / name / "zero" if name.startswith("z") else fsdp_dir / name, folder)
    expected = states_of(folder)
    chooser = random.Random(5)
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".pt", ".distcp")]
    num_refused = 0
    for number in range(40):
        path = chooser.choice(files)
        data = path.read_bytes()
        place = chooser.randrange(len(data))
        flipped = (
            data[:place] + bytes([data[place] ^ (1 << chooser.randrange(8))]) + data[place + 1 :]
        )
        path.write_bytes(data[: max(1, place)] if number % 4 == 0 else flipped)
        try:
            got = states_of(folder)
            assert got == expected, (path.name, place)
        except UserError as error:
            num_refused += 1
            assert path.name in str(error) or str(folder) in str(error)
        path.write_bytes(data)
    assert num_refused > 10


def test_hostile_metadata_runs_nothing(fsdp_dir, tmp_path):
    import os
    import pickle

    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = ema_folder(fsdp_dir, tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(UserError, match=".metadata"):
        open_training_state(folder)
    assert not (tmp_path / "ran").exists()


def test_nothing_there(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="training state"):
            open_training_state(path)


# -- tied weights that were copied apart ----------------------------------------------------------


def copied(value):
    """A tree with every tensor cloned: what a save in the background writes."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, copied(item)) for key, item in value.items())
    return value


@pytest.mark.parametrize("case", ["z0_fp32_named", "z1_bf16", "z2_bf16", "z3_bf16"])
def test_zero_saved_from_copies(zero_dir, zero_copy, case):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    folder = zero_copy(case)
    for path in folder.glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)  # a file that make_zero wrote
        told = {} if state["shared_params"] else {"aliases": {"head.weight": "embed.weight"}}
        torch.save({**state, "module": copied(state["module"]), **told}, path)
    with open_training_state(zero_dir / case) as one, open_training_state(folder) as two:
        assert two.owner("head.weight") == "embed.weight"
        assert {name: one.kind(name) for name in one.names} == {
            name: two.kind(name) for name in two.names
        }
        for what in ("weight", "exp_avg"):
            assert np.array_equal(whole(one, "head.weight", what), whole(two, "head.weight", what))


def test_plain_saved_from_copies(fsdp_dir, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for name in ("model.pt", "optimizer.pt"):
        state = copied(torch.load(fsdp_dir / "plain" / name, weights_only=True))
        torch.save(
            {**state, "aliases": {"head.weight": "embed.weight"}} if "state" in state else state,
            tmp_path / name,
        )
    with open_training_state(tmp_path) as reader:
        assert (
            reader.owner("head.weight") == "embed.weight"
            and reader.kind("head.weight") == "trainable"
        )
