"""The KV cache in the plan: how many requests fit, what that costs, and the simulation behind the figures."""

from datetime import datetime

import pytest

from benchmarks import kv_cache as simulation
from drafter import config
from drafter.pipeline import kv_room, plan, rates
from drafter.serve import unit_file
from tests.conftest import CPU_CONFIG

BOX = rates.profile("rtx_pro_6000_x8")
SHIPPED = unit_file.shipped(kv_room.SHIPPED_UNIT).flags
TODAY = {name: value for name, value in SHIPPED.items() if name not in unit_file.KV_ADVICE}


@pytest.fixture
def kimi(tmp_path) -> config.Config:
    return config.load(config.ROOT / "configs/kimi_k25.yaml", [f"run.dir={tmp_path}"])


def hours(kimi, flags) -> float:
    """Of 10,000 rows, by the plan's law."""
    rate = BOX.generate_tokens_per_s.typical * kv_room.of(kimi, BOX, flags).rate
    return 10_000 * rates.of_profile(kimi, BOX).answer_tokens.typical / rate / 3600


def test_without_the_shipped_flags_a_third_of_the_requests_fit_and_the_night_takes_9_to_14_hours(kimi):
    room = kv_room.of(kimi, BOX, TODAY)
    assert room.tokens == pytest.approx(190_000, rel=0.02)
    assert 55 <= room.fitting <= 66
    assert 9 <= hours(kimi, TODAY) <= 14


def test_with_the_shipped_flags_all_fit(kimi):
    room = kv_room.of(kimi, BOX)
    assert room.fitting >= room.concurrency == 200
    assert hours(kimi, None) == pytest.approx(6.7, rel=0.05)


def test_a_server_that_takes_fewer_requests_than_are_in_flight_is_filled_by_those(kimi):
    assert kv_room.of(kimi, BOX, TODAY | {"max-num-seqs": "50"}).concurrency == 50
    assert kv_room.of(kimi, BOX, TODAY | {"max-num-seqs": "50"}).rate == pytest.approx(0.986, rel=0.02)


def test_a_flag_that_a_variable_gives_leaves_the_room_unknown(kimi):
    assert kv_room.of(kimi, BOX, TODAY | {"gpu-memory-utilization": "${SHARE}"}) is None


def test_the_plan_says_how_many_fit_and_which_flags_help(kimi, monkeypatch, tmp_path):
    now = datetime(2026, 11, 29, 19, 0)
    assert ": all 200 fit" in plan.page(kimi, BOX, now)
    monkeypatch.setattr(unit_file, "UNIT_FOLDERS", (tmp_path,))
    text = unit_file.SHIPPED.joinpath(f"{kv_room.SHIPPED_UNIT}.service").read_text()
    theirs = text.replace("--decode-context-parallel-size 4 --watermark 0.05", "")
    (tmp_path / "vllm-kimi-k25-int4.service").write_text(theirs)
    text = plan.page(kimi, BOX, now)
    assert (
        "62 of 200 fit, which leaves 0.44 of the rate; with --decode-context-parallel-size 4 --watermark 0.05" in text
    )
    assert "01b then takes 6.6 h" in text and "0.44 of it by the KV cache" in text


def test_a_platform_without_figures_of_its_memory_says_nothing(model, tmp_path):
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    assert kv_room.of(run, rates.profile("cpu_2cores")) is None
    assert "KV cache" not in plan.page(run, rates.profile("cpu_2cores"), datetime(2026, 11, 29))


@pytest.mark.parametrize(
    ("case", "low", "high"),
    [
        ({"kv_tokens": 1e9}, 5.2, 5.8),
        ({"kv_tokens": 190_000}, 9, 14),
        ({"kv_tokens": 190_000, "watermark": 0.05}, 9, 12),
        ({"kv_tokens": 760_000, "dcp": 4, "watermark": 0.05}, 6, 7.5),
    ],
)
def test_the_simulated_night_takes_as_long_as_the_plan_says(case, low, high):
    assert low <= simulation.simulate(**case, rows=1500).hours <= high


@pytest.mark.parametrize("watermark", [0, 0.05])
def test_the_plans_law_is_the_simulations(kimi, watermark):
    ample = simulation.simulate(1e9, rows=1500).tokens_per_second
    wanted = kv_room.of(kimi, BOX, TODAY).wanted + simulation.PROMPT
    for share, *known in kv_room.CROWDED[2:8:2]:
        night = simulation.simulate(200 * wanted * share, watermark=watermark, rows=1500)
        assert night.tokens_per_second / ample == pytest.approx(known[watermark > 0], rel=0.06)


def test_fewer_requests_in_flight_gain_next_to_nothing_beside_a_watermark():
    """Why the client keeps what it was asked to have in flight."""
    all_of_them, fewer = (
        simulation.simulate(190_000, watermark=0.05, in_flight=count, rows=1500).hours for count in (200, 60)
    )
    assert fewer == pytest.approx(all_of_them, rel=0.05)


def test_a_unit_whose_flags_are_unknown_leaves_the_room_unknown_in_so_many_words(kimi, monkeypatch, tmp_path):
    monkeypatch.setattr(unit_file, "UNIT_FOLDERS", (tmp_path,))
    (tmp_path / "vllm-kimi-k25-int4.service").write_text("[Service]\nExecStart=/opt/serve.sh\n")
    assert "KV cache of 01b's server: not known" in plan.page(kimi, BOX, datetime(2026, 11, 29, 19, 0))
