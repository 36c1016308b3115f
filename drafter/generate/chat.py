"""Chat requests: their body, their time limit, and the checks before the first one."""

import json

from drafter import contracts
from drafter.config import Config, Generate
from drafter.errors import ConfigError, ResumableError, RowError
from drafter.generate import conversations, replay, rows
from drafter.generate.prompts import Request
from drafter.serve.client import Client

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")  # in the model folder
CHAT = "/v1/chat/completions"
TIMEOUT_SECONDS = 60.0  # on top of the time that max_tokens take at the floor rate


def sampling(settings: Generate, row_id: str) -> dict:
    """Every sampling parameter: a server takes missing ones from the model's generation_config.json."""
    chosen = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "max_tokens": settings.max_tokens,
    }
    return chosen | ({"seed": int(row_id[:7], 16)} if settings.seed_rows else {})


def chat_body(request: Request, history: list[str], config: Config) -> dict:
    """The chat request; `history` holds the model's own earlier answers, in order."""
    answers = iter(history)
    messages = [m if m != conversations.OWN_ANSWER else m | {"content": next(answers)} for m in request.messages]
    result = {
        "model": config.target.served_name,
        "messages": messages,
        "return_token_ids": True,
        **sampling(config.generate, request.row_id),
    }
    if request.tools:
        # The prompt shows the tools; the reply stays text, which needs no tool parser on the server.
        result |= {"tools": request.tools, "tool_choice": "none"}
    if config.target.chat_template_kwargs:
        result["chat_template_kwargs"] = config.target.chat_template_kwargs
    return result


async def check_server(client: Client, config: Config) -> int:
    """Check the server with one small request; returns its context length in tokens.

    Raises ConfigError for a wrong name, special token, token id or prompt end, ResumableError without an answer.
    """
    target = config.target
    target.check_special_tokens()
    row_id = contracts.row_id([], None, target.chat_template_kwargs, "preflight")
    hello = [{"role": "user", "content": "Say hello."}]
    request = Request(row_id, None, row_id, "preflight", 0, "regenerate", hello, None)
    small = chat_body(request, [], config) | {"max_tokens": min(16, config.generate.max_tokens)}
    try:
        listed = {model["id"]: model for model in (await client.get("/v1/models"))["data"]}
        if target.served_name not in listed:
            raise ConfigError(f"target.served_name is {target.served_name!r}, but the server serves {sorted(listed)}")
        for text, token in target.special_tokens.items():
            ids = await replay.tokenize(client, target, prompt=text, add_special_tokens=False)
            if ids != [token]:
                raise ConfigError(
                    f"target.special_tokens: {text!r} is {[token]}, but the server tokenizes it to {ids}"
                )
        reply = await client.post(CHAT, small, timeout=request_timeout(config.generate))
        row = rows.read_reply(reply, request, {}, target)
        if rows.thinks(target) and row.think_end is None and row.content and not row.reasoning:
            raise ConfigError(
                "the first answer has its reasoning in `content`: start the server with the model's own "
                "--reasoning-parser"
            )
    except RowError as error:
        if error.reason == "failed":
            raise ResumableError(
                f"the generate server did not answer ({error.detail}); run the same command again"
            ) from None
        hint = {
            "bad_reply": "vLLM 0.26 and newer return token ids with every reasoning parser",
            "prompt_mismatch": "correct target.prompt_suffix or target.chat_template_kwargs",
        }.get(error.reason, "correct the server or the config")
        raise ConfigError(f"the first request failed its checks ({error}); {hint}") from None
    return listed[target.served_name].get("max_model_len") or target.architecture.max_position_embeddings


def check_template(config: Config) -> None:
    """Raises ConfigError when a server started here would have no chat template, from a flag or the model folder."""
    folder, server = config.target.model, config.servers.generate
    own_template = server.flags.keys() & {"chat-template", "tokenizer", "tokenizer-mode"}
    if server.kind != "command" or own_template or not folder.is_dir() or (folder / "tekken.json").exists():
        return
    if any((folder / name).exists() for name in TEMPLATES):
        return
    for name in ("tokenizer_config.json", "processor_config.json"):
        try:
            if json.loads((folder / name).read_bytes()).get("chat_template"):
                return
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError, AttributeError):
            raise ConfigError(f"{folder / name} is not a JSON object; fetch the model again") from None
    raise ConfigError(
        f"target.model: {folder} has no chat template (chat_template.jinja, or chat_template in "
        "tokenizer_config.json), and without one a server refuses every conversation; set "
        "servers.generate.args.chat-template, or use the model's instruction-tuned version"
    )


def request_timeout(settings: Generate) -> float:
    return TIMEOUT_SECONDS + settings.max_tokens / settings.floor_tokens_per_second
