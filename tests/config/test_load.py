import pytest

from mmldlm.config.load import (
    all_keys,
    parse_override,
    preset_names,
    to_yaml,
    with_absolute_paths,
)
from mmldlm.config.schema import Config
from mmldlm.errors import UserError
from mmldlm.tasks.registry import build_config, load_config
from mmldlm.tasks.translation.config import TranslationConfig


def test_every_preset_loads_and_round_trips(tmp_path):
    assert {
        "quickstart",
        "tiny",
        "small",
        "mmdit_300m",
        "mmdit",
        "mmdit_stable",
        "mmdit_1b",
    } <= set(preset_names())
    for name in preset_names():
        config = load_config(name)
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml(config))
        assert load_config(None, str(path)) == config


def test_a_run_is_named_after_its_preset_unless_it_is_named(tmp_path):
    """newcomer 2: all presets trained in one folder."""
    path = tmp_path / "own.yaml"
    path.write_text("logging: {run_name: own}\n")
    assert load_config("tiny").logging.run_name == "tiny"
    assert load_config("tiny", str(path)).logging.run_name == "own"
    assert load_config("tiny", None, ["logging.run_name=a/b"]).logging.run_name == "a/b"
    assert load_config(None, None, []).logging.run_name == "mmldlm"


def test_mmdit_stable_is_mmdit_with_the_stable_numbers():
    plain, stable = load_config("mmdit"), load_config("mmdit_stable")
    assert plain.model == stable.model
    assert (
        stable.optimizer.lr,
        stable.optimizer.grad_clip_norm,
        stable.optimizer.warmup_steps,
    ) == (5e-5, 0.5, 2000)
    assert (stable.loss.latent_loss_weight, stable.training.grad_accum_steps) == (0.1, 2)


def test_parameter_counts_of_the_presets():
    import torch

    from mmldlm.models import MultimodalMMDiT

    ids = [
        "model.latent_dim=1024",
        "model.vocab_size=30522",
        "model.mask_token_id=103",
        "model.pad_token_id=0",
    ]
    expected = {
        "small": 0.11e9,
        "mmdit_300m": 0.31e9,
        "mmdit": 0.9e9,
        "mmdit_1b": 1.1e9,
        "mmdit_3b": 3.1e9,
        "mmdit_8b": 8.1e9,
        "mmdit_20b": 19.8e9,
    }
    for name, count in expected.items():
        with torch.device("meta"):
            model = MultimodalMMDiT(
                load_config(name, None, [*ids, "model.eos_token_id=102"]).model
            )
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=0.05)


def test_later_sources_win(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optimizer: {lr: 3e-4, warmup_steps: 7}\n")
    config = load_config("tiny", str(path), ["optimizer.warmup_steps=9", "training.resume=auto"])
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.training.resume) == (
        3e-4,
        9,
        "auto",
    )
    assert config.model.hidden_size == 64


def test_a_section_whose_keys_are_commented_out_is_left_out(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("logging:\n  run_name: a\n  wandb:\n    # mode: offline\noptimizer:\n")
    config = load_config("tiny", str(path), ["logging.wandb.mode=offline"])
    assert (config.logging.run_name, config.logging.wandb.mode) == ("a", "offline")
    with pytest.raises(UserError, match="logging.wandb=None: a section"):
        load_config("tiny", str(path), ["logging.wandb=null"])


def test_learning_rates_without_a_dot_are_numbers():
    assert parse_override("optimizer.lr=1e-4", TranslationConfig) == {"optimizer": {"lr": 1e-4}}
    assert load_config("tiny", None, ["optimizer.lr=5e-5"]).optimizer.lr == 5e-5


def test_weights_of_a_preset_do_not_linger():
    config = load_config("quickstart", None, ["training.loss_type_weights={l2t: 1.0}"])
    assert config.training.mode_weights() == {"unconditional": 0.0, "l2t": 1.0, "t2l": 0.0}


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("training.losstype=l2t", "training.loss_type"),
        ("loss.loss_type=l2t", "training.loss_type"),  # the key MM-LDLM really read
        ("training.latent_loss_weight=1", "loss.latent_loss_weight"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate"),
        ("modle.hidden_size=8", "model"),
        ("training.loss_type=l2tt", "unconditional"),
        ("training.train_batch_size=0", "greater than or equal to 1"),
        ("model.n_heads=5", "does not divide"),
        ("optimizer.min_lr=1", "above optimizer.lr"),
        ("training.loss_type_weights={l2t: -1}", "weights"),
        ("latent_diffusion.prediction=flow", "rectified_flow"),
        ("training=3", "section"),
        ("training.dtype", "section.key=value"),
        ("--fast", "section.key=value"),
    ],
)
def test_mistakes_are_named(word, says):
    with pytest.raises(UserError) as caught:
        load_config("tiny", None, [word])
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_unknown_presets_and_files_are_named(tmp_path):
    with pytest.raises(UserError, match="mmdit_stable"):
        load_config("mmdit_stabel")
    with pytest.raises(UserError, match="check the path"):
        load_config(None, str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("training: [1, 2\n")
    with pytest.raises(UserError, match="bad.yaml"):
        load_config(None, str(tmp_path / "bad.yaml"))


def test_several_mistakes_are_listed_together():
    with pytest.raises(UserError) as caught:
        build_config({"training": {"losstype": "l2t", "dtyp": "bf16"}, "nonsense": 1})
    assert all(word in str(caught.value) for word in ("losstype", "dtyp", "nonsense"))


def test_every_key_has_a_description_and_is_read_somewhere():
    """MM-LDLM's configs were full of keys that nobody read."""
    from pathlib import Path

    import mmldlm

    package = Path(mmldlm.__file__).parent
    declared = {package / "config" / "schema.py", *package.rglob("config.py")}
    source = "\n".join(p.read_text() for p in package.rglob("*.py") if p not in declared)
    schema = "\n".join(p.read_text() for p in declared)
    for key, _, text in all_keys(TranslationConfig):
        leaf = key.split(".")[-1]
        assert len(text) > 10, f"{key} has no description"
        assert f".{leaf}" in source or f".{leaf}" in schema, f"nobody reads {key}"
    assert isinstance(TranslationConfig(), Config)


def test_text_may_look_like_another_yaml_value():
    config = load_config(
        "tiny", None, ["logging.run_name=off", "data.latent_data_root=1e5", "training.resume=null"]
    )
    assert config.logging.run_name == "off" and config.data.latent_data_root == "1e5"
    assert config.training.resume is None
    assert (
        load_config("tiny", None, ["stability.spike_action=off"]).stability.spike_action == "off"
    )
    with pytest.raises(UserError, match="batch"):
        load_config("tiny", None, ["training.train_batch_size=off"])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("training.dtype=bfloat16", "did you mean bf16?"),
        ("engine.kind=FSDP", "did you mean fsdp?"),
        ("engine.kind=zero3", "did you mean engine.kind=deepspeed engine.zero_stage=3?"),
        ("optimizer.grad_clip_norm=none", "null switches it off"),
        ("optimizer.grad_clip_norm=0", "null switches it off"),
    ],
)
def test_a_value_in_other_words_is_told_in_ours(word, says):
    with pytest.raises(UserError) as caught:
        load_config("tiny", None, [word])
    assert says in str(caught.value)


def test_a_kept_config_is_read_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [
        "data.latent_data_root=S",
        "training.init_from=../old/latest",
        "logging.save_dir=runs",
    ]
    kept = with_absolute_paths(load_config("tiny", None, [*paths, "training.resume=auto"]))
    (tmp_path / "config.yaml").write_text(to_yaml(kept))
    monkeypatch.chdir("/")
    found = load_config(None, str(tmp_path / "config.yaml"))
    assert (found.data.latent_data_root, found.logging.save_dir) == (
        str(tmp_path / "S"),
        str(tmp_path / "runs"),
    )
    assert (
        found.training.init_from == str(tmp_path / "../old/latest")
        and found.training.resume == "auto"
    )
    mixed = with_absolute_paths(load_config("tiny", None, ["data.mixture={/a: 1, b: 2}"]))
    assert mixed.data.mixture == {"/a": 1.0, "/b": 2.0} and mixed.engine.deepspeed_config is None


@pytest.mark.parametrize(
    "name", ["../../esc", "a/../../esc", "/tmp/esc", "", ".", "a//b", "..", "a/"]
)
def test_a_run_stays_in_its_save_dir(name):
    with pytest.raises(UserError, match="run_name"):
        load_config("tiny", None, [f"logging.run_name='{name}'"])


def test_a_run_may_lie_in_a_folder_of_its_save_dir():
    config = load_config(
        "tiny", None, ["logging.save_dir=runs", "logging.run_name='group/..run 1'"]
    )
    assert str(config.run_dir()) == "runs/group/..run 1"


def test_words_that_name_entries_of_one_dict_are_one_value(tmp_path):
    """Each once replaced the entries before it; and stores of a file stayed beside the user's."""

    def weights(*words):
        return load_config("tiny", None, list(words)).training.loss_type_weights

    key = "training.loss_type_weights"
    two = (f"{key}.l2t=0.7", f"{key}.t2l=0.3")
    assert weights(*two) == {"l2t": 0.7, "t2l": 0.3}
    assert weights(f"{key}={{unconditional: 1}}", *two) == {
        "unconditional": 1,
        "l2t": 0.7,
        "t2l": 0.3,
    }
    assert weights(*two, f"{key}={{unconditional: 1}}") == {"unconditional": 1}
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {mixture: {a: 0.8, b: 0.2}}\ntraining: {loss_type_weights: {l2t: 1, t2l: 2}}\n"
    )
    config = load_config(None, str(path), ["data.mixture={c: 1}", f"{key}.l2t=0.5"])
    assert config.data.mixture == {"c": 1}
    assert config.training.loss_type_weights == {"l2t": 0.5}
