"""A shallow copy computes what the first layers of its target compute, and leaves the target as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.config import Target
from drafter.errors import ConfigError
from drafter.extract import probe
from drafter.target import eagle3_folder, head, shallow
from tests import tiny_models

IDS = tiny_models.LAYER_IDS


def made(model: Path, folder: Path, layer_ids: tuple[int, ...] = IDS) -> tuple[shallow.Cut, Path]:
    found = shallow.cut(model, layer_ids)
    shallow.copy(found, folder / "shallow")
    return found, folder / "shallow"


@torch.no_grad()
def states(model: Path, layers: int) -> list[torch.Tensor]:
    """The inputs of the first layers, and the output of the last of them before any norm."""
    loaded = probe.load_reference(model).model
    outputs = []
    loaded.model.layers[layers - 1].register_forward_hook(lambda _m, _i, output: outputs.append(output))
    ids = torch.arange(40)[None] * 7
    found = loaded(ids, output_hidden_states=True, use_cache=False).hidden_states[:layers]
    (last,) = outputs
    return [*found, last[0] if isinstance(last, tuple) else last]


def shard(model: Path) -> Path:
    """The same weights in files of 40 tensors, with an index, as published models have them."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = list(weights)
    parts = {f"model-{start:05}.safetensors": names[start : start + 40] for start in range(0, len(names), 40)}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, model / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (model / shallow.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("make", [tiny_models.make_tiny_mla, tiny_models.make_tiny_kimi])
def test_a_copy_s_states_are_those_of_the_targets_first_layers(tmp_path, make, int4, sharded):
    model = make(tmp_path / "model")
    model = tiny_models.make_int4(model) if int4 else model
    model = shard(model) if sharded else model
    found, copy = made(model, tmp_path)
    assert (found.layers, found.of, found.layer_ids(IDS)) == (4, 8, [1, 2, 3, 4])
    for ours, theirs in zip(states(copy, 4), states(model, 4), strict=True):
        assert torch.equal(ours, theirs)
    original, ours = head.read_verifier(model), head.read_verifier(copy)
    for name in ("embed", "norm", "head"):
        assert torch.equal(getattr(ours, name), getattr(original, name))


def test_a_target_with_a_tied_head_is_copied_with_it(model, tmp_path):
    found, copy = made(model, tmp_path, (2, 15, 27, 30))
    assert (found.layers, found.of) == (4, 30)
    for ours, theirs in zip(states(copy, 4), states(model, 4), strict=True):
        assert torch.equal(ours, theirs)
    verifier = head.read_verifier(copy)
    assert verifier.head is verifier.embed and torch.equal(verifier.embed, head.read_verifier(model).embed)


def test_every_kind_of_layer_is_in_the_copy_and_every_list_of_layers_is_cut(tmp_path):
    model = tiny_models.make_tiny_mla(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention", "full_attention"]
    (model / "config.json").write_text(json.dumps(config | {"layer_types": kinds, "num_nextn_predict_layers": 1}))
    found, copy = made(model, tmp_path)
    assert found.layers == 6
    cut = json.loads((copy / "config.json").read_text())
    assert cut == config | {"num_hidden_layers": 6, "layer_types": kinds[:6], "num_nextn_predict_layers": 0}


def test_only_the_text_models_layers_are_cut(tmp_path):
    model = tiny_models.make_tiny_kimi(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    kept = {f"vision_tower.encoder.layers.{layer}.weight": torch.ones(3) * layer for layer in range(8)}
    gone = {"language_model.model.layers.8.mtp.weight": torch.ones(3)}
    save_file(weights | kept | gone, model / "model.safetensors", metadata={"format": "pt"})
    _, copy = made(model, tmp_path)
    copied = load_file(copy / "model.safetensors")
    layers = {name.split(".")[3] for name in copied if name.startswith("language_model.model.layers.")}
    assert layers == {"0", "1", "2", "3"}
    assert {name: copied[name].tolist() for name in kept} == {name: kept[name].tolist() for name in kept}
    config = json.loads((copy / "config.json").read_text())
    assert (config["text_config"]["num_hidden_layers"], config["vision_config"]["num_hidden_layers"]) == (4, 1)


def test_tokenizer_template_and_code_are_linked_and_nothing_is_written_beside_the_target(tmp_path):
    model = tiny_models.make_tiny_kimi(tmp_path / "model")
    (model / "modeling_kimi.py").write_text("answer = 42\n")
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    relative = Path(os.path.relpath(model))
    _, copy = made(relative, tmp_path)
    links = {path.name for path in copy.iterdir() if path.is_symlink()}
    assert links == before.keys() - {"model.safetensors", "config.json"}
    assert all((copy / name).read_bytes() == (model / name).read_bytes() for name in links)
    assert before == {path.name: path.stat().st_mtime_ns for path in model.iterdir()}


def test_a_target_whose_layers_have_other_names_is_refused_in_one_line(tmp_path):
    model = tiny_models.make_tiny_mla(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    renamed = {name.replace("model.layers.", "model.h."): tensor for name, tensor in weights.items()}
    save_file(renamed, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no tensor model.layers.0.\*.*cannot be rehearsed$"):
        shallow.cut(model, IDS)


@pytest.mark.parametrize("damage", ["cut", "header", "gone"])
def test_a_damaged_weight_file_is_refused_in_one_line(tmp_path, damage):
    model = shard(tiny_models.make_tiny_mla(tmp_path / "model"))
    path = sorted(model.glob("*.safetensors"))[0]
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-7] if damage == "cut" else b"\xff" * 8 + data[8:])
    with pytest.raises(ConfigError, match=f"{path} is missing or broken .*: fetch it again$"):
        shallow.cut(model, IDS)


def test_a_full_disk_is_an_error_of_the_disk(tmp_path):
    """A file that may not grow as the copy must."""
    model = tiny_models.make_tiny_mla(tmp_path / "model")
    code = "import errno, resource, signal, sys; from pathlib import Path; from drafter.target import shallow\n"
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    code += f"try: shallow.copy(shallow.cut(Path(sys.argv[1]), {IDS}), Path(sys.argv[2]))\n"
    code += "except OSError as error: print(errno.errorcode[error.errno])\n"
    line = [sys.executable, "-c", code, str(model), str(tmp_path / "shallow")]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "EFBIG\n"


def test_a_warm_start_reads_the_copy_s_layers_and_is_otherwise_the_same(tmp_path):
    model = tiny_models.make_tiny_mla(tmp_path / "model")
    drafter = tiny_models.make_drafter(model, tmp_path / "drafter")
    found, copy = made(model, tmp_path)
    ids = found.layer_ids(IDS)
    shallow.copy_drafter(drafter, tmp_path / "copied", ids[:-1])
    target = Target(model=copy, served_name="x", layer_ids=tuple(ids), max_seq_len=64)
    tensors = eagle3_folder.check_folder(tmp_path / "copied", target)
    before, config = eagle3_folder.read_drafter(drafter)
    assert all(torch.equal(tensors[name], before[name]) for name in before) and tensors.keys() == before.keys()
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5], "the original is as it was"
