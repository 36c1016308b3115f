"""Stage 02 on real vLLM: right states pass, every wrong kind is caught, chunks and cached prefixes change nothing."""

import json
from pathlib import Path

import pytest
import torch

from drafter import config, contracts
from drafter.extract import states
from drafter.target import head as verifier
from tests.conftest import serve
from tests.extract.test_stage import KINDS, Run, make_row

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
TEXT = "\n".join([TEXT, *(path.read_text() for path in sorted((config.ROOT / "drafter").rglob("*.py")))])


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
        rows = [right[0], words(model, 2, kind, TEXT)[1]]  # of other text: "other" gives it the first one's states
        wrong = smol_run(folder, model, rows, kind)
        code, summary = wrong.extract(capsys, port, *wrong.more, "--probe")
        assert code == 1 and "hidden states are wrong" in summary["error"], (kind, summary)
        assert wrong.files() == {}


def test_long_rows_in_chunks_over_a_cached_prefix_give_the_states_of_one_pass(model, tmp_path, capsys):
    """H01: 700 tokens in chunks of 128, then again from the prefix cache.

    On a CPU a prompt of an MLA target longer than a chunk waits for ever, so a Llama replaces it.
    """
    rows = [words(model, 1, f"long{number}", TEXT)[0] for number in range(2)]
    text = words(model, 24, "text", TEXT)
    for number, row in enumerate(rows):
        parts = [*text[:9], *text[9 + 3 * number : 12 + 3 * number]]  # 540 tokens in common, 180 of their own
        row.input_ids[:] = [token for part in parts for token in part.input_ids][:700]
        row.supervised[0][1] = 700
        row.usage["completion_tokens"] = 695
    run = smol_run(tmp_path, model, rows, "long")
    flags = {"max-num-batched-tokens": 128, "enable-prefix-caching": True, "enable-chunked-prefill": True}
    overrides = capturing(SMOL_LAYERS, tmp_path, "HiddenStatesWriter", "drafter.extract.connector")
    overrides += [f"servers.extract.args.{flag}={json.dumps(value)}" for flag, value in flags.items()]
    more = [*run.more, "--set", "target.max_seq_len=1000"]
    with serve("extract", tmp_path, ["run.name=served", *overrides]) as served:
        port = int(served.url.rpartition(":")[2])
        once = run.extract(capsys, port, *more)
        assert once[0] == 0, once[1].get("error")
        first = {row.row_id: states.read_states(run.folder / contracts.states_path(row.row_id)) for row in rows}
        for path in run.folder.glob("??/*"):
            path.unlink()
        again = run.extract(capsys, port, *more)
    assert again[0] == 0, again[1].get("error")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in rows:
        with torch.no_grad():
            output = reference(torch.tensor([row.input_ids]), output_hidden_states=True, use_cache=False)
        second = states.read_states(run.folder / contracts.states_path(row.row_id))
        for read in (first[row.row_id], second):
            assert read.token_ids.tolist() == row.input_ids
            for slot, layer in enumerate(SMOL_LAYERS[:-1]):
                expected = output.hidden_states[layer][0]
                error = (read.aux[:, slot].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
                assert error.median() < 0.05, (layer, error.median())
