"""Stage 02 against a small engine (transformers, our connector, real HTTP): right, never half, within the disk."""

import errno
import gc
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("vllm")

from drafter import config, contracts, files, locks, stage, text
from drafter.errors import ContractError
from drafter.extract import loop as extraction
from drafter.extract import probe, state_file, states, worklist
from drafter.extract import request as capture
from drafter.extract import stage as extract
from tests import tiny_models
from tests.conftest import free_port
from tests.connector_rig import in_a_thread
from tests.corrupting_connector import CorruptingWriter
from tests.engine import Engine

main = importlib.import_module("02_extract_hidden_states").main
LAYERS, HIDDEN = tiny_models.LAYER_IDS, tiny_models.HIDDEN


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.make_tiny_mla(tmp_path_factory.mktemp("tiny") / "mla")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A file that does not come is given up after a second, not after minutes."""
    monkeypatch.setattr(capture, "FILE_SECONDS", 1.5)
    monkeypatch.setattr(capture, "SLOWEST_DISK", 1e15)


def make_row(name: str, tokens: int, seed: int, prompt: int = 5) -> contracts.Row:
    ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return contracts.Row(
        row_id=name, conv_id=name, source="test", turn=0, input_ids=ids, supervised=[[prompt, tokens]],
        think_end=tokens - 2, reasoning=None, content="", finish_reason="stop", sampling={},
        usage={"prompt_tokens": prompt, "completion_tokens": tokens - prompt}, model="tiny",
    )  # fmt: skip


def make_rows(count: int, prefix: str = "row", first: int = 0, low: int = 20, high: int = 60) -> list[contracts.Row]:
    choose = random.Random(first)
    return [make_row(f"{prefix}-{i:028d}", choose.randint(low, high), i) for i in range(first, first + count)]


class Run:
    """A run whose stage 01b is finished, and a way to run stage 02 on it."""

    def __init__(self, folder: Path, model: Path, rows: list[contracts.Row], name: str = "run"):
        tree = yaml.safe_load((config.ROOT / "configs/smollm2_cpu.yaml").read_text())
        tree["run"] = {"name": name, "dir": str(folder)}
        tree["target"] = {
            "model": str(model), "served_name": "tiny", "layer_ids": list(LAYERS), "max_seq_len": 64,
        }  # fmt: skip
        tree["extract"] = {"concurrency": 4, "tokens_per_request": 150, "reserve_gb": 0, "outage_minutes": 0.5}
        self.path = folder / f"{name}.yaml"
        self.path.write_text(yaml.safe_dump(tree))
        self.config = config.load(self.path)
        self.folder = self.config.stage_dir("02_hidden_states")
        self.folder.mkdir(parents=True)
        self.write(rows)

    def write(self, rows: list[contracts.Row]) -> None:
        args = stage.parser("").parse_args([])
        upstream = stage.Stage("01b_synthetic", self.config, args)
        upstream.begin(["target.model"])
        half = len(rows) // 2
        for number, part in enumerate([rows[:half], rows[half:]]):
            text = "".join(json.dumps(row.to_record()) + "\n" for row in part)
            (upstream.folder / f"shard-{number:05d}.jsonl").write_text(text)
        upstream.counts.total = upstream.counts.done = len(rows)
        upstream.finish()
        self.rows = rows

    def arguments(self, port: int, *more: str) -> list[str]:
        server = ["servers.extract.kind=external", f"servers.extract.url=http://127.0.0.1:{port}"]
        sets = [word for entry in server for word in ("--set", entry)]
        return ["--config", str(self.path), *sets, *more]

    def extract(self, capsys, port: int, *more: str) -> tuple[int, dict]:
        capsys.readouterr()
        code = main(self.arguments(port, *more))
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.glob("??/*")}

    def index(self) -> list[dict]:
        return list(files.read_jsonl(self.folder / "index.jsonl"))

    def assert_exactly_the_rows(self) -> None:
        assert [entry["row_id"] for entry in self.index()] == [row.row_id for row in self.rows]
        assert set(self.files()) == {f"{row.row_id}.safetensors" for row in self.rows}
        for entry in self.index():
            states.check_content(self.folder / contracts.states_path(entry["row_id"]))


@pytest.fixture
def run(tmp_path, tiny):
    return Run(tmp_path, tiny, make_rows(12))


@pytest.fixture
def writer_in_a_thread(monkeypatch):
    monkeypatch.setattr("drafter.extract.writer.start_writer", in_a_thread)


@pytest.fixture
def engine(run, tiny):
    with Engine(tiny, run.folder) as engine:
        yield engine


# Right


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_row_gets_the_states_the_target_had(run, engine, capsys, tiny, tmp_path, dtype):
    """H04, H05: slots are the asked layers' inputs, the last one before the final norm; ids are in the metadata."""
    drafter = tiny_models.make_drafter(tiny, tmp_path / "drafter")
    sets = [f"extract.dtype={dtype}", f"train.warm_start={drafter}", "train.draft_vocab_size="]
    code, summary = run.extract(capsys, engine.port, *(word for entry in sets for word in ("--set", entry)))
    assert code == 0 and summary["status"] == "complete", summary
    assert (summary["in"], summary["out"], summary["pending"]) == (12, 12, 0)
    run.assert_exactly_the_rows()
    for row in run.rows:
        read = states.read_states(run.folder / contracts.states_path(row.row_id))
        assert read.token_ids.tolist() == row.input_ids and read.layer_ids == list(LAYERS)
        assert read.metadata["target"] == files.fingerprint_path(tiny)
        _logits, expected = engine._forward(row.input_ids)
        assert torch.equal(read.final, expected[:, -1])
        assert torch.equal(read.aux, expected[:, :-1]) or dtype == "fp8"
    facts = summary["facts"]
    assert facts["tokens"] == sum(len(row.input_ids) for row in run.rows)
    assert facts["bytes"] == sum(map(len, run.files().values()))
    assert [probe["passed"] for probe in facts["probes"]] == [True, True]
    assert facts["probes"][0]["mean_nat"] < 0.05
    assert facts["engine"] == {"vllm": "0.32.0", "model_runner": "v1"}
    assert ("parity" in facts) == (dtype == "fp8")
    if dtype == "fp8":
        assert facts["parity"]["rows"] == 12 and set(facts["parity"]["mean"]) == {"2", "4", "5"}
        assert 0.01 < facts["parity"]["worst_row"] < 0.04
        losses = facts["parity"]["first_loss"]
        assert losses["fp8"] != losses["bf16"] and losses["fp8"] == pytest.approx(losses["bf16"], rel=0.01)
    together = [body for body in engine.requests if len(body["prompt"]) > 1]
    assert together and all(sum(map(len, body["prompt"])) <= 150 for body in together)  # short rows share requests
    assert not any(body.get("return_token_ids") or body.get("prompt_logprobs") for body in engine.requests)


def test_a_finished_stage_says_so_without_a_server(run, engine, capsys):
    assert run.extract(capsys, engine.port)[0] == 0
    before = run.files()
    code, summary = run.extract(capsys, 1)
    assert code == 0 and summary["out"] == 12 and run.files() == before


KINDS = {
    "early": "mean divergence",
    "normed": "mean divergence",
    "shifted": "layer 2 looks like layer 3",
    "permuted": "layer 2 looks like layer 4",
    "other": "mean divergence",
    "late": "mean divergence",
    "short": "token_ids has",
    "zeros": "is zero",
}


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_states_are_caught_before_anything_is_published(tmp_path, tiny, capsys, kind):
    """H01, H02, H04, H05, H06"""
    rows = make_rows(1, "right", low=50) + make_rows(11, kind, first=1, low=50)
    run = Run(tmp_path, tiny, rows)
    with Engine(tiny, run.folder, captured=(2, 3, 4, 5, 6, 7, 8), connector=CorruptingWriter) as engine:
        code, summary = run.extract(capsys, engine.port)
        assert code == 1 and KINDS[kind] in summary["error"], summary["error"]
        assert run.files() == {} and run.index() == []
        code, summary = run.extract(capsys, engine.port, "--probe")
        assert code == 1 and KINDS[kind] in summary["error"]
        assert run.files() == {}


def test_rows_that_one_request_exchanges_are_found_and_asked_for_again(tmp_path, tiny, capsys):
    """Seam F4: whole, plausible files under each other's names, one request of many, outside the probe's sample."""
    exchanged = [make_row(f"exchanged-{i:022d}", 40, 90 + i) for i in range(2)]
    rows = make_rows(1, "right") + exchanged + make_rows(11, "right", first=1)
    run = Run(tmp_path, tiny, rows)
    with Engine(tiny, run.folder, captured=(2, 3, 4, 5, 6, 7, 8), connector=CorruptingWriter) as engine:
        code, summary = run.extract(capsys, engine.port, "--set", "extract.probe_rows=1")
        assert engine.rig.worker._exchanged
        assert code == 0 and summary["out"] == 14 and summary["facts"]["retries"] == {"bad_states": 2}
        checked = summary["facts"]["last_positions"]
        assert checked["rows"] == 14 and checked["mean_nat"] <= checked["max_nat"] < 0.05
        for row in exchanged:
            read = states.read_states(run.folder / contracts.states_path(row.row_id))
            assert torch.equal(read.final, engine._forward(row.input_ids)[1][:, -1])
    run.assert_exactly_the_rows()


def test_a_reply_without_log_probabilities_is_refused(run, engine, capsys, monkeypatch):
    """Seam F4: without them a file cannot be distinguished from another row's."""
    compute = engine._compute

    def without(body, prompts, fault):
        reply = compute(body, prompts, fault)
        for choice in reply["choices"]:
            choice["logprobs"] = None
        return reply

    monkeypatch.setattr(engine, "_compute", without)
    code, summary = run.extract(capsys, engine.port)
    assert code == 2 and "has no log-probabilities" in summary["error"]
    assert not [name for name in run.files() if name.endswith(".safetensors")]


def test_states_that_go_wrong_later_are_caught_at_the_shard_s_end_and_withdrawn(tmp_path, tiny, capsys):
    rows = make_rows(8, "right", low=50) + make_rows(4, "early", first=8, low=50)
    run = Run(tmp_path, tiny, rows)
    with Engine(tiny, run.folder, captured=(2, 3, 4, 5, 6, 7, 8), connector=CorruptingWriter) as engine:
        code, summary = run.extract(capsys, engine.port, "--set", "extract.rows_per_shard=4")
        assert code == 1 and "withdrawn" in summary["error"]
        assert not [name for name in run.files() if name.startswith("early")]
    with Engine(tiny, run.folder) as engine:
        assert run.extract(capsys, engine.port)[0] == 0
    run.assert_exactly_the_rows()


def test_the_probe_alone_changes_nothing_that_the_stage_holds(run, engine, capsys):
    def check():
        code, summary = run.extract(capsys, engine.port, "--probe")
        assert code == 0 and summary["probe"]["passed"] and summary["probe"]["rows"] == 4

    def held():
        names = ("manifest.json", "index.jsonl", "rejected.jsonl", "config.yaml")
        return run.files(), [(run.folder / name).read_bytes() for name in names]

    check()
    assert run.files() == {} and not (run.folder / "manifest.json").exists()
    for limit in (["--limit", "5"], []):  # a part of the rows, then all of them
        assert run.extract(capsys, engine.port, *limit)[0] == 0
        before = held()
        check()
        assert held() == before
        engine.sick = True
        assert run.extract(capsys, engine.port, "--probe")[0] != 0 and held() == before
        engine.sick = False
    code, summary = run.extract(capsys, engine.port, "--probe", "--set", "extract.dtype=fp8")
    assert code == 2 and "extract.dtype" in summary["error"] and held() == before
    theirs = next(row.row_id for row in run.rows if row.row_id not in worklist.Share(1, 2))
    staged = run.folder / theirs[:2] / f"{theirs}.1.part"  # another host's, which is still at it
    staged.write_bytes(b"")
    assert run.extract(capsys, engine.port, "--probe", "--shard", "1/2")[0] == 0 and staged.exists()


def test_the_layers_above_are_kept_for_the_probe_rows_when_asked(tmp_path, tiny, capsys, monkeypatch):
    run = Run(tmp_path, tiny, make_rows(6))
    more = ("--set", "target.layer_ids=[2,4,6,8]", "--set", "extract.neighbour_ids=true")

    def mixed_up(path, _layers):
        raise ContractError(f"{path.name} is mixed up")

    with Engine(tiny, run.folder, captured=(2, 3, 4, 5, 6, 7, 8)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(probe, "check_neighbours", mixed_up)
            for alone in ([], ["--probe"]):
                code, summary = run.extract(capsys, engine.port, *more, *alone)
                assert code == 1 and "is mixed up" in summary["error"]
                assert run.files() == {} and run.index() == []
        assert run.extract(capsys, engine.port, *more, "--probe")[0] == 0
        code, summary = run.extract(capsys, engine.port, *more)
    assert code == 0, summary["error"]
    kept = [states.read_states(path) for path in sorted((run.folder / "neighbours").glob("*/*"))]
    assert [read.layer_ids for read in kept] == [[2, 3, 4, 5, 6, 7, 8]] * 4
    four = states.read_states(run.folder / contracts.states_path(kept[0].metadata["row_id"]))
    assert torch.equal(four.aux, kept[0].aux[:, [0, 2, 4]]) and four.layer_ids == [2, 4, 6, 8]


# The question and the amount


def test_rows_are_cut_at_the_end_and_only_cut_rows_are_redone_when_the_limit_grows(tmp_path, tiny, capsys):
    """T02, T06, T11"""
    rows = [make_row("a" * 32, 100, 1), make_row("b" * 32, 30, 2), make_row("c" * 32, 90, 3, prompt=70)]
    rows += [make_row("d" * 32, 2, 4, prompt=1), make_row("e" * 32, 64, 5)]
    rows[1].input_ids[3] = 10**6
    run = Run(tmp_path, tiny, rows)
    with Engine(tiny, run.folder) as engine:
        code, summary = run.extract(capsys, engine.port)
        assert code == 0
        assert summary["rejected"] == {"bad_token_ids": 1, "no_supervised_tokens": 1, "too_short": 1}
        reasons = {one["row_id"][0]: one["reason"] for one in files.read_jsonl(run.folder / "rejected.jsonl")}
        assert reasons == {"b": "bad_token_ids", "c": "no_supervised_tokens", "d": "too_short"}
        first, second = run.index()
        assert (first["tokens"], first["row_tokens"], first["supervised"]) == (64, 100, [[5, 64]])
        assert first["think_end"] is None and second["think_end"] == 62
        assert summary["facts"]["cut"] == 1
        short = run.files()["e" * 32 + ".safetensors"]
        engine.requests.clear()
        code, summary = run.extract(capsys, engine.port, "--set", "target.max_seq_len=128")
        assert code == 0 and summary["rejected"] == {"bad_token_ids": 1, "too_short": 1}
        asked = {len(ids) for body in engine.requests for ids in body["prompt"]}
        assert asked == {100, 90}
        assert run.files()["e" * 32 + ".safetensors"] == short
        assert [entry["tokens"] for entry in run.index()] == [100, 90, 64]


@pytest.mark.parametrize("change", ["target.layer_ids=[2,4,6,8]", "extract.dtype=fp8"])
def test_a_changed_question_is_refused_by_name_and_changes_nothing(run, engine, capsys, change):
    """H12, H06"""
    assert run.extract(capsys, engine.port)[0] == 0
    before = (run.folder / "manifest.json").read_bytes()
    code, summary = run.extract(capsys, engine.port, "--set", change)
    assert code == 2 and change.partition("=")[0] in summary["error"]
    assert (run.folder / "manifest.json").read_bytes() == before


def test_limits_and_new_rows_only_change_what_is_left(run, engine, capsys):
    code, summary = run.extract(capsys, engine.port, "--limit", "5")
    assert code == 0 and summary["out"] == 5
    run.write(run.rows + make_rows(3, first=100))
    code, summary = run.extract(capsys, engine.port)
    assert code == 0 and summary["out"] == 15
    run.assert_exactly_the_rows()
    code, summary = run.extract(capsys, engine.port, "--limit", "2")
    assert code == 0 and len(run.index()) == 2 and len(run.files()) == 15  # out of the index, not off the disk


def test_a_row_generated_anew_is_extracted_anew(run, engine, capsys):
    assert run.extract(capsys, engine.port)[0] == 0
    changed = make_row(run.rows[3].row_id, len(run.rows[3].input_ids), seed=999)
    run.write([*run.rows[:3], changed, *run.rows[4:]])
    engine.requests.clear()
    assert run.extract(capsys, engine.port)[0] == 0
    assert [ids for body in engine.requests for ids in body["prompt"]] == [changed.input_ids]
    run.assert_exactly_the_rows()


def test_bad_situations_end_with_one_line_and_exit_2(run, engine, capsys, tmp_path, tiny):
    """H13"""
    engine.version = "0.24.1"
    code, summary = run.extract(capsys, engine.port)
    assert code == 2 and "does not capture the last layer of DeepseekV3ForCausalLM" in summary["error"]
    engine.version = "0.26.0"
    code, summary = run.extract(capsys, free_port())
    assert code == 2 and "python -m drafter.serve up extract" in summary["error"]
    code, summary = run.extract(capsys, engine.port, "--shard", "3/2")
    assert code == 2 and "--shard" in summary["error"]
    elsewhere = Run(tmp_path / "other", tiny, make_rows(2)) if (tmp_path / "other").mkdir() is None else None
    code, summary = elsewhere.extract(capsys, engine.port)
    assert code == 2 and "is not a .part file below" in summary["error"]
    shutil.rmtree(elsewhere.config.stage_dir("01b_synthetic"))
    code, summary = elsewhere.extract(capsys, engine.port)
    assert code == 2 and "01b_synthetic has not run" in summary["error"]


# Never half


def start(run: Run, port: int, *more: str) -> subprocess.Popen:
    line = [sys.executable, "02_extract_hidden_states.py", *run.arguments(port, *more)]
    return subprocess.Popen(line, cwd=config.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def engine_process(tiny: Path, run: Run, port: int, slow: float = 0) -> subprocess.Popen:
    line = [sys.executable, "-m", "tests.engine", str(tiny), str(run.folder), str(port), str(slow)]
    process = subprocess.Popen(line, cwd=config.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    raise AssertionError("the engine did not start")


def published(run: Run) -> int:
    return len(list(run.folder.glob("??/*.safetensors")))


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "goals"), [(signal.SIGKILL, (0, 22)), (signal.SIGTERM, (9,))])
def test_a_client_stopped_at_any_moment_loses_nothing(tmp_path, tiny, capsys, number, goals):
    """H09, H10: exactly the rows at the end, byte for byte what an undisturbed run gives."""
    rows = make_rows(40)
    undisturbed, run = Run(tmp_path, tiny, rows, "undisturbed"), Run(tmp_path, tiny, rows)
    with Engine(tiny, tmp_path) as engine:
        assert undisturbed.extract(capsys, engine.port)[0] == 0
        engine.plan = lambda _body: time.sleep(0.03)
        for goal in goals:
            process = start(run, engine.port)
            wait_for(lambda goal=goal: published(run) > goal)
            process.send_signal(number)
            process.communicate(timeout=60)
            assert process.returncode in (-9, 143), process.returncode
        engine.plan = lambda _body: None
        for stray in ("zz.part", "zz.writing", "zz.error"):
            (run.folder / "ro" / f"{rows[0].row_id}.{stray}").write_bytes(b"left")
        assert run.extract(capsys, engine.port)[0] == 0
    run.assert_exactly_the_rows()
    assert run.files() == undisturbed.files()
    assert (run.folder / "index.jsonl").read_bytes() == (undisturbed.folder / "index.jsonl").read_bytes()


def test_client_and_server_killed_at_random_moments_lose_nothing(tmp_path, tiny, capsys):
    """H08, H09, H10: the client waits for a dead server; at the end all rows are there, whichever process died."""
    run, port, choose = Run(tmp_path, tiny, make_rows(60)), free_port(), random.Random(0)

    def some_more() -> None:
        goal = published(run) + choose.randrange(1, 9)
        wait_for(lambda: published(run) >= goal)
        time.sleep(choose.uniform(0, 0.05))  # also between two files

    server = engine_process(tiny, run, port, slow=0.03)
    client = start(run, port, "--set", "extract.outage_minutes=10")
    try:
        some_more()
        server.kill()
        server.wait()
        server = engine_process(tiny, run, port, slow=0.03)
        some_more()
        assert client.poll() is None and published(run) < 60
        for process in choose.sample([client, server], 2):
            process.kill()
            time.sleep(choose.uniform(0, 0.05))
    finally:
        client.kill()
        server.kill()
        client.communicate()
    with Engine(tiny, run.folder) as engine:
        code, summary = run.extract(capsys, engine.port)
    assert code == 0 and summary["out"] == 60, summary
    run.assert_exactly_the_rows()


def test_a_reply_without_a_file_is_asked_again_and_then_rejected_by_name(run, engine, capsys):
    """H08"""
    lost = run.rows[7].input_ids
    engine.plan = lambda body: "no file" if lost in body["prompt"] else None
    code, summary = run.extract(capsys, engine.port)
    assert code == 0, summary["error"]
    assert summary["rejected"] == {"no_states": 1} and summary["out"] == 11
    assert sum(lost in body["prompt"] for body in engine.requests) == extraction.ATTEMPTS
    assert run.extract(capsys, 1, "--dry-run")[1]["pending"] == 0  # settled, but a run by hand tries it again
    engine.plan = lambda body: None
    code, summary = run.extract(capsys, engine.port)
    assert code == 0, summary["error"]
    run.assert_exactly_the_rows()


@pytest.mark.parametrize(
    ("key", "value", "code", "said"),
    [
        ("kv_transfer_params", {"writer": None}, 2, "names no writer"),
        ("kv_transfer_params", [1], 2, "names no writer"),
        ("choices", None, 2, "not as an OpenAI-compatible server"),
        ("prompt_logprobs", [None], 1, "no prompt_logprobs"),
        ("prompt_logprobs", [{}] * 64, 1, "no prompt_logprobs"),
        ("prompt_logprobs", "none", 1, "no prompt_logprobs"),
        ("version", None, 0, ""),
        ("version", [1], 0, ""),
    ],
)
def test_a_reply_that_lies_about_its_form_is_one_line(run, engine, capsys, monkeypatch, key, value, code, said):
    """Law 8"""
    reply = engine._reply

    async def lie(body, status=200):
        for part in (body, *body.get("choices", ())):
            part |= {key: value} if part.get(key) else {}
        return await reply(body, status)

    monkeypatch.setattr(engine, "_reply", lie)
    found, summary = run.extract(capsys, engine.port)
    assert (found, "our bug" in summary.get("error", "")) == (code, False)
    assert said in summary.get("error", "")
    assert bool(published(run)) is (code == 0)


def test_a_late_file_is_waited_for(run, writer_in_a_thread, engine, capsys, monkeypatch):
    """H08"""
    write = state_file.write_arrays
    monkeypatch.setattr(state_file, "write_arrays", lambda *args: (time.sleep(0.3), write(*args))[1])
    assert run.extract(capsys, engine.port)[0] == 0
    run.assert_exactly_the_rows()


def test_requests_that_time_out_are_retried_and_a_sick_server_is_exit_3_and_costs_nothing(
    run, engine, capsys, monkeypatch
):
    """H11, R01: one request in ten hangs until the client drops it, then every request fails."""
    monkeypatch.setattr(capture, "REQUEST_SECONDS", 0.7)
    monkeypatch.setattr(capture, "FLOOR_TOKENS_PER_SECOND", 1e9)
    alone = ("--set", "extract.tokens_per_request=1", "--set", "extract.concurrency=3")
    asked = itertools.count(1)

    def plan(_body):
        number = next(asked)
        engine.sick = number >= 10
        return "hang" if number == 5 else None

    engine.plan = plan
    started = time.monotonic()
    code, summary = run.extract(capsys, engine.port, *alone, "--set", "extract.outage_minutes=0.02")
    assert code == 3 and "no answer from" in summary["error"], summary
    assert time.monotonic() - started < 20
    assert 4 <= summary["out"] < 12 and summary["rejected"] == {}
    engine.sick, engine.plan = False, lambda _body: "hang" if next(asked) % 10 == 0 else None
    assert run.extract(capsys, engine.port, *alone)[0] == 0
    run.assert_exactly_the_rows()


def test_rows_that_are_not_there_yet_are_no_finished_extraction(run, engine, capsys):
    """Law 4: 01b was stopped before its first shard."""
    for shard in run.config.stage_dir("01b_synthetic").glob("shard-*.jsonl"):
        shard.unlink()
    for verb in ((), ("--verify",)):
        code, summary = run.extract(capsys, engine.port, *verb)
        assert code == 2 and "01b_synthetic has no rows yet" in summary["error"]
    assert not (run.folder / "manifest.json").exists()


def test_two_clients_on_one_folder_are_one_too_many(run, engine, capsys):
    with worklist.locked_share(run.folder, worklist.Share()):
        for share in ("1/1", "1/2"):
            code, summary = run.extract(capsys, engine.port, "--shard", share)
            assert code == 2 and "another process" in summary["error"]
    assert not (run.folder / "manifest.json").exists()


def test_hosts_share_the_rows_and_one_index(run, engine, capsys):
    code, first = run.extract(capsys, engine.port, "--shard", "1/2")
    assert code == 0 and 0 < first["out"] < 12 and first["pending"] == 0
    assert json.loads((run.folder / "manifest.json").read_text())["status"] == "partial"
    engine.requests.clear()
    code, second = run.extract(capsys, engine.port, "--shard", "2/2")
    assert code == 0 and second["out"] == 12
    assert sum(len(body["prompt"]) for body in engine.requests) == 12 - first["out"]
    run.assert_exactly_the_rows()
    assert json.loads((run.folder / "manifest.json").read_text())["status"] == "complete"


# After publishing


def test_verify_finds_what_happened_to_published_files_and_the_next_run_redoes_them(run, engine, capsys):
    assert run.extract(capsys, engine.port)[0] == 0
    good = run.files()
    paths = [run.folder / contracts.states_path(row.row_id) for row in run.rows]
    flipped = bytearray(paths[0].read_bytes())
    flipped[-100] ^= 4
    paths[0].write_bytes(flipped)
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    shutil.copy(paths[3], paths[2])
    read = states.read_states(paths[4])
    from safetensors.torch import save_file

    hidden = torch.cat([read.aux, read.final[:, None]], dim=1)
    save_file({"hidden_states": hidden.half(), "token_ids": read.token_ids}, paths[4], metadata=read.metadata)
    paths[5].unlink()
    (run.folder / "index.jsonl").unlink()
    code, summary = run.extract(capsys, 1, "--verify")
    assert code == 3 and summary["pending"] == 5 and summary["out"] == 7
    assert summary["facts"]["verified"] == {"right": 7, "removed": 4, "outdated": 0}
    assert [entry["row_id"] for entry in run.index()] == [row.row_id for row in run.rows[3:4] + run.rows[6:]]
    engine.requests.clear()
    assert run.extract(capsys, engine.port)[0] == 0
    assert sum(len(body["prompt"]) for body in engine.requests) == 5
    assert run.files() == good


def test_the_index_is_a_cache(run, engine, capsys):
    assert run.extract(capsys, engine.port)[0] == 0
    index = (run.folder / "index.jsonl").read_bytes()
    (run.folder / "index.jsonl").unlink()
    shutil.rmtree(run.folder / ".journal")
    code, _summary = run.extract(capsys, 1)  # files that are in no journal are checked, not requested again
    assert code == 0 and (run.folder / "index.jsonl").read_bytes() == index


def test_an_index_of_other_rows_is_merged_again_also_when_nothing_is_to_be_extracted(run, engine, capsys):
    """Seam U4: 01b counted 93 rows again, and 02 stayed complete with the 8 of another call's prompts."""
    assert run.extract(capsys, engine.port)[0] == 0
    rows, extracted = run.rows, run.files()
    for asked in (rows[:4], rows):
        assert "stale" not in run.extract(capsys, 1, "--dry-run")[1]
        run.write(asked)
        code, plan = run.extract(capsys, 1, "--dry-run")
        assert (code, plan["pending"]) == (0, 0) and "other rows" in plan["stale"]
        assert plan["row_set"] == contracts.row_set([row.row_id for row in asked])
        code, summary = run.extract(capsys, 1)  # no server
        assert code == 0 and summary["out"] == len(asked) and summary["facts"]["row_set"] == plan["row_set"]
        assert [entry["row_id"] for entry in run.index()] == [row.row_id for row in asked]
        assert run.files() == extracted
    manifest = json.loads((run.folder / "manifest.json").read_text())
    del manifest["facts"]["row_set"]  # of an earlier version
    files.write_json(run.folder / "manifest.json", manifest)
    run.write(rows[:4])
    assert "stale" not in run.extract(capsys, 1, "--dry-run")[1]


@pytest.mark.parametrize("change", ["a span", "a row", "no file"])
def test_an_index_that_was_changed_is_built_again_without_a_server(run, engine, capsys, change):
    assert run.extract(capsys, engine.port)[0] == 0
    path = run.folder / "index.jsonl"
    written = path.read_bytes()
    if change == "no file":
        path.unlink()
    else:
        first, *others = map(json.loads, written.splitlines())
        first["supervised"][0][0] += 1
        files.write_jsonl(path, [first, *others] if change == "a span" else others)
    assert "describes" in run.extract(capsys, 1, "--dry-run")[1]["stale"]
    assert run.extract(capsys, 1)[0] == 0 and path.read_bytes() == written
    assert "stale" not in run.extract(capsys, 1, "--dry-run")[1]


# Nothing finished is removed before its successor has its name


def cut_run(folder: Path, model: Path) -> Run:
    """A run of 20 rows that a max_seq_len below 64 cuts."""
    return Run(folder, model, make_rows(20, low=50))


def test_states_that_another_length_would_replace_stay_until_they_are_replaced(tmp_path, tiny, capsys):
    """Seam U1: a typo in max_seq_len took 51 of 64 finished files, with no server up."""
    run = cut_run(tmp_path, tiny)
    with Engine(tiny, run.folder) as engine:
        assert run.extract(capsys, engine.port)[0] == 0
        finished = run.files()
        held = [(run.folder / name).read_bytes() for name in ("manifest.json", "index.jsonl", "config.yaml")]
        shorter = ("--set", "target.max_seq_len=40")
        for more, why in (
            ([*shorter], "--redo"),
            ([*shorter, "--redo", "--set", "extract.reserve_gb=1000000"], "extract.reserve_gb"),
        ):
            code, summary = run.extract(capsys, engine.port, *more)
            assert code == 2 and why in summary["error"] and "Traceback" not in summary["error"]
            assert run.files() == finished
        assert run.extract(capsys, 1, *shorter, "--redo")[0] != 0  # no server
        assert run.files() == finished
        assert [(run.folder / n).read_bytes() for n in ("manifest.json", "index.jsonl", "config.yaml")] == held
        code, planned = run.extract(capsys, 1, *shorter, "--dry-run")
        assert code == 0 and planned["redo"] == 20 and "20 finished rows" in planned["refused"]
        assert run.extract(capsys, engine.port)[0] == 0 and run.files() == finished  # the typo is taken back
        engine.plan = lambda body: "500" if len(body["prompt"]) else None
        engine.sick = True
        assert run.extract(capsys, engine.port, *shorter, "--redo", "--set", "extract.outage_minutes=0.02")[0] != 0
        assert run.files() == finished
        engine.sick, engine.plan = False, lambda _body: None
        code, summary = run.extract(capsys, engine.port, *shorter, "--redo")
        assert code == 0 and summary["out"] == 20
    assert {entry["tokens"] for entry in run.index()} == {40}
    run.assert_exactly_the_rows()


def test_a_shorter_length_fits_a_disk_that_the_longer_states_fill(tmp_path, tiny, capsys, monkeypatch):
    """Seam U1: files that are replaced give their room."""
    run = cut_run(tmp_path, tiny)
    with Engine(tiny, run.folder) as engine:
        assert run.extract(capsys, engine.port)[0] == 0
        monkeypatch.setattr(files, "free_bytes", lambda _folder: 10_000)
        assert run.extract(capsys, engine.port, "--set", "target.max_seq_len=40", "--redo")[0] == 0
    run.assert_exactly_the_rows()


def test_verify_removes_what_is_damaged_and_nothing_that_was_asked_otherwise(tmp_path, tiny, capsys):
    """Seam U1: --verify with another max_seq_len took every finished file for damage."""
    run = cut_run(tmp_path, tiny)
    with Engine(tiny, run.folder) as engine:
        assert run.extract(capsys, engine.port)[0] == 0
    finished = run.files()
    code, summary = run.extract(capsys, 1, "--verify", "--set", "target.max_seq_len=40")
    assert summary["facts"]["verified"] == {"right": 0, "removed": 0, "outdated": 20}
    assert run.files() == finished
    assert run.extract(capsys, 1)[0] == 0 and run.files() == finished
    run.assert_exactly_the_rows()


# Hosts that share the rows


def test_cut_rows_are_redone_on_fewer_hosts_than_extracted_them(tmp_path, tiny, capsys):
    """Seam H3: the journal of a host that no longer takes part won over the one that redid its rows."""
    run = Run(tmp_path, tiny, [make_row(f"{i:032x}", 100, i) for i in range(6)])
    with Engine(tiny, run.folder) as engine:
        for share in ("1/2", "2/2"):
            assert run.extract(capsys, engine.port, "--shard", share)[0] == 0
        engine.requests.clear()
        code, summary = run.extract(capsys, engine.port, "--set", "target.max_seq_len=128")
        assert (code, summary["out"], summary["pending"]) == (0, 6, 0)
        assert sum(len(body["prompt"]) for body in engine.requests) == 6
        engine.requests.clear()
        assert run.extract(capsys, 1, "--set", "target.max_seq_len=128")[0] == 0
    assert [entry["tokens"] for entry in run.index()] == [100] * 6
    run.assert_exactly_the_rows()


def test_a_file_of_equal_size_that_another_host_listed_for_other_ids_is_not_taken(run, engine, capsys):
    """Seam H3: any journal may list the row, but only the ids that the file holds count."""
    assert run.extract(capsys, engine.port)[0] == 0
    row = run.rows[0]
    changed = make_row(row.row_id, len(row.input_ids), seed=999)
    run.write([changed, *run.rows[1:]])
    [entry] = [e for e in run.index() if e["row_id"] == row.row_id]
    other = entry | {"digest": states.ids_digest(changed.input_ids)}
    (run.folder / ".journal/9of9.jsonl").write_text(json.dumps(other) + "\n")
    items, _rejected = worklist.read_items(run.config)
    assert row.row_id not in worklist.extracted_rows(run.folder, items)
    assert len(worklist.extracted_rows(run.folder, items)) == 11


def test_a_part_that_another_host_renames_meanwhile_is_no_error(run, engine, capsys, monkeypatch):
    """Seam K3"""
    assert run.extract(capsys, engine.port)[0] == 0
    files, gone = worklist._files, []

    def renamed_meanwhile(folder):
        for entry in files(folder):
            if entry.name in ("x.1.part", "withdrawn.safetensors"):
                os.unlink(entry.path)
                gone.append(entry.name)
            yield entry

    for name in ("x.1.part", "withdrawn.safetensors"):
        (run.folder / run.rows[0].row_id[:2] / name).write_bytes(b"")
    monkeypatch.setattr(worklist, "_files", renamed_meanwhile)
    items, _rejected = worklist.read_items(run.config)
    assert len(worklist.extracted_rows(run.folder, items)) == 12 and len(gone) == 2


def test_a_slower_host_never_writes_an_older_index(run, engine, capsys, monkeypatch):
    """Seam M2: host 2 ends while host 1, which has looked at the files, is still to write; the index has both."""
    assert run.extract(capsys, engine.port)[0] == 0
    finished = run.folder.rename(run.folder.with_name("finished"))
    items, rejected = worklist.read_items(run.config)

    def end(share: worklist.Share) -> None:
        """A host's end: its files are there, their journal and the index are not."""
        own = [item for item in items if item.row_id in share]
        for item in own:
            path = contracts.states_path(item.row_id)
            (run.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(finished / path, run.folder / path)
        assert worklist.adopt_files(run.config, run.folder, own, share) == []
        extract.settle(stage.Stage("02_hidden_states", run.config, None), items, rejected, share)

    def ended():
        end(worklist.Share(2, 2))
        over.set()

    over = threading.Event()  # the second host has ended, or waits for the first
    host_2 = threading.Thread(target=ended)
    present, sleep = worklist.extracted_rows, time.sleep

    def slowly(folder, asked):
        found = present(folder, asked)
        if threading.current_thread() is not host_2 and not host_2.ident:
            host_2.start()
            assert over.wait(60)
        return found

    def waits(seconds):
        if threading.current_thread() is host_2:
            over.set()
        sleep(seconds)

    monkeypatch.setattr(worklist, "extracted_rows", slowly)
    monkeypatch.setattr(time, "sleep", waits)
    end(worklist.Share(1, 2))
    host_2.join(60)
    assert len(run.index()) == 12
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert (manifest["status"], manifest["out"]) == ("complete", 12)


# What stage 01b left


def test_a_row_that_the_shards_repeat_is_extracted_once_and_counted(run, engine, capsys):
    """Seam F9: it was pending for ever, exit 3 without a reason."""
    run.write([*run.rows, run.rows[2], make_row(run.rows[5].row_id, 30, 77)])
    manifest = run.config.stage_dir("01b_synthetic") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"out": 14', '"out": 12'))  # 01b counts ids
    code, planned = run.extract(capsys, engine.port, "--dry-run")
    assert (code, planned["pending"]) == (0, 12)
    code, summary = run.extract(capsys, engine.port)
    assert (code, summary["status"], summary["out"]) == (0, "complete", 12)
    assert summary["rejected"] == {"duplicate": 2} and summary["in"] == 14
    recorded = list(files.read_jsonl(run.folder / "rejected.jsonl"))
    assert {one["row_id"] for one in recorded} == {run.rows[2].row_id, run.rows[5].row_id}
    assert all(
        "shard-00001.jsonl repeats the row; the one in shard-00000.jsonl is used" in o["detail"] for o in recorded
    )
    assert states.read_header(run.folder / contracts.states_path(run.rows[5].row_id)).token_ids.tolist() == (
        run.rows[5].input_ids
    )
    assert run.extract(capsys, 1)[0] == 0


def test_rows_that_01b_counted_and_the_shards_lack_are_missed(run, engine, capsys):
    """Seam L8: neither a torn last line of a published shard nor a lost record was noticed."""
    shard = run.config.stage_dir("01b_synthetic") / "shard-00001.jsonl"
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join(lines)[:-5])
    code, summary = run.extract(capsys, engine.port)
    assert code == 1 and "shard-00001.jsonl: line 6 is broken" in summary["error"]
    shard.write_bytes(b"".join(lines[:-1]))
    code, summary = run.extract(capsys, engine.port)
    assert code == 1 and "hold 11 rows, its manifest.json counts 12" in summary["error"]
    assert not (run.folder / "manifest.json").exists()
    code, planned = run.extract(capsys, engine.port, "--dry-run")
    assert code == 0 and "hold 11 rows" in planned["findings"][-1]
    assert run.extract(capsys, engine.port, "--limit", "5")[0] == 0  # it does not look at all of them


# Within the disk


def test_the_plan_is_exact_and_says_what_would_fit(run, engine, capsys, monkeypatch):
    """H15"""
    code, planned = run.extract(capsys, 1, "--dry-run")
    assert code == 0 and planned["pending"] == 12 and planned["findings"] == []
    assert run.extract(capsys, engine.port)[0] == 0
    assert planned["bytes"] == sum(map(len, run.files().values()))
    for path in run.folder.glob("??/*"):
        path.unlink()
    room = planned["bytes"] // 2
    monkeypatch.setattr(files, "free_bytes", lambda _folder: room + 10**9)
    code, summary = run.extract(capsys, engine.port, "--set", "extract.reserve_gb=1")
    assert code == 2 and run.files() == {}
    for part in (f"take {text.size(planned['bytes'])}", "--limit", "target.max_seq_len", "extract.reserve_gb"):
        assert part in summary["error"]
    items, _ = worklist.read_items(run.config)
    advised = int(summary["error"].partition("target.max_seq_len ")[2].split(";")[0])

    def need(length):
        sizes = (worklist.file_bytes(run.config, item, min(item.tokens, length), "bf16") for item in items)
        return sum(sizes)

    assert need(advised) <= room < need(advised + 1)


def test_the_reserve_stops_a_run_cleanly_and_it_goes_on_later(run, engine, capsys, monkeypatch):
    """H15"""
    free = iter([10**12, 10**12])
    monkeypatch.setattr(files, "free_bytes", lambda _folder: next(free, 10**8))
    engine.plan = lambda _body: time.sleep(0.4)
    code, summary = run.extract(
        capsys, engine.port, "--set", "extract.reserve_gb=1", "--set", "extract.concurrency=1",
        "--set", "extract.tokens_per_request=1", "--set", "extract.probe_rows=1",
    )  # fmt: skip
    assert code == 3 and "extract.reserve_gb" in summary["error"] and 0 < summary["out"] < 12
    monkeypatch.undo()
    engine.plan = lambda _body: None
    assert run.extract(capsys, engine.port)[0] == 0
    run.assert_exactly_the_rows()


@pytest.mark.parametrize("place", [0, 8], ids=["in the first probe", "later"])
def test_a_disk_that_fills_up_stops_the_run_and_leaves_nothing_half(
    place, run, writer_in_a_thread, engine, capsys, monkeypatch
):
    """H15"""
    write = state_file.write_arrays

    def full(path, arrays, facts):
        if facts["row_id"] == run.rows[place].row_id:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return write(path, arrays, facts)

    monkeypatch.setattr(state_file, "write_arrays", full)
    code, summary = run.extract(capsys, engine.port)
    assert code == 3 and "no space left" in summary["error"]
    assert all(name.endswith((".safetensors", ".error")) for name in run.files())
    monkeypatch.setattr(state_file, "write_arrays", write)
    assert run.extract(capsys, engine.port)[0] == 0
    run.assert_exactly_the_rows()


def test_a_file_system_that_became_read_only_is_named(run, engine, capsys, monkeypatch):
    """Seam M7: no report can be written there, so the client blamed a file that did not come within 140 s."""
    statvfs = os.statvfs

    def remounted(path):
        found = statvfs(path)
        changed = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
        return types.SimpleNamespace(**changed | {"f_flag": found.f_flag | os.ST_RDONLY})

    monkeypatch.setattr(capture, "FILE_SECONDS", 60)
    engine.plan = lambda _body: monkeypatch.setattr(os, "statvfs", remounted) or "no file"
    code, summary = run.extract(capsys, engine.port)
    assert code == 3 and f"{run.folder} is read-only now" in summary["error"]


def test_a_server_that_dies_before_the_first_files_is_gone_not_wrong(run, engine, capsys):
    """H08: what it was to write says nothing about its states."""

    def die(_body) -> str:
        os.close(engine.rig.scheduler._alive)
        return "no file"

    engine.plan = die
    code, summary = run.extract(capsys, engine.port)
    assert code == 3 and "the server died" in summary["error"]


def test_a_journal_that_cannot_be_written_stops_the_run_with_one_line(run, engine, capsys, monkeypatch, caplog):
    """H15: the task that writes it was not awaited, so the run continued and left a traceback."""
    journal, calls = files.Journal.append, itertools.count()

    def append(self, record: dict) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        journal(self, record)

    monkeypatch.setattr(files.Journal, "append", append)
    engine.plan = lambda _body: time.sleep(0.4)
    code, summary = run.extract(
        capsys, engine.port, "--set", "extract.concurrency=1", "--set", "extract.tokens_per_request=1",
        "--set", "extract.probe_rows=1",
    )  # fmt: skip
    gc.collect()
    assert (code, "No space left" in summary["error"]) == (3, True) and "never retrieved" not in caplog.text
    assert 0 < summary["pending"] < 12
    engine.plan = lambda _body: None
    assert run.extract(capsys, engine.port)[0] == 0
    run.assert_exactly_the_rows()


def test_a_sick_server_blows_the_budget_and_zero_successes_are_never_a_success(run, engine, capsys, monkeypatch):
    """H13"""
    monkeypatch.setattr(extraction, "SHARE_AFTER", 2)
    monkeypatch.setattr(extraction, "ATTEMPTS", 1)
    first = [row.input_ids for row in run.rows[:4]]
    engine.plan = lambda body: None if all(ids in first for ids in body["prompt"]) else "no file"
    code, summary = run.extract(capsys, engine.port)
    assert code == 1 and "rows failed" in summary["error"]


def test_rows_are_read_only_once_no_other_process_can_write_them(run, capsys):
    """A shard that 01b was just writing was read as it came, and what was read was extracted under the lock."""
    upstream = run.config.stage_dir("01b_synthetic")
    with open(upstream / "shard-00001.jsonl", "a") as file:
        file.write('{"row_id": "')
    with locks.locked(upstream, "01b_synthetic"):
        code, summary = run.extract(capsys, 9)
    assert code == 2 and f"another process is working in {upstream}" in summary["error"], summary
