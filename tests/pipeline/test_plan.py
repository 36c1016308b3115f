"""The plan reproduces what the box measured, says where a rate comes from, and proposes what fits."""

import dataclasses
import json
import os
import re
import signal
from datetime import datetime

import pytest

from drafter import config, disk, locks
from drafter.errors import ConfigError
from drafter.pipeline import command, disk_rate, kv_room, plan, rate_probe, rates, smallest_difference
from drafter.pipeline import run as pipeline
from drafter.serve import boot_times
from tests.conftest import CPU_CONFIG

BOX, RENTED = "rtx_pro_6000_x8", "b300_x8"
HOUR = 3600


@pytest.fixture
def kimi(tmp_path) -> config.Config:
    return config.load(config.ROOT / "configs/kimi_k25.yaml", [f"run.dir={tmp_path}"])


def stages(kimi, name, rows=10_000, tokens=4096):
    """Estimates of 01b, 02 and 04 with rows of known length, the generate role already up."""
    platform = rates.profile(name)
    known = rates.of_profile(kimi, platform)
    of_length = rates.Range.point(tokens)
    known = plan.dataclasses.replace(known, answer_tokens=of_length, row_tokens=of_length)
    return plan.estimate(kimi, known, plan.sizes(kimi, platform), rows + kimi.acceptance.held_out)[:3]


def test_ten_thousand_rows_on_the_box_are_what_the_team_measured(kimi):
    generate, extract, train = stages(kimi, BOX)
    assert generate.seconds.typical / HOUR == pytest.approx(5.4, rel=0.1)
    assert extract.seconds.typical / HOUR == pytest.approx(3.8, rel=0.1)
    assert train.seconds.typical / HOUR == pytest.approx(2.3, rel=0.1)
    assert extract.start_seconds.typical == 22 * 60
    whole = generate.seconds + extract.seconds + extract.start_seconds + train.seconds
    assert whole.typical / HOUR == pytest.approx(12, rel=0.1)


@pytest.mark.parametrize(("rows", "tib"), [(10_000, 2.14), (50_000, 10.7), (100_000, 21.4)])
def test_states_take_the_known_space(kimi, rows, tib):
    assert stages(kimi, BOX, rows)[1].bytes / 2**40 == pytest.approx(tib, rel=0.01)


def test_a_row_of_16384_tokens_is_just_under_a_gigabyte(kimi):
    long = config.load(config.ROOT / "configs/kimi_k25.yaml", ["target.max_seq_len=16384"])
    assert stages(long, BOX, 1, 16384)[1].bytes == pytest.approx(0.94e9, rel=0.01)


def test_rented_gpus_take_two_to_three_hours_and_60_to_150_dollars(kimi):
    generate, extract, train = stages(kimi, RENTED)
    whole = generate.seconds + extract.seconds + extract.start_seconds + train.seconds
    assert 2 * 0.9 <= whole.low / HOUR <= whole.typical / HOUR <= 3 * 1.1
    low, _, high, _ = plan.dollars(whole, rates.profile(RENTED).usd_per_hour).split()
    assert 60 * 0.9 <= int(low) < int(high) <= 150 * 1.1


def test_moving_two_terabytes_costs_more_in_idle_gpus_than_the_whole_training(kimi):
    seconds, price = plan.moving(2e12), rates.profile(RENTED).usd_per_hour
    assert seconds.low / HOUR * price.low == pytest.approx(42, rel=0.1)
    assert seconds.high / HOUR * price.high == pytest.approx(350, rel=0.1)


def test_fp8_states_take_less_than_two_thirds_and_the_teacher_stays_bf16(kimi):
    compact = config.load(config.ROOT / "configs/kimi_k25.yaml", ["extract.dtype=fp8"])
    platform = rates.profile(BOX)
    assert plan.sizes(kimi, platform).state_bytes_per_token == 57_344
    assert plan.sizes(compact, platform).state_bytes_per_token == 3 * (7168 + 4) + 2 * 7168


def test_measured_rates_of_this_machine_win_and_the_plan_names_the_run(tmp_path, model):
    run_config = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "run.name=next"])
    folder = tmp_path / "earlier/01b_synthetic"
    folder.mkdir(parents=True)
    facts = {"generation": {"output_tokens_per_second": 123.0}, "rows": {"all": {"mean_tokens": 77.0}}}
    (folder / "manifest.json").write_text(json.dumps({"status": "complete", "seconds": 9, "facts": facts}))
    (folder / "config.yaml").write_text(run_config.dump())
    known = rates.measured_or(run_config, rates.profile("cpu_2cores"))
    assert (known.generate.typical, known.answer_tokens.typical) == (123.0, 77.0)
    text = plan.show(run_config, None, None, None)
    assert "123 tok/s (98 to 154), measured in run earlier" in text
    assert "profile 2 CPU cores" in text, "what nobody measured is the profile's, and says so"

    other = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "target.model=models/other"])
    assert rates.measured_or(other, rates.profile("cpu_2cores")).generate.typical != 123.0


def test_a_probe_measures_unmeasured_rates_and_keeps_only_its_manifests(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers
    asked = []

    def run(self) -> int:
        asked.append(
            (self.config.run.name, self.config.train.epochs, [step.number for step in self.steps], self.limit)
        )
        facts = {"generation": {"output_tokens_per_second": 50.0}, "rows": {"all": {"mean_tokens": 90.0}}}
        facts |= {"tokens_per_second": 400.0, "tokens": 1300}
        boot_times.record(self.config, "generate", 30)
        for step in self.steps:
            folder = self.config.stage_dir(step.stage)
            (folder / "ab").mkdir(parents=True)
            (folder / "ab/row.safetensors").write_text("large")
            manifest = {"status": "complete", "seconds": 9, "out": 10, "facts": facts}
            (folder / "manifest.json").write_text(json.dumps(manifest))
            (folder / "config.yaml").write_text(self.config.dump())
        return 0

    monkeypatch.setattr(pipeline.Pipeline, "run", run)
    call = [str(CPU_CONFIG), "--set", f"run.dir={tmp_path}", "--plan"]
    assert command.main(call) == 0 and not asked
    assert "--plan --probe" in capsys.readouterr().out
    for _ in range(2):  # the second time there is nothing to measure
        assert command.main([*call, "--probe"]) == 0
    assert asked == [("smollm2_cpu-probe", 1, ["01b", "02", "04"], 64)]
    text = capsys.readouterr().out
    assert "generate: 50 tok/s" in text and "train: 400 tok/s" in text and "profile" not in text
    assert "an answer: 90 tokens" in text and "a row: 130 tokens" in text
    assert text.count("measured in run smollm2_cpu-probe") == 10
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"manifest.json", "config.yaml", ".lock", boot_times.NAME}


def test_a_probe_keeps_what_it_takes_from_another_run(tmp_path, model, monkeypatch):
    """Its clearing up once reached into the other run's folder."""
    other = tmp_path / "other/01b_synthetic"
    other.mkdir(parents=True)
    for name in ("manifest.json", "shard-00000.jsonl", "prompts.jsonl"):
        (other / name).write_text("{}")
    overrides = [f"run.dir={tmp_path / 'runs'}", f"run.take={{01b_synthetic: {other}}}"]

    def run(self) -> int:
        for step in self.steps[1:]:
            (self.config.stage_dir(step.stage)).mkdir(parents=True)
        return 0

    monkeypatch.setattr(pipeline.Pipeline, "run", run)
    rate_probe.measure(config.load(CPU_CONFIG, overrides))
    assert len(list(other.iterdir())) == 3


def test_a_probe_never_takes_the_machine_from_its_own_run(tmp_path, model):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    with locks.locked(run.run_dir), pytest.raises(ConfigError, match="another process is working"):
        rate_probe.measure(run)


def test_the_page_shows_every_count_the_finish_and_what_does_not_fit(kimi, monkeypatch):
    monkeypatch.setattr(plan.files, "free_bytes", lambda _: 3e12)
    now = datetime(2026, 11, 29, 19, 0)
    text = plan.page(kimi, rates.profile(BOX), now, done_by=plan.next_time("13:30", now))
    # 2.35 TB less the 200 conversations that are held out
    for count in ("5,000", "10,000", "25,000", "50,000", "100,000"):
        assert f"\n{count} " in text
    assert "9,800 rows on 8x RTX PRO 6000 (PCIe); 200 of 10,000 conversations are held out" in text
    assert "done Mon 12:" in text
    assert "2.30 TB" in text and "lacks" in text and "h late" in text
    assert "proposal: 10,000 conversations, max_seq_len 8192, bf16" in text
    assert "8x B300" in text and "USD" in text
    assert "prompts: open-perfectblend, 10,000 conversations of mlabonne/open-perfectblend" in text


def test_no_more_rows_are_proposed_than_the_sources_hold(tmp_path, model):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "extract.reserve_gb=0"])
    text = plan.show(run, None, None, None)
    held = 101
    assert f"prompts: sample holds {held} conversations" in text
    assert f"proposal: {held} conversations, max_seq_len 512" in text
    verdicts = {line.split()[0]: line for line in text.splitlines() if re.match(r"[\d,]+ +[\d.]+ ", line)}
    assert list(verdicts) == [f"{held}", "5,000", "10,000", "25,000", "50,000", "100,000"]
    assert all(f"lacks {int(n.replace(',', '')) - held:,} more prompts" in verdicts[n] for n in list(verdicts)[1:])
    assert "more prompts" not in verdicts[f"{held}"]
    fewer = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "prompts.0.count=50", "extract.reserve_gb=0"])
    text = plan.show(fewer, None, None, None)
    assert "conversations, of which 50 are drawn" in text and f"proposal: {held} conversations" in text


def test_a_small_disk_asks_for_fp8_and_a_smaller_one_for_fewer_rows(kimi, monkeypatch):
    platform = rates.profile(BOX)
    known = rates.of_profile(kimi, platform)
    for terabytes, proposed in (
        (2.0, "10,000 conversations, max_seq_len 8192, fp8"),
        (0.9, "5,000 conversations, max_seq_len 8192, fp8"),
    ):
        monkeypatch.setattr(plan.files, "free_bytes", lambda _, free=terabytes: free * 1e12)
        assert plan.proposal(kimi, known, platform, 24 * HOUR).startswith(proposed)
    monkeypatch.setattr(plan.files, "free_bytes", lambda _: 0)
    assert plan.proposal(kimi, known, platform, None).startswith("not even 500 conversations")


def test_a_deadline_is_the_next_such_hour(kimi):
    evening = datetime(2026, 11, 29, 19, 0)
    assert plan.next_time("07:00", evening) == datetime(2026, 11, 30, 7, 0)
    assert plan.next_time("23:00", evening) == datetime(2026, 11, 29, 23, 0)
    with pytest.raises(ConfigError, match="HH:MM"):
        plan.next_time("7 am", evening)


def test_a_deadline_is_what_it_is_in_the_run_the_end_of_01b(kimi):
    now = datetime(2026, 11, 29, 19, 0)
    text = plan.page(kimi, rates.profile(BOX), now, deadline=plan.next_time("01:00", now))
    rate = 2100 * kv_room.of(kimi, rates.profile(BOX)).rate
    rows = round((6 * HOUR - 2 * 22 * 60) * rate / rates.of_profile(kimi, rates.profile(BOX)).answer_tokens.typical)
    assert f"{rows:,} rows on 8x RTX PRO 6000 (PCIe), of 9,800 those answered by 01:00" in text
    assert f"deadline Mon 01:00: 01b stops there with about {rows:,} of 9,800 rows" in text
    early = plan.page(kimi, rates.profile(BOX), now, deadline=plan.next_time("07:00", now))
    assert "deadline Mon 07:00: 01b has all 9,800 rows before it, at about Mon 02:" in early


def test_the_default_run_is_what_was_measured(tmp_path, model):
    """93 rows of 172 tokens, 72 MiB of states, 76 s of training, 165 s of generation; 483 s in all, 06 being 97."""
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    platform = rates.profile("cpu_2cores")
    generate, extract, train, export, acceptance = parts = plan.estimate(
        run, rates.measured_or(run, platform), plan.sizes(run, platform), plan.conversations_asked(run)
    )
    assert extract.tokens == pytest.approx(15_987, rel=0.1)
    assert extract.bytes / 2**30 == pytest.approx(0.069, rel=0.1)
    assert train.seconds.typical == pytest.approx(76.5, rel=0.1)
    assert generate.seconds.typical == pytest.approx(165, rel=0.1)
    assert export.seconds.typical == pytest.approx(7, rel=0.2)
    assert (acceptance.seconds + acceptance.start_seconds).typical == pytest.approx(97, rel=0.1)
    assert plan.total_seconds(parts).typical == pytest.approx(483, rel=0.1)


def acceptance_of(run: config.Config):
    platform = rates.profile(rates.default_profile(run))
    return plan.estimate(run, rates.measured_or(run, platform), plan.sizes(run, platform), 101)[-1]


def test_06_never_measures_longer_than_its_budget_whatever_its_server_starts_take(tmp_path, model):
    sets = [
        f"run.dir={tmp_path}",
        "acceptance.max_tokens=4096",
        "acceptance.held_out=50",
        "acceptance.max_prompts=50",
    ]
    for minutes in (1, 3, 1000):
        part = acceptance_of(config.load(CPU_CONFIG, [*sets, f"acceptance.budget_minutes={minutes}"]))
        taken = plan.dataclasses.astuple(part.seconds)
        assert all(0 <= each <= minutes * 60 for each in taken)
        assert part.start_seconds == rates.profile("cpu_2cores").start_minutes * 60 * 2
    assert taken[1] < 1000 * 60, "a budget that is not needed is not taken"


def test_06_follows_what_it_measures(tmp_path, model):
    def seconds(*overrides):
        return acceptance_of(config.load(CPU_CONFIG, [f"run.dir={tmp_path}", *overrides])).seconds.typical

    one = seconds("acceptance.drafters=[none]")
    assert seconds() == pytest.approx(2 * one)
    lengths = [{"concurrency": 8, "num_speculative_tokens": k} for k in (2, 3)]
    assert seconds(f"acceptance.cells={json.dumps(lengths)}") == pytest.approx(3 * one), "none has no draft length"
    assert seconds("acceptance.drafters=[none, warm_start]") == pytest.approx(one), "from scratch there is none"
    assert seconds("acceptance.max_prompts=4") < one * 2


def test_06_on_one_h200_takes_what_was_measured(tmp_path):
    """Two server starts and 24 units of 40 prompts: 219 s."""
    cells = [(8, 0.7), (8, 0), (32, 0)]
    cells = [{"concurrency": concurrency, "temperature": temperature} for concurrency, temperature in cells]
    sets = [{"name": name, "hub": name, "revision": "a1", "count": 100} for name in ("a", "b", "c", "d")]
    facts = {"cells": cells, "prompts": sets, "max_tokens": 256, "max_prompts": 40}
    overrides = [f"acceptance.{key}={json.dumps(value)}" for key, value in facts.items()]
    run = config.load(config.ROOT / "configs/smollm2_gpu.yaml", [f"run.dir={tmp_path}", *overrides])
    platform = rates.profile("h200_x1")
    part = plan.estimate(run, rates.of_profile(run, platform), plan.sizes(run, platform), 4000)[-1]
    assert (part.seconds + part.start_seconds).typical == pytest.approx(219, rel=0.1)


def test_05_and_06_take_what_they_took_before_on_this_machine(tmp_path, model):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    measured = [{"concurrency": 8, "prompts": 8, "seconds": seconds} for seconds in (10.0, 30.0)]
    other_load = {"concurrency": 1, "prompts": 8, "seconds": 500.0}
    for name in ("05_export", "06_acceptance"):
        (folder := tmp_path / "earlier" / name).mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"status": "complete", "seconds": 33, "facts": {}}))
        (folder / "config.yaml").write_text(run.dump())
    (folder / "acceptance.json").write_text(json.dumps({"measurements": [*measured, other_load]}))
    known = rates.measured_or(run, rates.profile("cpu_2cores"))
    assert (known.export.typical, known.evaluate.typical) == (33, 16 / 40)
    assert known.sources["evaluate"] == known.sources["export"] == "measured in run earlier"
    assert acceptance_of(run).seconds.typical == pytest.approx(40)
    longer = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "acceptance.max_tokens=500"])
    assert rates.measured_or(longer, rates.profile("cpu_2cores")).evaluate.typical != 16 / 40


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prompts.0.path=/nowhere.jsonl", "prompts sample: /nowhere.jsonl does not exist"),
        ("prompts.0.path=/dev/null", "prompts: /dev/null is a device, not a regular file"),
        (
            "acceptance.prompts=[{name: mine, path: /nowhere.jsonl}]",
            "prompts mine: /nowhere.jsonl does not exist",
        ),
        ("acceptance.held_out=101", "acceptance.held_out takes all 101 conversations; lower it or add prompts"),
        ("target.max_seq_len=100000", "target.max_seq_len: 100000 is more than the model's 8192 positions"),
    ],
)
def test_what_a_stage_would_refuse_is_not_planned(tmp_path, model, capsys, override, said):
    assert command.main([str(CPU_CONFIG), "--plan", "--set", f"run.dir={tmp_path}", "--set", override]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"run_pipeline.sh: {said}\n"


def test_a_01b_that_is_taken_costs_nothing_and_its_prompts_are_not_asked_for(tmp_path, model):
    sets = [f"run.dir={tmp_path}", "prompts.0.path=/nowhere.jsonl", "prompts.0.count=101"]
    taking = config.load(CPU_CONFIG, [*sets, f"run.take={{01b_synthetic: {tmp_path}}}"])
    with pytest.raises(ConfigError, match="no finished 01b_synthetic in"):
        plan.show(taking, None, None, None)
    (tmp_path / "manifest.json").write_text('{"status": "complete"}')
    text = plan.show(taking, None, None, None)
    assert text.startswith("smollm2_cpu: 93 rows")
    assert re.search(r"^01b_synthetic +taken from another run$", text, re.M)
    planned = plan.to_record(taking)
    assert planned["01b_synthetic"]["seconds"]["high"] == 0 < planned["02_hidden_states"]["seconds"]["low"]


def test_a_plan_for_a_model_that_is_not_here_says_so_first(kimi, tmp_path, model):
    first, *rest = plan.show(kimi, None, None, None).splitlines()
    assert first == (f"target.model {kimi.target.model} is not here: planned as Kimi-K2.5 on 8x RTX PRO 6000 (PCIe)")
    assert not any("--probe" in line for line in rest), "there is nothing to measure it with"
    here = plan.show(config.load(CPU_CONFIG, [f"run.dir={tmp_path}"]), None, None, None)
    assert "is not here" not in here and "--probe" in here


def test_the_plan_says_when_more_conversations_are_asked_for_than_a_source_holds(tmp_path, model):
    text = plan.show(config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "prompts.0.count=500"]), None, None, None)
    assert "93 rows on" in text and "prompts: sample holds 101 conversations; 500 are asked for" in text


def test_answers_that_are_cut_are_as_long_as_measured():
    answer = rates.profile("cpu_2cores").answer_tokens.typical
    assert rates.mean_when_cut(answer, 160) == pytest.approx(122.7, rel=0.05)
    assert rates.mean_when_cut(answer, 512) == pytest.approx(221.3, rel=0.1)  # other prompts
    assert rates.mean_when_cut(rates.profile(BOX).answer_tokens.typical, 8192) == pytest.approx(4096, rel=0.01)


def test_the_first_night_of_a_warm_start_begins_with_its_trial(kimi, tmp_path):
    """X02: two server starts of 22 minutes, the second being that of 01b."""
    now = datetime(2026, 11, 29, 19, 0)
    text = plan.page(kimi, rates.profile(BOX), now)
    assert "smoke-tests the untrained warm start: 45.0 min" in text
    assert plan.to_record(kimi)[plan.SMOKE_TEST]["seconds"]["typical"] == 22 * 60 + 60
    without = config.load(config.ROOT / "configs/kimi_k25.yaml", [f"run.dir={tmp_path}", "acceptance.smoke=false"])
    assert "warm start" not in plan.page(without, rates.profile(BOX), now)


def test_no_figure_that_the_config_takes_is_too_much_for_the_plan(kimi):
    """Years are said as years; what is beyond a slip of the hand, the config refuses."""
    most = [f"{key}={config.MAX_COUNT}" for key in ("generate.max_tokens", "prompts.0.count")]
    most.append("train.epochs=10000")
    endless = config.load(config.ROOT / "configs/kimi_k25.yaml", most)
    assert " years, at the latest in " in plan.page(endless, rates.profile(BOX), datetime(2026, 11, 29))
    now = datetime(2026, 11, 29, 19, 0)
    assert plan.clock(now, 12 * HOUR) == "Mon 07:00" and plan.clock(now, 240 * HOUR) == "2026-12-09"


@pytest.mark.parametrize("key", ["train.epochs", "prompts.0.count", "run.seed", "servers.generate.start_minutes"])
def test_an_absurd_figure_is_refused_in_one_line(key):
    with pytest.raises(ConfigError, match=f"{key}: Input should be less than or equal to") as error:
        config.load(CPU_CONFIG, [f"{key}={10**20}"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("gpus", "hidden", "chosen", "said"),
    [
        (["NVIDIA RTX PRO 6000 Blackwell Server Edition"] * 8, 7168, "rtx_pro_6000_x8", None),
        (["NVIDIA B300 SXM6 AC"] * 8, 7168, "b300_x8", None),
        (["NVIDIA H200"], 576, "h200_x1", None),
        (["NVIDIA H200"] * 2, 576, "h200_x1", None),
        (["NVIDIA H200"] * 8, 7168, "rtx_pro_6000_x8", "unknown machine (8x NVIDIA H200, hidden size 7168)"),
        (["NVIDIA A100-SXM4-40GB"], 576, "h200_x1", "unknown machine (1x NVIDIA A100-SXM4-40GB, hidden size 576)"),
        ([], 5120, "rtx_pro_6000_x8", "unknown machine (no NVIDIA GPU, hidden size 5120)"),
        ([], 576, "cpu_2cores", None),
    ],
)
def test_the_profile_is_that_of_the_gpus_or_the_page_says_that_none_is(
    tmp_path, model, monkeypatch, gpus, hidden, chosen, said
):
    """Seam L9: any model wider than 4,096 was planned as 8x RTX PRO 6000, whatever the machine."""
    (tmp_path / "names").write_text("".join(f"{name}\n" for name in gpus))
    monkeypatch.setenv("GPU_STATE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{config.ROOT / 'tests/scripts'}:{os.environ['PATH']}")
    target = tmp_path / "target"
    target.mkdir()
    facts = json.loads((model / "config.json").read_text()) | {"hidden_size": hidden}
    (target / "config.json").write_text(json.dumps(facts))
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", f"target.model={target}"])
    assert rates.default_profile(run) == chosen
    first = plan.page(run, rates.profile(chosen), datetime(2026, 11, 29)).splitlines()[0]
    assert (first.partition(": planned as ")[0] == said) if said else "unknown machine" not in first


@pytest.mark.parametrize("content", ["", "run:", "target: {model: 5}", "[", "- a", "run: {keep: 5}", "\0", "@"])
def test_a_broken_config_beside_another_runs_manifest_is_passed_over(tmp_path, model, content):
    """Seam L2: an empty or half config.yaml of any finished run below run.dir ended each --plan in a TypeError."""
    (folder := tmp_path / "earlier/04_train").mkdir(parents=True)
    facts = {"status": "complete", "seconds": 33, "facts": {"tokens_per_second": 7}}
    (folder / "manifest.json").write_text(json.dumps(facts))
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    (folder / "config.yaml").write_text(run.dump())
    assert rates.measured_or(run, rates.profile("cpu_2cores")).train.typical == 7
    (folder / "config.yaml").write_text(content)
    assert rates.measured_or(run, rates.profile("cpu_2cores")).sources["train"].startswith("profile")
    assert [each.why for each in disk.survey(run)] == ["its config.yaml cannot be read"]


def test_every_profile_reads_and_an_unknown_one_names_the_others():
    for name in rates.profiles():
        known = rates.profile(name)
        assert (
            known.generate_tokens_per_s.low <= known.generate_tokens_per_s.typical <= known.generate_tokens_per_s.high
        )
    with pytest.raises(ConfigError, match="choose from b300_x8"):
        rates.profile("laptop")


def training(kimi, disk=None, *overrides):
    """Seconds of 04 on the box for 10,000 rows of 4,096 tokens, with such a disk."""
    run = config.load(config.ROOT / "configs/kimi_k25.yaml", [f"run.dir={kimi.run.dir}", *overrides])
    known = dataclasses.replace(rates.of_profile(run, rates.profile(BOX)), disk=disk)
    return plan.estimate(run, known, plan.sizes(run, rates.profile(BOX)), 10_200)[2].seconds.typical


def test_04_takes_as_long_as_its_disk_where_that_is_slower_than_its_gpu(kimi):
    """5 epochs and 25 validations of 2% read 5.4 times 10,000 x 4,096 x 57,344 bytes."""
    amount = (5 * 0.98 + 25 * 0.02) * 10_000 * 4096 * 57_344
    assert training(kimi, 0.5e9) == pytest.approx(amount / 0.5e9, rel=0.01)
    assert training(kimi, 100e9) == training(kimi)


def test_validations_of_04_are_counted_each_a_third_of_its_tokens(kimi):
    often, seldom = training(kimi, None, "train.validate_every=200"), training(kimi)
    validations = 24_500 // 200 - 24_500 // 1000
    assert (often - seldom) * 24_576 == pytest.approx(validations * 0.02 * 10_000 * 4096 / 3, rel=0.03)


def test_a_rate_of_a_whole_04_holds_its_validations_and_its_disk(kimi, tmp_path):
    (folder := tmp_path / "earlier/04_train").mkdir(parents=True)
    facts = {"status": "complete", "seconds": 33, "facts": {"tokens_per_second": 9000}}
    (folder / "manifest.json").write_text(json.dumps(facts))
    (folder / "config.yaml").write_text(kimi.dump())
    known = rates.measured_or(kimi, rates.profile(BOX))
    [part] = [
        part
        for part in plan.estimate(kimi, known, plan.sizes(kimi, rates.profile(BOX)), 10_200)
        if part.stage == "04_train"
    ]
    assert part.seconds.typical == pytest.approx(part.tokens / 9000)
    assert "04 reads" not in plan.page(kimi, rates.profile(BOX), datetime(2026, 11, 29))


def test_the_plan_says_what_the_disk_feeds_and_when_production_serves_again(kimi, monkeypatch):
    now = datetime(2026, 11, 29, 19, 0)
    text = plan.page(kimi, rates.profile(BOX), now)
    assert "done Mon 12:" in text and "vllm-kimi-k25-int4, if it was up before, serves again Mon 12:" in text
    assert "04 reads 12.4" in text and "the speed of the disk is unknown here" in text
    monkeypatch.setattr(disk_rate, "bytes_per_second", lambda _: 2.82e9)
    assert "the disk gives 2.82 GB/s: it feeds 2.0 GPUs" in plan.page(kimi, rates.profile(BOX), now)


def test_the_disks_rate_is_that_of_a_large_file_beside_the_states(kimi, tmp_path):
    large = tmp_path / "model-00001.safetensors"
    large.write_bytes(os.urandom(2**20) * 40)
    assert disk_rate.measure(large, least_bytes=0) > 0
    assert disk_rate.measure(large) is None, "too small to say anything"
    assert disk_rate.bytes_per_second(kimi) is None, "the model is not here"


def test_a_rented_machine_is_planned_with_its_own_profile(tmp_path):
    rented = config.load(config.ROOT / "configs/kimi_k25_b300.yaml", [f"run.dir={tmp_path}"])
    text = plan.page(rented, rates.profile(RENTED), datetime(2026, 11, 29, 19, 0))
    assert ": all 200 fit, which leaves 1.00 of the rate" in text and "serves again" not in text


def test_the_starts_of_earlier_servers_are_planned_with(tmp_path, model):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    for role, seconds in (("generate", 90.0), ("extract", 40.0), ("evaluate", 60.0)):
        boot_times.record(run, role, seconds)
    other = config.load(CPU_CONFIG, [f"run.dir={tmp_path}", "target.model=models/other"])
    boot_times.record(other, "generate", 5000.0)
    known = rates.measured_or(run, rates.profile("cpu_2cores"))
    assert known.start_seconds == rates.Range(40, 60, 90)
    assert "a server start: 1.0 min (0.7 to 1.5), measured at the last 3 starts" in plan.show(run, None, None, None)
    (tmp_path / boot_times.NAME).write_text("torn")
    assert rates.measured_or(run, rates.profile("cpu_2cores")).sources["start"].startswith("profile")


def test_the_difference_that_06_can_show_follows_from_the_intervals_of_an_earlier_one(tmp_path, model):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    assert smallest_difference.smallest_difference(run, 8) is None and "is unknown until" in plan.show(
        run, None, None, None
    )
    (folder := tmp_path / "earlier/06_acceptance").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"status": "complete", "seconds": 33, "facts": {}}))
    (folder / "config.yaml").write_text(run.dump())
    names = ("verdict", "recommended", "drafter", "baseline")
    figures = ("acceptance_length", "low", "high", "tokens_per_second", "speed_up")
    figures += ("difference", "difference_low", "difference_high")
    compared = {"part": "all", "low": 0.10, "high": 0.40, "prompts": 50}
    parts = [{"part": "answer", "low": 0, "high": 9, "prompts": 3}, compared]
    report = {"headline": dict.fromkeys(names, "x") | dict.fromkeys(figures, 1.0), "comparisons": parts}
    (folder / "acceptance.json").write_text(json.dumps(report | {"measurements": []}))
    found, earlier = smallest_difference.smallest_difference(run, 200)
    assert (found, earlier) == (pytest.approx(0.15 / 2), "earlier"), "four times the prompts, half the width"
    assert "prompts show differences in acceptance length from" in plan.show(run, None, None, None)
