"""Stage 02 on real vLLM: right states pass, every wrong kind is caught, chunks and cached prefixes change nothing."""

import json
from pathlib import Path

import pytest
import torch

from drafter import config, contracts, states, verifier
from tests import tiny_models
from tests.conftest import serve
from tests.test_extract import KINDS, Run, make_row

pytestmark = pytest.mark.vllm

SMOL_LAYERS = (2, 15, 27, 30)


def capturing(layer_ids, root: Path, connector: str, module: str) -> list[str]:
    """Overrides that start an extract server with this connector and these captured layers."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(root), "num_writer_threads": 2, "queue_gb": 1},
    }
    return [
        f"servers.extract.args.speculative-config={json.dumps(speculative)}",
        f"servers.extract.args.kv-transfer-config={json.dumps(transfer)}",
    ]


def words(model: Path, count: int, name: str, text: str) -> list[contracts.Row]:
    """Rows of real text: a probe on noise would compare tails of flat distributions."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    rows = []
    for i in range(count):
        row = make_row(f"{name}-{i:025d}", 60, i)
        row.input_ids[:] = ids[60 * i : 60 * i + 60]
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def corrupting(model, tmp_path_factory):
    """One server whose connector corrupts what it is asked to, by file name."""
    folder = tmp_path_factory.mktemp("corrupting")
    layers = sorted({*SMOL_LAYERS, *(layer + 1 for layer in SMOL_LAYERS[:-1]), SMOL_LAYERS[-1] - 1})
    overrides = capturing(layers, folder, "CorruptingWriter", "tests.corrupting_connector")
    with serve("extract", folder, ["run.name=served", *overrides]) as served:
        yield folder, int(served.url.rpartition(":")[2])


TEXT = (config.ROOT / "README.md").read_text() if (config.ROOT / "README.md").exists() else ""
TEXT = "\n".join([TEXT, *(path.read_text() for path in sorted((config.ROOT / "drafter").glob("*.py")))])


def smol_run(folder: Path, model: Path, rows, name: str) -> Run:
    run = Run(folder, model, rows, name)
    run.more = ["--set", f"target.layer_ids={list(SMOL_LAYERS)}", "--set", "target.served_name=smollm2"]
    return run


def test_right_states_pass_and_every_wrong_kind_is_caught(corrupting, model, capsys):
    """H01, H02, H04, H05, H06, on vLLM itself."""
    folder, port = corrupting
    right = words(model, 9, "right", TEXT)
    run = smol_run(folder, model, right, "right")
    code, summary = run.extract(capsys, port, *run.more)
    assert code == 0 and summary["out"] == 9, summary.get("error")
    run.assert_exactly_the_rows()
    assert all(probe["mean_nat"] < 0.1 and probe["top1"] > 0.95 for probe in summary["facts"]["probes"])
    head = verifier.read_verifier(model)
    finals = [states.read_states(run.folder / contracts.states_path(row.row_id)).final for row in right]
    guessed = torch.stack([head.log_probs(final).argmax(-1)[:-1] for final in finals])
    actual = torch.tensor([row.input_ids[1:] for row in right])
    assert (guessed == actual).float().mean() > 0.2  # the model predicts real text; misaligned states would not
    for kind in KINDS:
        rows = [right[0], *words(model, 1, kind, TEXT)]
        wrong = smol_run(folder, model, rows, kind)
        code, summary = wrong.extract(capsys, port, *wrong.more, "--probe")
        assert code == 1 and "hidden states are wrong" in summary["error"], (kind, summary)
        assert wrong.files() == {}


def test_long_rows_in_chunks_over_a_cached_prefix_give_the_states_of_one_pass(tmp_path_factory, capsys):
    """H01: a nested Kimi with MLA; 2,000 tokens in chunks of 256, then again from the prefix cache."""
    folder = tmp_path_factory.mktemp("long")
    kimi, flat = tiny_models.make_tiny_kimi(folder / "kimi"), tiny_models.make_tiny_mla(folder / "flat")
    rows = [make_row(f"long-{i:027d}", 2000, i) for i in range(2)]
    rows[1].input_ids[:1500] = rows[0].input_ids[:1500]
    run = Run(folder, kimi, rows)
    overrides = capturing(tiny_models.LAYER_IDS, folder, "HiddenStatesWriter", "drafter.connector")
    flags = {"max-model-len": 4096, "max-num-batched-tokens": 256, "language-model-only": True}
    flags |= {"enable-prefix-caching": True, "enable-chunked-prefill": True, "reasoning-parser": "kimi_k2"}
    overrides += [f"servers.extract.args.{flag}={json.dumps(value)}" for flag, value in flags.items()]
    overrides += [
        f"target.model={kimi}",
        "target.served_name=tiny",
        f"target.layer_ids={list(tiny_models.LAYER_IDS)}",
    ]
    with serve("extract", folder, ["run.name=served", *overrides]) as served:
        port = int(served.url.rpartition(":")[2])
        once = run.extract(capsys, port, "--set", "target.max_seq_len=2048")
        first = {row.row_id: states.read_states(run.folder / contracts.states_path(row.row_id)) for row in rows}
        for path in run.folder.glob("??/*"):
            path.unlink()
        again = run.extract(capsys, port, "--set", "target.max_seq_len=2048")
    assert once[0] == again[0] == 0, (once[1].get("error"), again[1].get("error"))
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(flat, dtype=torch.float32).eval()
    for row in rows:
        with torch.no_grad():
            output = reference(torch.tensor([row.input_ids]), output_hidden_states=True, use_cache=False)
        second = states.read_states(run.folder / contracts.states_path(row.row_id))
        for read in (first[row.row_id], second):
            assert read.token_ids.tolist() == row.input_ids
            for slot, layer in enumerate(tiny_models.LAYER_IDS[:-1]):
                expected = output.hidden_states[layer][0]
                error = (read.aux[:, slot].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
                assert error.median() < 0.05, (layer, error.median())
