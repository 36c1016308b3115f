"""The target's three tensors: found by name suffix, used as the target itself uses them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.errors import ConfigError
from drafter.target.head import read_verifier
from tests import tiny_models


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    return tiny_models.make_tiny_mla(tmp_path_factory.mktemp("models") / "flat")


def test_log_probs_are_the_target_s_own(flat):
    """H05: the stored final layer is before the final norm; its weights are not one here."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(flat, dtype=torch.float32).eval()
    ids = torch.randint(0, 256, (1, 40))
    before = {}
    model.model.norm.register_forward_hook(lambda _module, inputs, _output: before.update(final=inputs[0]))
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0], dim=-1)
    verifier = read_verifier(flat)
    assert verifier.norm.float().sub(1).abs().max() > 0.1 and verifier.eps == 1e-5
    ours = verifier.log_probs(before["final"][0])
    assert (ours - expected).abs().mean() < 0.02  # the head is bf16
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_nested_names_give_the_same_tensors(flat, tmp_path):
    nested = read_verifier(tiny_models.make_tiny_kimi(tmp_path / "nested"))
    plain = read_verifier(flat)
    assert torch.equal(nested.embed, plain.embed) and torch.equal(nested.norm, plain.norm)
    assert torch.equal(nested.head, plain.head) and nested.eps == plain.eps
    assert not torch.equal(nested.head, nested.embed)


def test_a_tied_head_is_the_embedding_itself(model):
    verifier = read_verifier(model)
    assert verifier.head is verifier.embed and verifier.embed.shape == (49152, 576)


def test_sharded_weights_are_distinguished_from_copies_in_other_towers(flat, tmp_path):
    weights = load_file(flat / "model.safetensors")
    parts = {
        "a.safetensors": {"language_model.model.embed_tokens.weight": weights["model.embed_tokens.weight"]},
        "b.safetensors": {
            "language_model.model.norm.weight": weights["model.norm.weight"],
            "vision_tower.encoder.model.norm.weight": torch.zeros(3),
            "language_model.lm_head.weight": weights["lm_head.weight"],
            "language_model.model.layers.9.mtp.lm_head.weight": torch.zeros(3),
            "language_model.model.layers.0.input_layernorm.weight": torch.zeros(3),
        },
    }
    for name, tensors in parts.items():
        save_file(tensors, tmp_path / name)
    weight_map = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text((flat / "config.json").read_text())
    verifier = read_verifier(tmp_path)
    assert torch.equal(verifier.norm, weights["model.norm.weight"])
    assert torch.equal(verifier.head, weights["lm_head.weight"])


def test_a_folder_without_the_final_norm_is_refused_by_name(flat, tmp_path):
    weights = load_file(flat / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((flat / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"no tensor \*model.norm.weight"):
        read_verifier(tmp_path)


def headless(flat, folder, tied):
    """A copy of the flat model without lm_head."""
    folder.mkdir()
    tensors = load_file(flat / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((flat / "config.json").read_text())
    settings.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(
        json.dumps(settings | ({} if tied is None else {"tie_word_embeddings": tied}))
    )
    return folder


def test_an_untied_target_without_a_head_is_refused(flat, tmp_path):
    """Seam F13: its embedding was taken for its head, and every teacher was another model's."""
    with pytest.raises(ConfigError, match=r"no tensor \*lm_head.weight"):
        read_verifier(headless(flat, tmp_path / "untied", False))
    for name, tied in (("tied", True), ("unsaid", None)):
        found = read_verifier(headless(flat, tmp_path / name, tied))
        assert found.head is found.embed
