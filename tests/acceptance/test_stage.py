"""Stage 06: what is measured, what is left out, what is never measured twice."""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter import config, contracts, files, stage
from drafter.acceptance import comparison, prompt_sets
from drafter.acceptance import stage as acceptance
from drafter.errors import ConfigError, ContractError, ResumableError
from drafter.export import stage as export
from drafter.serve import smoke_record
from drafter.serve.decoding import Counters, Decoded, Reply
from drafter.target import eagle3_folder
from drafter.target.head import read_verifier
from drafter.train import new_drafter
from tests.conftest import CPU_CONFIG, free_port
from tests.tiny_models import make_drafter

PROMPTS, TOKENS = 24, 24


QUESTIONS = [f"Count from {number} to {number + 40}, with commas between." for number in range(PROMPTS)]
COMMA, NEVER = 28, 40000  # SmolLM2's token ids: a common one, and one that no answer has
WIDTH = 192  # divides by 64, as vLLM pads, and by three ranks, as the target's 9 heads do


def one_word_drafter(model: Path, folder: Path, token: int) -> Path:
    """A drafter for SmolLM2 that always says `token`: its state is zero, so the first of its vocabulary wins."""
    target = config.load(CPU_CONFIG).target
    vocabulary = torch.arange(token, token + WIDTH)
    settings = new_drafter.first_config(target, WIDTH, WIDTH)
    weights = new_drafter.first_weights(settings, read_verifier(model), vocabulary, seed=0)
    for silent in ("fc.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        weights[silent].zero_()
    export.write_drafter(folder, weights, settings, target)
    return folder


def one_word_length(run: config.Config, drafter: str, word: int) -> float:
    """The acceptance length, counted over its answers, of a drafter that says `word` three times a step."""
    steps = accepted = 0
    for unit in (unit for unit in units(run) if unit.drafter == drafter):
        for reply in acceptance.read_result(the_stage(run), unit).replies:
            ids = reply.token_ids[1:]  # the first token comes from the prompt, without a draft
            while ids:
                right = next((i for i, token in enumerate(ids[:3]) if token != word), min(3, len(ids)))
                steps, accepted, ids = steps + 1, accepted + right, ids[right + 1 :]
    return 1 + accepted / steps


def held_out(run: config.Config) -> None:
    path = run.stage_dir("01b_synthetic") / "held_out.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    questions = [[{"role": "user", "content": question}] for question in QUESTIONS]
    records = [
        {"conv_id": contracts.conv_id(messages), "source": "t", "messages": messages, "tools": None}
        for messages in questions
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(tmp_path: Path, drafter: Path, *overrides: str) -> config.Config:
    """A run whose export is `drafter` and whose warm start is the same."""
    run = config.load(
        CPU_CONFIG,
        [
            f"run.dir={tmp_path}",
            "run.name=r",
            f"train.warm_start={drafter}",
            "train.draft_vocab_size=null",
            f"servers.evaluate.url=http://127.0.0.1:{free_port()}",
            "acceptance.drafters=[none, warm_start, run]",
            "acceptance.cells=[{concurrency: 8, temperature: 0}]",
            f"acceptance.max_prompts={PROMPTS}",
            f"acceptance.max_tokens={TOKENS}",
            *overrides,
        ],
    )
    held_out(run)
    if not export.drafter_folder(run).exists():
        weights, settings = eagle3_folder.read_drafter(drafter)
        export.write_drafter(export.drafter_folder(run), weights, settings, run.target, drafter)
        facts = {
            "question": {},
            "facts": {"identity": eagle3_folder.fingerprint(export.drafter_folder(run))},
            "versions": {},
        }
        files.write_json(run.stage_dir("05_export") / "manifest.json", facts)
    return run


def the_stage(run: config.Config, name: str = "06_acceptance") -> stage.Stage:
    return stage.Stage(name, run, argparse.Namespace(limit=None, dry_run=False))


def units(run: config.Config) -> list[comparison.Measurement]:
    return acceptance.list_units(run, acceptance.find_drafters(run), prompt_sets.read_prompt_sets(run))


def fake_result(skipped: int = 0) -> dict:
    replies = [Reply(f"c{n}", [1, 2, 3], [1, 2], "stop", 1.0, 0.1, False) for n in range(30)]
    return Decoded(replies, Counters(30, 90, 30, [30, 0, 0]), 5.0, {}, skipped).to_record()


def store(run: config.Config, unit: comparison.Measurement, record: dict) -> None:
    path = acceptance.result_path(the_stage(run), unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, record)


@pytest.fixture
def drafter(model, tmp_path) -> Path:
    return make_drafter(model, tmp_path / "random", draft_vocab_size=4096)


def test_a_unit_is_known_by_everything_it_depends_on(tmp_path, drafter, monkeypatch):
    """Another temperature, draft length, token limit, prompt, weight or server is another measurement."""
    run = make_run(tmp_path, drafter)
    drafters = acceptance.find_drafters(run)

    def keys(run: config.Config) -> set[str]:
        return {unit.key for unit in acceptance.list_units(run, drafters, prompt_sets.read_prompt_sets(run))}

    base = keys(run)
    assert len(base) == 3
    for change in (
        "acceptance.cells=[{concurrency: 8, temperature: 0.5}]",
        "acceptance.cells=[{concurrency: 4, temperature: 0}]",
        "acceptance.max_tokens=25",
        "generate.top_p=0.9",
        f"acceptance.max_prompts={PROMPTS - 1}",
        "servers.evaluate.args.dtype=bfloat16",
    ):
        assert base.isdisjoint(keys(make_run(tmp_path, drafter, change))), change
    with monkeypatch.context() as other_engine:
        other_engine.setattr(smoke_record, "versions", lambda: {"vllm": "0.0.1"})
        assert base.isdisjoint(keys(run)), "speeds of two engines are never compared with each other"
    longer = {
        u.key
        for u in units(make_run(tmp_path, drafter, "acceptance.cells=[{temperature: 0, num_speculative_tokens: 4}]"))
    }
    assert len(base & longer) == 1  # decoding without a drafter has no draft length
    other = make_drafter(config.load(CPU_CONFIG).target.model, tmp_path / "other", 4096, seed=9)
    changed = {unit.key for unit in units(make_run(tmp_path, drafter, f"acceptance.drafters=[none, {other}, run]"))}
    assert len(base & changed) == 2


def test_the_same_weights_under_two_names_are_measured_twice(tmp_path, drafter):
    """That is what makes an A/A comparison."""
    run = make_run(tmp_path, drafter)
    assert [unit.drafter for unit in units(run)] == ["none", "warm_start", "run"]


def test_the_first_cell_of_every_drafter_comes_before_the_second_of_any(tmp_path, drafter):
    cells = "[{concurrency: 8}, {concurrency: 1}, {concurrency: 8, num_speculative_tokens: 5}]"
    planned = [
        (u.drafter, u.concurrency, u.num_speculative_tokens)
        for u in units(make_run(tmp_path, drafter, f"acceptance.cells={cells}"))
    ]
    assert planned == [
        ("none", 8, 0), ("warm_start", 8, 3), ("run", 8, 3),
        ("none", 1, 0), ("warm_start", 1, 3), ("run", 1, 3),
        ("warm_start", 8, 5), ("run", 8, 5),
    ]  # fmt: skip


def test_a_run_from_scratch_passes_over_the_warm_start(tmp_path, drafter):
    run = make_run(tmp_path, drafter)
    scratch = run.model_copy(update={"train": run.train.model_copy(update={"warm_start": None})})
    assert list(acceptance.find_drafters(scratch)) == ["none", "run"]


def test_a_folder_that_is_no_drafter_is_refused_before_any_server_starts(tmp_path, drafter):
    """X02: 06 does not serve what 05 would refuse."""
    run = make_run(tmp_path, drafter, f"acceptance.drafters=[none, {tmp_path / 'nowhere'}]")
    with pytest.raises(ConfigError, match="no drafter at"):
        acceptance.run(the_stage(run))
    weights, settings = eagle3_folder.read_drafter(drafter)
    del weights["lm_head.weight"]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / eagle3_folder.CONFIG).write_text(json.dumps(settings))
    save_file(weights, broken / eagle3_folder.WEIGHTS)
    run = make_run(tmp_path, drafter, f"acceptance.drafters=[none, {broken}]")
    with pytest.raises(ContractError, match="lm_head.weight is missing"):
        acceptance.run(the_stage(run))
    assert not (run.stage_dir("06_acceptance") / "units").exists()


def test_sampling_is_sent_in_full_and_the_seed_is_the_prompts(tmp_path, drafter):
    """G23: a server takes what is not said from the model's generation_config.json."""
    run = make_run(tmp_path, drafter, "target.chat_template_kwargs={thinking: true}")
    record = prompt_sets.read_prompt_sets(run)["held_out"][0]
    body = acceptance.chat_body(run, acceptance.cell_settings(run, 0.0), record)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"):
        assert isinstance(body[name], int | float), name
    assert body["chat_template_kwargs"] == {"thinking": True}
    assert body["return_token_ids"] is True
    assert body == acceptance.chat_body(run, acceptance.cell_settings(run, 0.0), record)


def test_what_is_measured_is_not_measured_again(tmp_path, drafter):
    """No server is there to be started, so anything but the stored results would fail."""
    run = make_run(tmp_path, drafter, "servers.evaluate.kind=external")
    for unit in units(run):
        store(run, unit, fake_result())
    assert acceptance.dry_run(the_stage(run))["pending"] == 1  # the summary is not written yet
    summary = acceptance.run(the_stage(run))
    assert (summary["status"], summary["out"]) == ("complete", 3)
    assert acceptance.dry_run(the_stage(run))["pending"] == 0
    report = json.loads((run.stage_dir("06_acceptance") / "acceptance.json").read_text())
    assert [m["drafter"] for m in report["measurements"]] == ["none", "warm_start", "run"]
    assert report["prompt_sets"][0]["prompts"] == PROMPTS
    assert report["prompt_sets"][0]["identity"] == prompt_sets.prompts_fingerprint(
        prompt_sets.read_prompt_sets(run)["held_out"]
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", "edited"])
def test_a_damaged_summary_is_written_again_from_the_results(tmp_path, drafter, content):
    run = make_run(tmp_path, drafter, "servers.evaluate.kind=external")
    for unit in units(run):
        store(run, unit, fake_result())
    acceptance.run(the_stage(run))
    path = run.stage_dir("06_acceptance") / "acceptance.json"
    written = path.read_bytes()
    if content == "edited":
        content = written.replace(b'"acceptance_length": 2.0', b'"acceptance_length": 3.0')
        assert content != written
    path.write_bytes(content)
    assert acceptance.dry_run(the_stage(run))["pending"] == 1
    acceptance.run(the_stage(run))
    assert path.read_bytes() == written and acceptance.dry_run(the_stage(run))["pending"] == 0


def test_what_the_budget_cut_short_is_pending_and_said(tmp_path, drafter):
    run = make_run(tmp_path, drafter, "servers.evaluate.kind=external", "acceptance.drafters=[warm_start, run]")
    first, second = units(run)
    store(run, first, fake_result())
    store(run, second, fake_result(skipped=4))
    assert acceptance.dry_run(the_stage(run))["pending"] == 1
    with pytest.raises(ConfigError, match="servers.evaluate.kind"):
        acceptance.run(the_stage(run))


def test_a_budget_that_allows_nothing_is_resumable_and_not_a_success(tmp_path, drafter):
    run = make_run(tmp_path, drafter, "acceptance.budget_minutes=1e-9")
    with pytest.raises(ResumableError, match="budget_minutes"):
        acceptance.run(the_stage(run))


def test_the_budget_runs_only_while_a_server_is_ready(tmp_path, drafter, monkeypatch):
    """Two boots of 22 minutes took 44 of 90 minutes, and longer ones left nothing to measure in."""
    run = make_run(tmp_path, drafter, "acceptance.drafters=[warm_start, run]", "acceptance.budget_minutes=10")
    now, allowed = [0.0], []
    monkeypatch.setattr(acceptance.time, "monotonic", lambda: now[0])

    @contextlib.contextmanager
    def serving(*_):
        now[0] += 3600
        yield

    def decode_prompts(_config, _settings, _records, _concurrency, until, _advance):
        allowed.append(until - now[0])
        now[0] += 60
        return Decoded.from_record(fake_result())

    monkeypatch.setattr(acceptance.roles, "serving", serving)
    monkeypatch.setattr(acceptance, "decode_prompts", decode_prompts)
    monkeypatch.setattr(acceptance, "check_result", lambda *_: None)
    acceptance.measure_units(
        the_stage(run), acceptance.find_drafters(run), prompt_sets.read_prompt_sets(run), units(run)
    )
    assert allowed == [300, 540], "half of it, then what the first has left"


def test_a_server_that_refuses_everything_or_counts_nothing_is_not_measured():
    unit = comparison.Measurement("run", "s", 8, 3, 0.0, "key")
    silent = Decoded([], Counters(), 1.0, {"c": "400: min_p"}, 0)
    with pytest.raises(ConfigError, match="refused every prompt of s: 400: min_p"):
        acceptance.check_result(unit, silent)
    uncounted = Decoded([Reply("c", [1], [1], "stop", 1.0, 0.1, False)], Counters(), 1.0, {}, 0)
    with pytest.raises(ConfigError, match="disable-log-stats"):
        acceptance.check_result(unit, uncounted)


def test_a_broken_result_is_named(tmp_path, drafter):
    run = make_run(tmp_path, drafter)
    unit = units(run)[0]
    store(run, unit, {"replies": []})
    with pytest.raises(ContractError, match=f"{unit.key}.json is broken"):
        acceptance.run(the_stage(run))


def test_a_result_that_was_changed_is_named(tmp_path, drafter, monkeypatch):
    run = make_run(tmp_path, drafter)
    monkeypatch.setattr(acceptance.roles, "serving", lambda *_: contextlib.nullcontext())
    measured = Decoded.from_record(fake_result())
    monkeypatch.setattr(acceptance, "decode_prompts", lambda *_: measured)
    acceptance.run(the_stage(run))
    unit = units(run)[1]
    path = acceptance.result_path(the_stage(run), unit)
    assert acceptance.read_result(the_stage(run), unit) == measured
    path.write_text(path.read_text().replace('"accepted": 30', '"accepted": 80'))
    with pytest.raises(ContractError, match=f"{unit.key}.json is broken .*checksum.*; remove it to measure again"):
        acceptance.run(the_stage(run))


def permuted_head(tensors):
    return tensors | {"lm_head.weight": tensors["lm_head.weight"].flip(0).contiguous()}


def random_norm(tensors):
    return tensors | {"norm.weight": torch.rand_like(tensors["norm.weight"].float()).to(tensors["norm.weight"].dtype)}


@pytest.mark.parametrize("change", [permuted_head, random_norm])
def test_only_what_stage_05_exported_is_measured_as_the_run(tmp_path, drafter, change):
    """Seam F6: whatever lay in 05_export/model was served, under the run's name."""
    run = make_run(tmp_path, drafter)
    assert acceptance.find_drafters(run)["run"] == export.drafter_folder(run)
    weights = export.drafter_folder(run) / eagle3_folder.WEIGHTS
    save_file(change(eagle3_folder.read_drafter(export.drafter_folder(run))[0]), weights)
    with pytest.raises(ContractError, match="is not the drafter that stage 05 exported.*05_export_checkpoint.py"):
        acceptance.find_drafters(run)
    assert "stage 05 exported" in acceptance.dry_run(the_stage(run))["findings"][0]


def test_what_training_expected_lies_beside_what_was_served(tmp_path, drafter):
    """Seam F6"""
    run = make_run(tmp_path, drafter)
    for unit in units(run):
        store(run, unit, fake_result())
    facts = {"expected_acceptance": 1.3, "expected_acceptance_before": 1.1}
    files.write_json(run.stage_dir("04_train") / "manifest.json", {"question": {}, "facts": facts})
    acceptance.run(the_stage(run))
    report = json.loads((run.stage_dir("06_acceptance") / "acceptance.json").read_text())
    assert report["expected"] == {"run": 1.3, "warm_start": 1.1}
    other = run.model_copy(update={"train": run.train.model_copy(update={"ttt_steps": 2})})
    assert acceptance.expected_lengths(other) == {}  # a length of other drafts


def test_drafters_of_one_folder_name_have_logs_of_their_own():
    """Seam L13"""
    names = {acceptance._short(label) for label in ("a/model", "b/model", "/b/model", "run", "warm_start", "none")}
    assert len(names) == 6 and not any("/" in name for name in names)
    assert {"run", "warm_start", "none"} < names


def test_a_dry_run_says_what_is_missing(tmp_path, drafter):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "run.name=new"])
    plan = acceptance.dry_run(the_stage(run))
    assert plan["pending"] == 2
    assert "held_out.jsonl is missing" in plan["findings"][0]


@pytest.mark.parametrize("name", ["grid", "published"])
def test_the_shipped_settings_lie_over_any_config(name):
    overlay = f"acceptance=@configs/acceptance/{name}.yaml"
    for path in sorted((config.ROOT / "configs").glob("*.yaml")):
        loaded = config.load(path, [overlay])
        assert loaded.acceptance.drafters == ("none", "warm_start", "run")
        assert config.load(path).target == loaded.target


def script(name: str, run: config.Config, tmp_path: Path, *arguments: str) -> tuple[int, dict, str]:
    path = tmp_path / "resolved.yaml"
    path.write_text(run.dump())
    line = [sys.executable, str(config.ROOT / name), "--config", str(path), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_warm_start_is_smoke_tested_once_for_all_runs(tmp_path, drafter, monkeypatch):
    """X02, X09: its number on this target is kept; other weights, or another engine's arguments, pass it anew."""
    run = make_run(tmp_path, drafter, "run.name=before", "train.draft_vocab_size=null")
    shutil.rmtree(export.drafter_folder(run))
    decoded = Decoded.from_record(fake_result())
    monkeypatch.setattr(acceptance.roles, "serving", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(acceptance, "decode_prompts", lambda *_: decoded)

    def pending(*overrides: str) -> int:
        return acceptance.dry_run_smoke(the_stage(make_run(tmp_path, drafter, *overrides), "05_export"))["pending"]

    assert pending() == 1
    assert acceptance.smoke_test(the_stage(run, "05_export"))["smoke"] == {"warm_start": 2.0}
    assert json.loads((tmp_path / smoke_record.NAME).read_text()).popitem()[1]["length"] == 2.0
    assert smoke_record.find(run).length == 2.0
    assert pending() == pending("run.name=another") == 0
    assert pending("servers.evaluate.args.max-num-seqs=2") == 1
    other = make_drafter(run.target.model, tmp_path / "other", 4096, seed=9)
    assert pending(f"train.warm_start={other}") == 1
    assert pending("train.warm_start=null") == 0


@pytest.mark.vllm
def test_an_a_a_comparison_served_by_vllm(tmp_path, model):
    """X05: it loads. The same weights as warm start and as run: real counters, streams that match, no verdict."""
    comma = one_word_drafter(model, tmp_path / "comma", COMMA)
    run = make_run(tmp_path, comma, f"target.think_end={COMMA}")  # here a comma ends the reasoning
    code, summary, talk = script("06_measure_acceptance.py", run, tmp_path)
    assert code == 0, talk
    assert summary["facts"]["verdict"] == "no difference shown"
    assert summary["facts"]["recommended"] == "warm_start"
    report = json.loads((run.stage_dir("06_acceptance") / "acceptance.json").read_text())
    none, warm, ours = report["measurements"]
    for m in (warm, ours):
        assert m["streams_agree"]
        assert 1 < m["low"] <= m["acceptance_length"] <= m["high"] < 4
        assert m["acceptance_length"] == pytest.approx(one_word_length(run, m["drafter"], COMMA), abs=0.01)
        assert len(m["per_position"]) == 3
        assert m["acceptance_length"] == pytest.approx(1 + sum(m["per_position"]))
        assert m["reasoning_length"] or m["answer_length"]
        assert m["speed_up"] == pytest.approx(m["tokens_per_second"] / none["tokens_per_second"])
    assert none["output_tokens"] > 0
    greedy = {row["drafter"]: row for row in report["greedy_agreement"]}
    assert greedy["run"]["equal_tokens"] > 0.5  # the same model, up to what batching does to sums
    assert f"{ours['acceptance_length']:.3f}" in (export.drafter_folder(run) / "README.md").read_text()

    again, summary, talk = script("06_measure_acceptance.py", run, tmp_path)
    assert (again, summary["out"]) == (0, 3)
    assert "every measurement has a result already" in talk


@pytest.mark.vllm
def test_smoke_refuses_a_drafter_that_nothing_is_accepted_from(tmp_path, model):
    """X02, X04: it loads, the server answers 200, and its acceptance length is 1.00."""
    useless = one_word_drafter(model, tmp_path / "useless", NEVER)
    run = make_run(tmp_path, useless)
    code, summary, _talk = script("05_export_checkpoint.py", run, tmp_path, "--smoke")
    assert code == 1
    assert "accepts only 0 of its" in summary["error"]
    assert str(useless) in summary["error"]
