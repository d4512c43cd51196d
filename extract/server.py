"""Answers from a running OpenAI-compatible server (vLLM, SGLang) instead of our own decoding.

The server gets token ids, made by the same renderer as everything else, through `/v1/completions`, and gives token ids
back where it can (vLLM: `return_token_ids`). A server that returns text alone has its answer tokenized once; the stop
token is added when the server says that it stopped. The client talks to the URL it was given and to nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from configs.load import UserError
from configs.schema import Config
from extract.regenerate import Reason

ATTEMPTS = 6  # with waits of 1, 2, 4, 8, 16 s between: half a minute of a restarting server


class Server:
    def __init__(self, url: str, config: Config, tokenizer: Any) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.tokenizer = tokenizer
        self.limit, self.temperature = config.data.max_new_tokens, config.data.temperature
        headers = {}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=600, trust_env=False)
        models = self._request("GET", "/v1/models", None).get("data") or []
        if not models:
            raise UserError(f"the server at {url} lists no model at /v1/models")
        self.name = str(models[0]["id"])

    def answer(self, prompts: Sequence[list[int]], seed: int) -> list[tuple[list[int], Reason]]:
        """One request a prompt, all of a batch at once: the server batches better than we could."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(lambda p: self._one(p, seed), prompts))

    def _one(self, prompt: list[int], seed: int) -> tuple[list[int], Reason]:
        body = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": self.limit,
            "temperature": self.temperature,
            "seed": seed % 2**31,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        choices = self._request("POST", "/v1/completions", body).get("choices") or []
        if not choices:
            raise UserError(f"the server at {self.url} answered a completion without choices")
        choice = choices[0]
        reason: Reason = "stop" if choice.get("finish_reason") == "stop" else "length"
        ids = choice.get("token_ids")
        if ids is None:
            ids = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        stop = self.tokenizer.eos_token_id
        if reason == "stop" and stop is not None and (not ids or ids[-1] != stop):
            ids = [*ids, stop]
        return [int(i) for i in ids], reason

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Try again while the server is unreachable, overloaded or restarting; its refusals are final."""
        for attempt in range(ATTEMPTS):
            try:
                response = self.client.request(method, path, json=body)
                if response.status_code < 500 and response.status_code != 429:
                    if response.status_code != 200:
                        text = response.text.strip()[:200]
                        raise UserError(
                            f"the server at {self.url} refused {path}: {response.status_code} {text}"
                        )
                    out: dict[str, Any] = response.json()
                    return out
                problem = f"status {response.status_code}"
            except (httpx.TransportError, ValueError) as error:
                problem = str(error) or type(error).__name__
            if attempt + 1 < ATTEMPTS:
                time.sleep(2**attempt)
        raise UserError(
            f"the server at {self.url} did not answer {path} in {ATTEMPTS} attempts ({problem}); "
            "answers so far are kept, run the same command again when it is up"
        )
