"""Training and serving mean the same: a drafter taught five replies drafts them, in vLLM, nearly without a miss.

Whatever one of them gets wrong (a shift, a norm, a rope, a layer id, an offset of the vocabulary) shows as a miss.
"""

import json
import time
import urllib.request

import pytest
import torch
import yaml
from conftest import CPU_CONFIG, free_port
from safetensors.torch import load_file

from drafter import checkpoint, config, contracts, decoding, export, server, states
from tests import captured

QUESTIONS = (
    "Why is the sky blue?",
    "Write two sentences about the sea.",
    "How do I boil an egg?",
    "Name the planets of the solar system.",
    "What is a prime number?",
)
TOKENS = 32


def ask(url: str, messages: list[dict]) -> dict:
    body = {
        "model": "smollm2",
        "messages": messages,
        "temperature": 0,
        "max_tokens": TOKENS,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def counters(url: str) -> decoding.Counters:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return decoding.read_counters(reply.read().decode())[1]


@torch.no_grad()
def states_of(model, ids: list[int]) -> torch.Tensor:
    """[T, 4, H] by definition: the inputs of layers 2, 15 and 27, and what goes into the final norm."""
    kept = {}
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.update(final=inputs[0][0]))
    hidden = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([hidden[i][0] for i in (2, 15, 27)] + [kept["final"]], 1).bfloat16().contiguous()


@pytest.mark.vllm
def test_a_drafter_taught_five_replies_drafts_them(model, generate_server, tmp_path):
    from transformers import AutoModelForCausalLM

    settings = yaml.safe_load(CPU_CONFIG.read_text())
    settings["run"] = {"name": "run", "dir": str(tmp_path / "runs")}
    settings["train"] |= {
        "draft_vocab_size": 1024, "epochs": 120, "lr": 2e-3, "validation_share": 0.001, "validate_every": 1000,
        "save_every": 1000, "warmup_share": 0.1,
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    run = config.load(path, [f"servers.evaluate.url=http://127.0.0.1:{free_port()}"])

    replies, entries = {}, []
    folder = run.stage_dir("02_hidden_states")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for question in QUESTIONS:
        reply = ask(generate_server.url, [{"role": "user", "content": question}])
        replies[question] = reply["choices"][0]["token_ids"]
        ids = reply["prompt_token_ids"] + replies[question]
        row_id = contracts.content_id(question)
        place = folder / contracts.states_path(row_id)
        place.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"token_ids": torch.tensor(ids), "hidden_states": states_of(target, ids)}
        size = states.write(place, tensors, states.metadata(row_id, "smollm2", run.target.layer_ids, "bf16"))
        spans = [[len(reply["prompt_token_ids"]), len(ids)]]
        entries.append(contracts.IndexEntry(row_id, row_id, "test", len(ids), len(ids), spans, None, size))
    # The one row that validation takes is a copy of another, so that all five are learnt.
    copy = min(entries, key=lambda e: e.conv_id)
    conversation = next(f"{n:x}" for n in range(10**6) if captured.lowest(f"{n:x}", [e.conv_id for e in entries]))
    entries.append(contracts.IndexEntry(**{**copy.to_record(), "conv_id": conversation}))
    captured.write_stage(folder, entries)

    code, summary = captured.train(path)
    assert code == 0, summary
    weights, drafter_config = checkpoint.read_draft(checkpoint.best_step(run.stage_dir("04_train")))
    export.write(tmp_path / "drafter", weights, drafter_config, run.target)
    assert load_file(tmp_path / "drafter/model.safetensors")["fc.weight"].dtype == torch.bfloat16

    url = run.servers.evaluate.url
    drafts = accepted = first = same = 0
    with server.serving(run, "evaluate", tmp_path / "drafter", num_speculative_tokens=3):
        for question, expected in replies.items():
            before = counters(url)
            served = ask(url, [{"role": "user", "content": question}])["choices"][0]["token_ids"]
            if served != expected:
                continue  # verified in batches, bf16 may break a tie the other way; what follows was never taught
            time.sleep(1)  # the last step is counted after the reply is sent
            seen = counters(url).since(before)
            drafts, accepted, same = drafts + seen.drafts, accepted + seen.accepted, same + 1
            first += seen.accepted_per_position[0]
    assert same >= 2
    assert 1 + accepted / drafts > 3.3, (accepted, drafts)  # of 4; the last draft of a reply reaches past its end
    assert first > 0.9 * drafts
