"""Convert one record of a prompt source to a conversation in OpenAI form.

Records may have any of the forms that public data sets use. Roles, tools and tool calls are repaired if that loses
nothing; any other record is rejected with the name of the field that cannot be read, before it is sent to a server.
"""

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from drafter.config import Column, Turns
from drafter.errors import RowError

OWN_ANSWER = {"role": "assistant", "content": None}  # placeholder for the model's own answer
CALL = "function_call"

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "function_call": CALL, "tool_call": CALL,
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
REASONING = ("reasoning", "reasoning_content")  # fields of a logged answer
INLINE_REASONING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
USUAL: dict[Column, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question", "instruction"),
    "turns": ("turns",),
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "answer": ("output", "response", "completion", "answer"),
    "tools": ("tools",),
}
QUESTIONS: tuple[Column, ...] = ("messages", "prompt", "turns")  # one of these holds the question
MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # columns that the text refers to
WANTED = (
    'a line can be {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}; '
    "every form is in docs/data_formats.md"
)
SHOWN = 60  # characters of a value in a message
NAMED = 8  # columns that a message names


class BrokenLine(str):
    """The text of a line that is not JSON; `why` says what is wrong with it."""

    why: str


class Conversation(NamedTuple):
    messages: list[dict]  # OWN_ANSWER between the user turns of a record without answers
    tools: list | None
    turns: Turns  # which turns are answered if the source does not say
    read_by: tuple[str, ...]  # the columns that were read


def bad_conversation(why: str) -> RowError:
    return RowError("bad_conversation", why)


def shorten(value: Any) -> str:
    """A value as text of at most SHOWN characters, for messages."""
    text = value if isinstance(value, str) else reprlib.repr(value)  # bounded in depth and length
    text = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
    return repr(text) if isinstance(value, str) else text


def read_conversation(
    record: Any, columns: Mapping[Column, str] | None = None, first_only: bool | None = False
) -> Conversation:
    """The conversation in a record; `columns` gives unusual column names.

    `first_only` reads up to the first user turn and ignores the rest; None: if that is the default of the record's
    form. Raises RowError (`no_user_turn`, `bad_conversation`).
    """
    columns = columns or {}
    if isinstance(record, BrokenLine):
        raise bad_conversation(record.why)
    if not isinstance(record, dict):
        raise bad_conversation(f"not a JSON object, but {shorten(record)}")
    what, column = _question(record, columns)
    for name in MEDIA:
        if record.get(name) and name not in columns.values():
            raise bad_conversation(f"{name}: the text refers to media, but only text can be asked")
    used, value = [column], record[column]
    if what != "messages" and (isinstance(value, str) or _all_text(value)):
        raw: list = [{"role": "user", "content": text} for text in ([value] if isinstance(value, str) else value)]
        if len(raw) == 1:
            raw = [*_single(record, columns, column, raw[0]["content"], used)]
        turns: Turns = "last"
    elif value is None or isinstance(value, list):
        raw, turns = value or [], "first" if column in ("conversations", "conversation") else "last"
    else:
        raise bad_conversation(f"{column}: {shorten(value)} is neither text nor a list of messages")
    system = _text_beside(record, columns, "system", used)
    if system and not (raw and _role(raw[0]) == "system"):
        raw = [{"role": "system", "content": system}, *raw]
    messages = _read_messages(raw, column, turns == "first" if first_only is None else first_only)
    if OWN_ANSWER in messages:
        turns = "all"
    return Conversation(messages, _read_tools(record, columns, used), turns, tuple(used))


def _question(record: dict, columns: Mapping[Column, str]) -> tuple[Column, str]:
    """The kind of the question's column, and its name: the first that is not empty."""
    named = [(what, columns[what]) for what in QUESTIONS if what in columns]
    candidates = named or [(what, name) for what in QUESTIONS for name in USUAL[what]]
    there = [each for each in candidates if each[1] in record]
    if not there:
        wanted = ", ".join(name for _, name in candidates)
        raise RowError("no_user_turn", f"has none of the columns {wanted}; it has {join_names(record)}")
    return next((each for each in there if record[each[1]]), there[0])


def join_names(columns: Iterable) -> str:
    """The first few column names, for a message."""
    some = [shorten(str(name))[1:-1] for name in islice(columns, NAMED + 1)]
    return ", ".join(some[:NAMED]) + (" and others" if len(some) > NAMED else "") if some else "nothing"


def _all_text(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _single(record: dict, columns: Mapping, column: str, text: str, used: list[str]) -> Iterator[dict]:
    """Messages of a question given in single columns, with its answer if there is one."""
    if "input" in columns or "prompt" not in columns:
        more = _text_beside(record, columns, "input", used)
        text = f"{text.strip()}\n\n{more}" if more else text
    yield {"role": "user", "content": text}
    candidates = [columns["answer"]] if "answer" in columns else USUAL["answer"]
    answers = [record[name] for name in candidates if isinstance(record.get(name), str) and record[name].strip()]
    if answers:
        yield {"role": "assistant", "content": answers[0]}


def _text_beside(record: dict, columns: Mapping, what: Column, used: list[str]) -> str:
    """The text in another column than the question's; "" if there is none."""
    candidates = [columns[what]] if what in columns else USUAL[what]
    name = next((name for name in candidates if record.get(name)), None)
    if name is None:
        return ""
    if not isinstance(record[name], str):
        without = "; name the question's column with the source's `columns` to ask without it"
        raise bad_conversation(f"{name}: {shorten(record[name])} is not text{without if what == 'input' else ''}")
    used += [name] if record[name].strip() else []
    return record[name].strip()


def _role(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return None
    spelling = _first(entry, "role", "from")
    return ROLES.get(spelling.strip().casefold()) if isinstance(spelling, str) else None


def _first(entry: dict, *names: str) -> Any:
    """The first value that is not null (Parquet fills missing values with null)."""
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def _read_messages(raw: list, field: str, first_only: bool) -> list[dict]:
    users = [i for i, entry in enumerate(raw) if _role(entry) == "user"]
    answered = any(_role(entry) in ("assistant", CALL) for entry in raw[users[0] :]) if users else True
    messages: list[dict] = []
    awaited: list[str] = []  # ids of calls whose results come next
    for index, entry in enumerate(raw):
        asked = any(m["role"] == "user" and m["content"] for m in messages)
        if first_only and asked and (_role(entry) != "user" or not answered):
            break
        message = _read_message(entry, f"{field}[{index}]", awaited)
        previous = messages[-1]["role"] if messages else None
        role, content = message["role"], message["content"]
        if role == "system":
            if previous not in (None, "system"):
                raise bad_conversation(f"{field}[{index}]: a system prompt inside the conversation")
            if content:
                messages.append(message)
        elif previous in (None, "system") and role != "user":
            if role != "assistant":
                raise bad_conversation(f"{field}[{index}]: the conversation begins with a {role} turn")
        elif role == "user" and previous == "user":
            _add_user(messages, message, answered)
        elif role == "assistant" and previous == "assistant":
            raise bad_conversation(f"{field}[{index}]: two assistant turns in a row")
        else:
            messages.append(message)
    texts = [m["content"] for m in messages if m["role"] == "user"]
    if not any(texts):
        raise RowError("no_user_turn", f"{field}: no user turn with text")
    if not all(texts):
        raise bad_conversation(f"{field}: a user turn is blank")
    return messages


def _add_user(messages: list[dict], message: dict, answered: bool) -> None:
    """Add a user turn that follows a user turn: its second part, or in a record without answers the next turn."""
    last, content = messages[-1]["content"], message["content"]
    if not content:
        return
    if answered or not last:
        messages[-1]["content"] = f"{last}\n\n{content}".strip()
    else:
        messages += [dict(OWN_ANSWER), message]


def _read_message(entry: Any, place: str, awaited: list[str]) -> dict:
    if not isinstance(entry, dict):
        raise bad_conversation(f"{place}: {shorten(entry)} is not a message")
    role = _role(entry)
    if role is None:
        raise bad_conversation(f"{place}: unknown role {shorten(_first(entry, 'role', 'from'))}")
    content = _content(_first(entry, "content", "value"), place).strip()
    if role == CALL:
        calls = _calls_in_text(content, place)
        awaited[:] = [call["id"] for call in calls]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    message: dict[str, Any] = {"role": role, "content": content}
    for key in ("name", "tool_call_id"):
        if entry.get(key):
            if not isinstance(entry[key], str):
                raise bad_conversation(f"{place}.{key}: {shorten(entry[key])} is not text")
            message[key] = entry[key]
    if role == "assistant" and (reasoning := _first(entry, *REASONING)):
        if not isinstance(reasoning, str):
            raise bad_conversation(f"{place}: the reasoning is not text but {shorten(reasoning)}")
        message["reasoning"] = reasoning.strip()
    if entry.get("tool_calls"):
        message["tool_calls"] = _read_calls(entry["tool_calls"], f"{place}.tool_calls")
    if role == "tool" and awaited:
        message.setdefault("tool_call_id", awaited.pop(0))
    return message


def _content(content: Any, place: str) -> str:
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type", part) if isinstance(part, dict) else part
                raise bad_conversation(
                    f"{place}.content[{index}]: {shorten(kind)} is not text, but only text can be asked"
                )
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise bad_conversation(f"{place}: the content is not text but {shorten(content)}")
    return content or ""


def without_reasoning(messages: list[dict]) -> list[dict]:
    """As a model sees them in its history."""
    return [{key: value for key, value in message.items() if key != "reasoning"} for message in messages]


def with_inline_reasoning(messages: list[dict]) -> list[dict]:
    """Takes <think>...</think> that begins an answer for its reasoning. Raises RowError for other such tags."""
    result = []
    for number, message in enumerate(messages):
        content = message["content"] or ""
        if message["role"] == "assistant" and (found := INLINE_REASONING.fullmatch(content)):
            message = message | {"reasoning": found[1].strip(), "content": (content := found[2].strip())}
        if message["role"] == "assistant" and ("<think>" in content or "</think>" in content):
            raise bad_conversation(f"messages[{number}].content: a <think> or </think> without its counterpart")
        result.append(message)
    return result


# ---- tools


def _calls_in_text(text: str, place: str) -> list[dict]:
    """The calls in a message that open data sets write as JSON text."""
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        raise bad_conversation(f"{place}: the function call is not JSON: {shorten(text)}") from None
    return _read_calls([{"function": call} for call in (calls if isinstance(calls, list) else [calls])], place)


def _read_calls(calls: Any, place: str) -> list[dict]:
    """Calls with the id, type and text arguments that a server requires."""
    if not isinstance(calls, list):
        raise bad_conversation(f"{place}: {shorten(calls)} is not a list of calls")
    number = place.partition("[")[2].partition("]")[0]
    return [_read_call(call, f"{place}[{i}]", f"call_{number}_{i}") for i, call in enumerate(calls)]


def _read_call(call: Any, place: str, default_id: str) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_conversation(
            f'{place}: {shorten(call)} is not a call; use {{"function": {{"name": ..., "arguments": ...}}}}'
        )
    if not isinstance(call.get("id"), str | None) or call.get("type", "function") != "function":
        raise bad_conversation(f"{place}: {shorten(call)}: its id must be text and its type function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False, default=str)
    fixed = {"id": call.get("id") or default_id, "type": "function"}
    return call | fixed | {"function": {**function, "arguments": arguments}}


def _read_tools(record: dict, columns: Mapping[Column, str], used: list[str]) -> list | None:
    """The tools as a server accepts them; a bare function schema is put under `function`."""
    column = columns.get("tools", "tools")
    tools = _from_json(record.get(column), column)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise bad_conversation(f"{column}: {shorten(tools)} is not a list of tools")
    used.append(column)
    return [_read_tool(_from_json(tool, column), f"{column}[{index}]") for index, tool in enumerate(tools)]


def _from_json(value: Any, place: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value if not isinstance(value, str) else None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise bad_conversation(f"{place}: {shorten(value)} is not JSON") from None


def _read_tool(tool: Any, place: str) -> dict:
    if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str):
        kept = {key: value for key, value in tool.items() if key != "type"}
        tool = {"type": "function", "function": kept}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_conversation(
            f'{place}: {shorten(tool)} is not a tool; use {{"type": "function", "function": {{"name": ...}}}}'
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise bad_conversation(f"{place}.function.parameters: {shorten(function['parameters'])} is not a JSON schema")
    if not isinstance(function.get("description"), str | None):
        raise bad_conversation(f"{place}.function.description: {shorten(function['description'])} is not text")
    if tool.get("type", "function") != "function":
        raise bad_conversation(f"{place}.type: {shorten(tool['type'])}; servers accept functions only")
    return {"type": "function"} | tool
