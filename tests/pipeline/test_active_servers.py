"""A server that is up before the night is asked at once what 01b would ask it after the first boots."""

import pytest

from drafter.pipeline import active_servers, preflight
from tests import fakes
from tests.fakes import Reply, chat_reply
from tests.generate.test_stage import Lab, lab, questions  # noqa: F401 - a fixture


def found(lab: Lab) -> list[str]:  # noqa: F811
    if not lab.tree["prompts"]:
        lab.add_source(questions(9))
    return list(active_servers.findings(lab.config, ["generate"]))


def test_a_server_that_fits_gives_no_finding_and_is_asked_before_every_served_stage(lab):  # noqa: F811
    assert found(lab) == []
    assert "/v1/chat/completions" in [call.path for call in lab.server.calls]
    asked = {stage for stages, check in preflight.CHECKS if check is active_servers.findings for stage in stages}
    assert asked == {"01b_synthetic", "02_hidden_states", "06_acceptance"}


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("target", "served_name", "kimi", f"serves {fakes.MODEL}, not target.served_name kimi; correct the server"),
        ("generate", "max_tokens", 3000, "its max_model_len is 2000, this run needs 3001"),
        ("target", "special_tokens", {"<think>": 7}, "'<think>' is [7], but the server tokenizes it to [260]"),
        ("target", "prompt_suffix", [7], "correct target.prompt_suffix"),
    ],
)
def test_what_no_waiting_mends_is_a_finding(lab, section, key, value, said):  # noqa: F811
    lab.tree[section][key] = value
    [finding] = found(lab)
    assert finding.startswith("servers.generate: ") and said in finding


def test_a_server_without_the_models_reasoning_parser_is_known_by_its_first_answer(lab):  # noqa: F811
    def unparsed(call):
        reply = chat_reply(call.body | {"max_tokens": 4})
        message = reply["choices"][0]["message"]
        message |= {"content": message["reasoning"], "reasoning": None}
        return Reply(reply)

    lab.server.script = unparsed
    [finding] = found(lab)
    assert "the first answer has its reasoning in `content`" in finding and "--reasoning-parser" in finding


def test_a_server_that_boots_or_is_sick_is_not_judged(lab, monkeypatch):  # noqa: F811
    lab.server.alive = False
    assert found(lab) == []
    lab.server.alive = True
    lab.server.script = lambda call: Reply(b"busy", status=503)
    monkeypatch.setattr(active_servers, "OUTAGE_MINUTES", 0.01)
    assert found(lab) == []
