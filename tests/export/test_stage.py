"""Stage 05: what is exported is the checkpoint, in the reference's form, or it is refused by name."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import config, files, stage
from drafter.errors import ConfigError, ContractError
from drafter.export import stage as export
from drafter.extract import state_file, states
from drafter.target import eagle3_folder
from drafter.target.head import read_verifier
from drafter.train import checkpoint, draft_model
from drafter.train.attention import Documents
from drafter.train.batch import Pack
from tests.tiny_models import HIDDEN, LAYER_IDS, VOCAB, make_drafter, make_tiny_kimi


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_kimi(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory) -> Path:
    return make_drafter(model, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def target(model) -> config.Target:
    return config.Target(model=model, served_name="tiny", layer_ids=LAYER_IDS, max_seq_len=64)


@pytest.fixture
def run(tmp_path, model, reference) -> config.Config:
    """A config of a run whose training has not begun, with a warm start."""
    return config.load(
        config.ROOT / "configs/smollm2_cpu.yaml",
        [
            f"run.dir={tmp_path}",
            "run.name=r",
            f"target.model={model}",
            f"target.layer_ids={list(LAYER_IDS)}",
            f"train.warm_start={reference}",
            "train.draft_vocab_size=null",
        ],
    )


def masters(folder: Path) -> dict[str, torch.Tensor]:
    """A folder's tensors as a training checkpoint holds them."""
    tensors, _config = eagle3_folder.read_drafter(folder)
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def save_step(run: config.Config, weights: dict[str, torch.Tensor], step: int = 1, acceptance: float = 1.0) -> Path:
    """A complete step folder beside the manifest of a stage that has run."""
    folder = run.stage_dir("04_train")
    path = checkpoint.step_path(folder, step)
    settings = eagle3_folder.read_config(run.train.warm_start)
    state = {"expected_acceptance": acceptance, "step": checkpoint.step_number(path)}
    checkpoint.save_step(path, weights, settings, {"moment": torch.zeros(1)}, state | {"validated": state["step"]})
    files.write_json(folder / "manifest.json", {"question": {}, "facts": {}})
    return path


def export_run(run: config.Config) -> dict:
    return export.run(stage.Stage("05_export", run, argparse.Namespace(limit=None, dry_run=False)))


def a_row(tokens: int = 40) -> states.States:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (tokens,), generator=generator)
    hidden = torch.randn(tokens, 4, HIDDEN, generator=generator).bfloat16()
    facts = state_file.file_metadata("ab" * 16, "tiny", LAYER_IDS, "bf16")
    return states.States(ids, hidden[:, :-1], hidden[:, -1], facts)


def test_a_warm_start_exported_untrained_is_the_reference(run, reference):
    """X01: round trip through the trainer's own model, tensor by tensor, dtype by dtype."""
    verifier = read_verifier(run.target.model)
    drafter = draft_model.build_drafter(*eagle3_folder.read_drafter(reference), verifier, run.target)
    save_step(run, draft_model.native_weights(drafter, keep_embedding=False))
    export_run(run)
    exported, original = (
        load_file(export.drafter_folder(run) / eagle3_folder.WEIGHTS),
        load_file(reference / eagle3_folder.WEIGHTS),
    )
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name
    ours, theirs = eagle3_folder.read_config(export.drafter_folder(run)), eagle3_folder.read_config(reference)
    assert {key: ours[key] for key in theirs if key not in export.EXPORT_KEYS} == {
        key: value for key, value in theirs.items() if key not in export.EXPORT_KEYS
    }


def test_an_embedding_is_kept_as_the_reference_has_it(target, model, reference, tmp_path):
    """X01, X09: kept bit for bit where the reference has one, absent where it has none; nothing is left to guess."""
    weights, settings = masters(reference), eagle3_folder.read_config(reference)
    embedding = read_verifier(model).embed
    with_embedding = tmp_path / "reference"
    with_embedding.mkdir()
    save_file(
        load_file(reference / eagle3_folder.WEIGHTS) | {eagle3_folder.EMBEDDING: embedding},
        with_embedding / eagle3_folder.WEIGHTS,
    )
    (with_embedding / eagle3_folder.CONFIG).write_text(json.dumps(settings))

    export.write_drafter(
        tmp_path / "kept", weights | {eagle3_folder.EMBEDDING: embedding.float()}, settings, target, with_embedding
    )
    assert torch.equal(load_file(tmp_path / "kept" / eagle3_folder.WEIGHTS)[eagle3_folder.EMBEDDING], embedding)
    with pytest.raises(ContractError, match="embed_tokens.weight is missing"):
        export.write_drafter(tmp_path / "lost", weights, settings, target, with_embedding)
    with pytest.raises(ContractError, match="embed_tokens.weight does not belong"):
        export.write_drafter(
            tmp_path / "extra", weights | {eagle3_folder.EMBEDDING: embedding.float()}, settings, target, reference
        )
    assert {path.name for path in tmp_path.iterdir()} == {"reference", "kept"}


@pytest.mark.parametrize("name", ["lm_head.weight", "midlayer.mlp.up_proj.weight", "norm.weight", "d2t", "t2d"])
@pytest.mark.parametrize("fault", ["delete", "recast", "cut", "nan"])
def test_a_faulty_checkpoint_is_refused_by_name_and_leaves_nothing(target, reference, tmp_path, name, fault):
    """X02, X03"""
    weights, settings = masters(reference), eagle3_folder.read_config(reference)
    tensor = weights.pop(name)
    if fault == "recast":
        weights[name] = tensor.to(torch.int32)
    elif fault == "cut":
        weights[name] = tensor[1:]
    elif fault == "nan":
        weights[name] = tensor.float() * float("nan")
    with pytest.raises(ContractError, match=f"^{name} (is|has)"):
        export.write_drafter(tmp_path / "out", weights, settings, target, reference)
    assert not list(tmp_path.iterdir())


def test_every_tensor_that_is_not_the_checkpoints_is_named(target, reference, tmp_path):
    """X01: after reopening, a permuted tensor of the right shape is found by its values."""
    weights, settings = masters(reference), eagle3_folder.read_config(reference)
    export.write_drafter(tmp_path / "out", weights, settings, target, reference)
    written = load_file(tmp_path / "out" / eagle3_folder.WEIGHTS)
    for name, tensor in written.items():
        if tensor.ndim < 2:
            continue
        permuted = {**written, name: tensor.flip(0).contiguous()}
        with pytest.raises(ContractError, match=name):
            export.check_reopened(tmp_path / "out", permuted, settings, target, [])


@pytest.mark.parametrize(
    ("key", "value"),
    [("rms_norm_eps", 1e-5), ("num_attention_heads", 8), ("rope_theta", 5e4), ("attention_bias", True)],
)
def test_a_config_that_drifted_from_the_reference_is_refused(target, reference, tmp_path, key, value):
    weights = masters(reference)
    settings = eagle3_folder.read_config(reference) | {key: value}
    if key == "rope_theta":
        del settings["rope_parameters"]
    with pytest.raises(ContractError, match="rope" if key == "rope_theta" else key):
        export.write_drafter(tmp_path / "out", weights, settings, target, reference)


def test_what_the_reference_leaves_out_is_not_dropped_in_silence(target, reference, tmp_path):
    """T17: a window that the drafter was trained with; what an engine would take anyhow may be left out."""
    short = tmp_path / "reference"
    short.mkdir()
    settings = eagle3_folder.read_config(reference)
    kept = {key: value for key, value in settings.items() if key not in ("head_dim", "hidden_act")}
    (short / eagle3_folder.CONFIG).write_text(json.dumps(kept | {"head_dim": settings["head_dim"]}))
    assert "hidden_act" not in export.final_config(settings, target, short)
    with pytest.raises(ContractError, match="sliding_window is 512 in the checkpoint, None in"):
        export.final_config(settings | {"sliding_window": 512}, target, short)


def test_layer_ids_and_rope_are_written_where_every_engine_reads_them(target, reference):
    """A published config has ids nested only and rope in transformers 4's spelling."""
    settings = eagle3_folder.read_config(reference)
    for key in (eagle3_folder.LAYER_IDS, "rope_parameters", "dtype"):
        del settings[key]
    settings["max_position_embeddings"] = 128
    exported = export.final_config(settings, target, None)
    assert exported[eagle3_folder.LAYER_IDS] == exported["eagle_config"][eagle3_folder.LAYER_IDS] == [2, 4, 5]
    assert exported["eagle_config"]["use_aux_hidden_state"] is True
    assert exported["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert (exported["rope_theta"], exported["rope_scaling"]) == (1e6, None)
    assert exported["dtype"] == exported["torch_dtype"] == "bfloat16"
    assert exported["max_position_embeddings"] == target.architecture.max_position_embeddings


@pytest.mark.parametrize("claimed", ["float16", "float32", None])
def test_an_exports_config_says_the_dtype_of_its_tensors(target, reference, tmp_path, claimed):
    """Seam F12: where the reference's config and tensors disagreed, an engine cast the drafter."""
    other = tmp_path / "reference"
    shutil.copytree(reference, other)
    settings = {k: v for k, v in eagle3_folder.read_config(reference).items() if k not in ("dtype", "torch_dtype")}
    (other / eagle3_folder.CONFIG).write_text(json.dumps(settings | ({"torch_dtype": claimed} if claimed else {})))
    export.write_drafter(tmp_path / "out", masters(reference), eagle3_folder.read_config(reference), target, other)
    exported = eagle3_folder.read_config(tmp_path / "out")
    assert exported["dtype"] == exported["torch_dtype"] == "bfloat16"
    assert eagle3_folder.read_drafter(tmp_path / "out")[0]["fc.weight"].dtype == torch.bfloat16


def test_an_export_has_a_head_of_its_own_whatever_its_reference_says(target, reference, tmp_path):
    """Seam F12: with tie_word_embeddings true an engine may draft with the embedding."""
    other = tmp_path / "reference"
    shutil.copytree(reference, other)
    settings = eagle3_folder.read_config(reference) | {"tie_word_embeddings": True}
    (other / eagle3_folder.CONFIG).write_text(json.dumps(settings))
    export.write_drafter(tmp_path / "out", masters(reference), settings, target, other)
    assert eagle3_folder.read_config(tmp_path / "out")["tie_word_embeddings"] is False


def test_positions_are_never_raised_where_the_rope_depends_on_them(target, reference, tmp_path):
    """Seam F12: YaRN without its original length turns otherwise once max_position_embeddings rises."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    short = {"max_position_embeddings": 128, "rope_parameters": yarn, "rope_scaling": None}
    settings = eagle3_folder.read_config(reference) | short
    for refuse in (
        lambda: export.final_config(settings, target, None),
        lambda: eagle3_folder.check_form(settings, target),
    ):
        with pytest.raises(ContractError, match="original_max_position_embeddings.*from 128 to the target's"):
            refuse()
    for good in (
        settings | {"rope_parameters": yarn | {"original_max_position_embeddings": 32}},
        settings | {"rope_parameters": yarn | {"rope_type": "linear"}},
        settings | {"max_position_embeddings": target.architecture.max_position_embeddings},
    ):
        eagle3_folder.check_form(good, target)
        export.final_config(good, target, None)


def test_scaled_rope_survives_both_spellings():
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    old = eagle3_folder.both_ropes({"rope_theta": 5e4, "rope_scaling": yarn})
    new = eagle3_folder.both_ropes({"rope_parameters": {"rope_theta": 5e4, **yarn}})
    legacy = eagle3_folder.both_ropes(
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn"} | {k: yarn[k] for k in list(yarn)[1:]}}
    )
    assert old == new == legacy
    assert old["rope_scaling"] == yarn
    with pytest.raises(ContractError, match="rope_theta"):
        eagle3_folder.both_ropes({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}})


def test_the_export_drafts_what_the_trainer_trained(target, reference, tmp_path):
    """X01: logits of the exported folder, computed from the serving side, against the training model's own."""
    weights, settings, row = masters(reference), eagle3_folder.read_config(reference), a_row()
    export.write_drafter(tmp_path / "out", weights, settings, target, reference, [row])
    verifier = read_verifier(target.model)
    exported, exported_settings = eagle3_folder.read_drafter(tmp_path / "out")
    served = export.logits(exported, exported_settings, verifier.embed, row)

    drafter = draft_model.build_drafter(weights, settings, verifier, target)
    drafter.prepare(verifier, torch.float32, steps=1)
    slots = len(row.token_ids) - 1
    bounds = torch.tensor([0, slots], dtype=torch.int32)
    every = torch.arange(slots)
    ones = torch.ones(slots, dtype=torch.int64)
    pack = Pack(
        states=torch.cat([row.aux, row.final[:, None]], 1)[:slots],
        aux=None,
        aux_scale=None,
        input_ids=row.token_ids[1:],
        positions=every,
        anchors=every,
        labels=every,
        depth=ones,
        region=ones,
        documents=Documents(bounds, bounds, slots, slots),
    )
    with torch.no_grad():
        trained = drafter._draft(pack)[0] @ drafter.lm_head.weight.T
    torch.testing.assert_close(served, trained, rtol=1e-4, atol=1e-4)


def test_other_logits_after_reopening_are_refused(target, reference, tmp_path):
    """X01"""
    weights, settings = masters(reference), eagle3_folder.read_config(reference)
    export.write_drafter(tmp_path / "out", weights, settings, target, reference)
    drifted = eagle3_folder.read_config(tmp_path / "out") | {"rms_norm_eps": 1e-2}
    (tmp_path / "out" / eagle3_folder.CONFIG).write_text(json.dumps(drifted))
    written = load_file(tmp_path / "out" / eagle3_folder.WEIGHTS)
    with pytest.raises(ContractError, match="other logits"):
        export.check_reopened(tmp_path / "out", written, settings, target, [a_row()])


def test_the_best_complete_step_is_exported_and_only_once(run, reference, caplog):
    save_step(run, masters(reference), step=1, acceptance=1.2)
    better = masters(reference)
    better["fc.weight"] += 1
    save_step(run, better, step=2, acceptance=1.5)
    save_step(run, masters(reference), step=3, acceptance=1.4)
    summary = export_run(run)
    assert summary["facts"]["step"] == "step-00000002"
    weights = export.drafter_folder(run) / eagle3_folder.WEIGHTS
    stamp = weights.stat().st_mtime_ns
    assert weights.stat().st_mode & 0o777 == 0o644
    export_run(run)
    assert weights.stat().st_mtime_ns == stamp

    best = masters(reference)
    best["fc.weight"] += 2
    save_step(run, best, step=4, acceptance=1.6)
    assert export_run(run)["facts"]["step"] == "step-00000004"
    assert torch.equal(load_file(weights)["fc.weight"], best["fc.weight"].bfloat16())


def test_a_damaged_export_is_made_again(run, reference):
    save_step(run, masters(reference))
    export_run(run)
    weights = export.drafter_folder(run) / eagle3_folder.WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\0\0\0\1")
    export_run(run)
    assert weights.read_bytes() == whole
    (export.drafter_folder(run) / eagle3_folder.CONFIG).unlink()
    export_run(run)
    assert eagle3_folder.read_config(export.drafter_folder(run))["draft_vocab_size"]


@pytest.mark.parametrize("missing", checkpoint.FILES)
def test_a_partial_step_is_refused_with_the_nearest_complete_one(run, reference, missing):
    """X07"""
    save_step(run, masters(reference), step=3)
    partial = save_step(run, masters(reference), step=7)
    (partial / missing).unlink()
    asked = run.model_copy(update={"export": config.Export(step=7)})
    with pytest.raises(ContractError, match=f"{missing} is missing; .*step-00000003"):
        export_run(asked)
    assert export_run(run)["facts"]["step"] == "step-00000003"


def test_a_run_without_training_is_one_line(run):
    """X07"""
    with pytest.raises(ConfigError, match="04_train has not run"):
        export_run(run)
