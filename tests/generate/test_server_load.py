"""Before the first request 01b says how many fit in the server's KV cache; later it counts what was preempted."""

import itertools

import pytest

from tests.generate.test_stage import Lab, lab, questions  # noqa: F401 - a fixture


def metrics(tokens: int, preempted: int, waiting: int = 0) -> str:
    return (
        f'vllm:cache_config_info{{block_size="16",engine="0",kv_cache_size_tokens="{tokens}"}} 1.0\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        f'vllm:num_preemptions_total{{engine="0"}} {preempted}\n'
    )


@pytest.fixture
def crowded(lab: Lab):  # noqa: F811
    lab.tree["generate"] |= {"concurrency": 8, "max_tokens": 100}
    lab.add_source(questions(30))
    return lab


def test_what_fits_is_said_before_the_first_request_and_preemptions_are_counted(crowded, caplog):
    counts = itertools.count(40, 7)
    crowded.server.metrics = lambda: metrics(200, next(counts))
    with caplog.at_level("INFO", "drafter"):
        assert crowded.run() == 0
    assert (
        "its KV cache holds 200 tokens: 4 of 8 requests fit at half of generate.max_tokens, 2 at all" in caplog.text
    )
    paths = [call.path for call in crowded.server.calls]
    asked = crowded.server.calls.index(crowded.server.chats[0])
    assert paths.index("/metrics") < asked
    generation = crowded.manifest["facts"]["generation"]
    assert (generation["kv_cache_tokens"], generation["preemptions"]) == (200, 7)


def test_a_server_that_was_started_again_counts_from_nothing(crowded):
    counts = iter([40, 3])
    crowded.server.metrics = lambda: metrics(200, next(counts))
    assert crowded.run() == 0
    assert crowded.manifest["facts"]["generation"]["preemptions"] == 3


def test_room_for_all_is_said_too(crowded, caplog):
    crowded.server.metrics = lambda: metrics(4000, 0)
    with caplog.at_level("INFO", "drafter"):
        assert crowded.run() == 0
    assert "its KV cache holds 4,000 tokens: all 8 requests fit" in caplog.text


@pytest.mark.parametrize("text", [None, "nothing\n", 'vllm:num_preemptions_total{engine="0"} many\n'])
def test_a_server_without_such_metrics_is_no_fault(crowded, text):
    crowded.server.metrics = text and (lambda: text)
    assert crowded.run() == 0
    assert "preemptions" not in crowded.manifest["facts"]["generation"]
