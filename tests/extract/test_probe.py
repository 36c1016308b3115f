"""The capture probe's own parts: its bars, and the model it compares layers with."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import config
from drafter.errors import ContractError
from drafter.extract import probe, state_file, states
from tests import tiny_models

GOOD = probe.Result(rows=4, positions=400, mean_nat=0.02, max_nat=0.3, top1=0.99, layers=None)


def test_bars_pass_right_states_and_a_few_ties_and_nothing_else():
    assert GOOD.passed
    assert replace(GOOD, positions=38, top1=36 / 38).passed  # two ties of 38
    assert not replace(GOOD, positions=38, top1=35 / 38).passed
    assert not replace(GOOD, top1=0.94).passed
    assert not replace(GOOD, mean_nat=0.11).passed
    assert not replace(GOOD, mean_nat=float("inf")).passed
    near = {"2": {"nearest": 2, "distance": 0.01}, "15": {"nearest": 15, "distance": 0.02}}
    assert replace(GOOD, layers=near).passed
    assert not replace(GOOD, layers=near | {"15": {"nearest": 16, "distance": 0.02}}).passed
    assert not replace(GOOD, layers=near | {"15": {"nearest": 15, "distance": 0.4}}).passed


def test_a_nested_target_is_compared_with_its_own_text_model(tmp_path):
    nested = probe.load_reference(tiny_models.make_tiny_kimi(tmp_path / "nested"))
    flat = probe.load_reference(tiny_models.make_tiny_mla(tmp_path / "flat"))
    ids = torch.randint(0, 256, (1, 20))
    with torch.no_grad():
        assert torch.equal(nested.model(ids).logits, flat.model(ids).logits)


def test_a_target_that_cannot_be_filled_is_not_compared_with_random_layers(tmp_path):
    folder = tiny_models.make_tiny_mla(tmp_path / "flat")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.self_attn.o_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert probe.load_reference(folder) is None


MODEL_CODE = """
from transformers import PretrainedConfig, PreTrainedModel

class OddConfig(PretrainedConfig):
    model_type = "odd"

class OddModel(PreTrainedModel):
    config_class = OddConfig
"""


def test_a_target_with_code_of_its_own_is_loaded_only_if_trusted_and_never_ends_the_stage(tmp_path, caplog):
    """Seam M11: `ValueError: ... trust_remote_code`, "our bug", exit 1."""
    caplog.set_level("INFO")
    folder = tmp_path / "odd"
    folder.mkdir()
    names = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": names}))
    trace = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (folder / "modeling_odd.py").write_text(trace + MODEL_CODE)
    assert probe.load_reference(folder) is None and not (tmp_path / "ran").exists()
    assert "contains custom code" in caplog.text and "auxiliary layers are not compared" in caplog.text
    caplog.clear()
    assert probe.load_reference(folder, True) is None and (tmp_path / "ran").exists()  # no weights
    assert "contains custom code" not in caplog.text and "auxiliary layers are not compared" in caplog.text


def test_a_model_that_returns_no_layers_is_not_compared(tmp_path, caplog):
    """Seam M11"""
    caplog.set_level("INFO")
    reference = probe.Reference(torch.nn.Linear(2, 2))
    captured = states.States(torch.arange(3), torch.zeros(3, 2, 4), torch.zeros(3, 4), {})
    assert reference.distances([1, 2, 3], captured) is None and reference.distances([1, 2, 3], captured) is None
    assert caplog.text.count("returns no layers") == 1


def test_the_head_is_computed_as_the_server_computes_it(tmp_path):
    """bf16 logits of a float32 server's states tie where its own do not: 7 of 100 best tokens were others."""
    model = tiny_models.make_tiny_mla(tmp_path / "flat")
    for dtype in (torch.float32, torch.bfloat16):
        args = f"servers.extract.args.dtype={str(dtype).removeprefix('torch.')}"
        sets = [f"target.model={model}", f"target.layer_ids={list(tiny_models.LAYER_IDS)}", args]
        run_config = config.load(config.ROOT / "configs/smollm2_cpu.yaml", sets)
        states_of = torch.randn(5, tiny_models.HIDDEN)
        ours = probe._verifier(run_config)
        assert ours.head.dtype == dtype
        exact = ours.normed(states_of).float() @ ours.head.float().T
        assert torch.allclose(
            ours.log_probs(states_of), exact.log_softmax(-1), atol=1e-4 if dtype == torch.float32 else 0.1
        )


def test_neighbouring_layers_give_away_permuted_slots(tmp_path):
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(30, 7, 64, generator=generator)
    steps[:, [1, 3, 5]] *= 0.1  # a layer adds little to its input, many layers add much
    layers = steps.cumsum(dim=1).bfloat16()
    for name, hidden, right in (("right", layers, True), ("wrong", layers[:, [2, 1, 0, 3, 4, 5, 6]], False)):
        facts = state_file.file_metadata("a" * 32, "big", (2, 3, 30, 31, 58, 59, 61), "bf16")
        tensors = {"token_ids": torch.arange(30), "hidden_states": hidden.contiguous()}
        states.write_states(tmp_path / name, tensors, facts)
        if right:
            probe.check_neighbours(tmp_path / name, (2, 30, 58))
        else:
            with pytest.raises(ContractError, match="most similar to layer"):
                probe.check_neighbours(tmp_path / name, (2, 30, 58))


def test_a_rehearsals_target_is_loaded_as_far_as_it_fits_in_memory(tmp_path):
    """Packed weights grow more: 4 bits become 32."""
    flat = tiny_models.make_tiny_mla(tmp_path / "flat")
    weights = (flat / "model.safetensors").stat().st_size
    assert probe.load_reference(flat, memory=2 * weights) and not probe.load_reference(flat, memory=2 * weights - 1)
    packed = tiny_models.make_int4(tiny_models.make_tiny_mla(tmp_path / "packed"))
    weights = (packed / "model.safetensors").stat().st_size
    assert probe.load_reference(packed, memory=8 * weights)
    assert not probe.load_reference(packed, memory=8 * weights - 1)


def test_the_probe_says_in_words_which_layer_is_not_the_one_that_was_asked_for():
    layers = {"2": {"nearest": 2, "distance": 0.01}, "15": {"nearest": 16, "distance": 0.02}}
    said = str(replace(GOOD, layers=layers))
    assert "layer 2 as expected (relative difference 0.010)" in said
    assert "layer 15 looks like layer 16 (relative difference 0.020)" in said
    assert " nat " not in said and "nearest" not in said
