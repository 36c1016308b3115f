"""Rows from existing conversations (mode replay): the server's chat template gives token ids and spans."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from drafter.config import Config, Target
from drafter.contracts import Row
from drafter.errors import ConfigError, RowError
from drafter.generate.prompts import Request
from drafter.model_folder import read_added_tokens
from drafter.serve.client import Client

TIMEOUT_SECONDS = 120.0


async def tokenize(client: Client, target: Target, **what: Any) -> list[int]:
    """The server's token ids for `prompt=`, or for `messages=` with the target's template. Raises RowError."""
    body = {"model": target.served_name, **{key: value for key, value in what.items() if value is not None}}
    if "messages" in what and target.chat_template_kwargs:
        body["chat_template_kwargs"] = target.chat_template_kwargs
    reply = await client.post("/tokenize", body, timeout=TIMEOUT_SECONDS)
    try:
        return [int(token) for token in reply["tokens"]]
    except (KeyError, TypeError, ValueError):
        raise RowError("bad_reply", "the reply of /tokenize has no list of tokens") from None


async def build_row(client: Client, request: Request, config: Config) -> Row:
    """The conversation as a row with its last answer supervised, or with all answers (`replay_all`).

    An answer begins after the generation prompt and ends with the token that stops the model; what a template adds
    after it (ChatML: a line break) the model never writes. A `</think>` that the template writes is not supervised;
    one that ends the answer's own `reasoning` is. Where the template leaves the last answer's reasoning out (Kimi's
    does), it is put back. Raises RowError (`prompt_mismatch`) for another answer's that is left out, and when the
    template renders an earlier turn differently once later turns follow: the row would not show what the model saw.
    """
    target, messages = config.target, request.messages

    async def ids_of(count: int, generation_prompt: bool) -> list[int]:
        return await tokenize(
            client, target, messages=messages[:count], tools=request.tools, add_generation_prompt=generation_prompt
        )

    everything = await ids_of(len(messages), False)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    stops = stop_ids(target.model)
    spans, suffix = [], list(target.prompt_suffix)
    for i in answers if request.mode == "replay_all" else answers[-1:]:
        before = await ids_of(i, True)
        after = everything if i == len(messages) - 1 else await ids_of(i + 1, False)
        if everything[: len(before)] != before or everything[: len(after)] != after:
            raise RowError("prompt_mismatch", f"the template changes turn {i} when later turns follow")
        if suffix and before[-len(suffix) :] != suffix:
            raise RowError("prompt_mismatch", f"the prompt ends with {before[-len(suffix) :]}, not with {suffix}")
        start, end = len(before), len(after)
        if reasoning := messages[i].get("reasoning"):
            if i == len(messages) - 1 and everything[start:end][:1] == [target.think_end]:
                own = await tokenize(client, target, prompt=reasoning, add_special_tokens=False)
                everything[start:start], end = own, end + len(own)
            if target.think_end not in everything[start + 1 : end]:
                raise RowError("prompt_mismatch", f"the template leaves out the reasoning of messages[{i}]")
        start += everything[start:end][:1] == [target.think_end]
        end = max((place + 1 for place in range(start, end) if everything[place] in stops), default=end)
        if start < end:
            spans.append([start, end])
    if not spans:
        raise RowError("no_supervised_tokens")
    return Row(
        row_id=request.row_id,
        conv_id=request.conv_id,
        source=request.source,
        turn=request.turn,
        input_ids=everything,
        supervised=spans,
        think_end=find_think_end(everything[: spans[0][0]], everything[slice(*spans[0])], target.think_end),
        reasoning=messages[-1].get("reasoning"),
        content=messages[-1]["content"],
        finish_reason="replay",
        sampling={},
        usage={
            "prompt_tokens": spans[0][0],
            "completion_tokens": sum(end - start for start, end in spans),
            "reasoning_tokens": None,
        },
        model=target.served_name,
    )


def find_think_end(prompt_ids: list[int], completion_ids: list[int], think_end: int | None) -> int | None:
    """Position of `</think>`: the first in the completion, or the prompt's last token."""
    if think_end is None:
        return None
    if think_end in completion_ids:
        return len(prompt_ids) + completion_ids.index(think_end)
    return len(prompt_ids) - 1 if prompt_ids[-1:] == [think_end] else None


@cache
def stop_ids(model: Path) -> frozenset[int]:
    """Token ids that end an answer, from generation_config.json, config.json and the tokenizer's eos_token.

    Raises ConfigError for a broken file.
    """
    found: set[int] = set()
    settings = {name: _settings(model / name) for name in ("generation_config.json", "config.json")}
    settings["text_config"] = settings["config.json"].get("text_config") or {}
    for each in settings.values():
        ids = each.get("eos_token_id") if isinstance(each, dict) else None
        found.update(ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else [])
    eos = _settings(model / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    token = read_added_tokens(model).get(text) if isinstance(text, str) else None
    return frozenset(found if token is None else {*found, token})


def _settings(path: Path) -> dict:
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return settings
