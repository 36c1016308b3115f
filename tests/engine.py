"""A small engine for tests of stage 02: transformers computes, the real connector writes, HTTP carries.

What is missing of vLLM is what the faults need no engine for. `plan` decides, request by request, what goes wrong.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.connector_rig import Rig


class Engine:
    """Serves the tiny flat model on a free port of 127.0.0.1, in a thread."""

    def __init__(self, model: Path, root: Path, captured=tiny_models.LAYER_IDS, connector=None, port=0, **extra):
        self.port = port
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.captured = sorted(captured)
        self.rig = Rig(
            root, self.captured, tiny_models.HIDDEN, blocks=4096, connector=connector, model=model, **extra
        )
        self.plan: Callable[[dict], str | None] = lambda body: None  # "hang", "500", "no file", "no reply"
        self.sick = False  # fails every request, whatever it asks for
        self.requests: list[dict] = []
        self.version = "0.32.0"
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Engine":
        self._thread.start()
        self._started.wait(30)
        return self

    def __exit__(self, *_exc) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self.rig.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", lambda _request: self._reply({}))
        app.router.add_get("/version", lambda _request: self._reply({"version": self.version}))
        app.router.add_get("/v1/models", lambda _r: self._reply({"data": [{"id": "tiny", "max_model_len": 40000}]}))
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=1
        )  # as vLLM aborts requests without a client
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        self._loop.run_until_complete(site.start())
        self.port = site._server.sockets[0].getsockname()[1]
        self._started.set()
        ticking = self._loop.create_task(self._tick())
        self._loop.run_forever()
        ticking.cancel()
        self._loop.run_until_complete(runner.cleanup())

    async def _tick(self) -> None:
        """An engine steps on while blocks are held."""
        while True:
            await asyncio.sleep(0.005)
            await asyncio.to_thread(self._step)

    def _step(self) -> None:
        with self._lock:
            self.rig.step()

    async def _reply(self, body: dict, status: int = 200) -> web.Response:
        return web.json_response(body, status=status)

    async def _complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        fault = None
        if "kv_transfer_params" in body:
            self.requests.append(body)
            fault = self.plan(body)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "500" or self.sick:
            return await self._reply({"error": {"message": "asked to fail"}}, 500)
        prompts = body["prompt"]
        if isinstance(prompts, str):
            prompts = [[1, 2, 3]]
        prompts = prompts if isinstance(prompts[0], list) else [prompts]
        return await self._reply(await asyncio.to_thread(self._compute, body, prompts, fault))

    @torch.no_grad()
    def _compute(self, body: dict, prompts: list[list[int]], fault: str | None) -> dict:
        params, choices, answer = body.get("kv_transfer_params"), [], None
        with self._lock:  # one engine, one step at a time
            for number, ids in enumerate(prompts):
                logits, hidden = self._forward(ids)
                choices.append(
                    {
                        "index": number,
                        "token_ids": [0],
                        "text": "",
                        "finish_reason": "length",
                        "prompt_logprobs": None,
                    }
                )
                if body.get("logprobs"):
                    best = logits[-1].log_softmax(-1).topk(body["logprobs"])
                    table = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                    choices[-1]["logprobs"] = {"top_logprobs": [{f"token_id:{t}": value for t, value in table}]}
                if body.get("prompt_logprobs"):
                    choices[-1]["prompt_logprobs"] = [None, *map(_entry, logits.log_softmax(-1), ids[1:])]
                if params and fault != "no file":
                    blocks = self.rig.fill(hidden)
                    _id, _kept, reply = self.rig.finish(ids, params, blocks)
                    answer = answer or reply
                elif params:
                    answer = self.rig.scheduler._reply(None)
            self.rig.step()
        return {"choices": choices, "kv_transfer_params": answer}

    def _forward(self, ids: list[int]):
        """Logits [T, V], and states [T, L, H] of the captured layers; the last one before the final norm."""
        kept = {}
        hook = self.model.model.norm.register_forward_hook(lambda _m, inputs, _o: kept.update(final=inputs[0]))
        output = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        hook.remove()
        layers = [*output.hidden_states[:-1], kept["final"]]
        return output.logits[0], torch.stack([layers[i][0] for i in self.captured], dim=1).bfloat16()


def _entry(log_probs: torch.Tensor, token: int) -> dict:
    best = int(log_probs.argmax())
    entry = {str(best): {"logprob": log_probs[best].item(), "rank": 1, "decoded_token": ""}}
    if token != best:
        rank = int((log_probs > log_probs[token]).sum()) + 1
        entry[str(token)] = {"logprob": log_probs[token].item(), "rank": rank, "decoded_token": ""}
    return entry


if __name__ == "__main__":  # in a separate process, to be killed: MODEL ROOT PORT, seconds that a request takes
    torch.set_num_threads(1)
    with Engine(Path(sys.argv[1]), Path(sys.argv[2]), port=int(sys.argv[3])) as engine:
        engine.plan = lambda _body: time.sleep(float(sys.argv[4]))
        print("ready", flush=True)
        engine._thread.join()
