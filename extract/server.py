"""Answers from a running OpenAI-compatible server (vLLM, SGLang) instead of our own decoding.

The server gets token ids, made by the same renderer as everything else, through `/v1/completions`, and gives token ids
back where it can (vLLM: `return_token_ids`). A server that returns text alone has its answer tokenized once; the stop
token is added when the server says that it stopped. The client talks to the URL it was given and to nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.load import UserError
from configs.schema import Config
from extract.regenerate import Reason
from extract.vllm_files import discard, named_file

ATTEMPTS = 6  # with waits of 1, 2, 4, 8, 16 s between: half a minute of a restarting server

# A server takes what a request leaves out from the target's generation_config.json, where a repetition penalty would
# change even greedy answers. So every field is sent, and these values turn it off.
NO_FILTERS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


# What is used of a server's answers. It may say more; what is not of these types ends in a sentence, not in a trace.
TokenIds = list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]


class Card(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: str
    owned_by: str | None = None


class Models(BaseModel):
    data: list[Card] = []


class Stored(BaseModel):
    hidden_states_path: str | None = None


class Choice(BaseModel):
    finish_reason: str | None = None
    text: str | None = None
    token_ids: TokenIds | None = None


class Completion(BaseModel):
    choices: list[Choice] = Field(min_length=1)
    kv_transfer_params: Stored | None = None


Shape = TypeVar("Shape", bound=BaseModel)


class Client:
    """HTTP to one server. Tries again while it is unreachable, overloaded or restarting; its refusals are final."""

    def __init__(self, url: str, attempts: int = ATTEMPTS) -> None:
        self.url, self.attempts = url.rstrip("/").removesuffix("/v1"), attempts
        headers = {}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            self.http = httpx.Client(
                base_url=self.url, headers=headers, timeout=600, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise UserError(f"--server {url} is no address: {error}") from None

    def model(self) -> dict[str, Any]:
        """The card of the first model that it lists."""
        models = self.read(Models, "GET", "/v1/models").data
        if not models:
            raise UserError(f"the server at {self.url} lists no model at /v1/models")
        return models[0].model_dump()

    def read(
        self, shape: type[Shape], method: str, path: str, body: dict[str, Any] | None = None
    ) -> Shape:
        """The JSON answer as a `shape`. UserError when it is none."""
        answer = self._call(method, path, body, lambda response: response.json())
        try:
            return shape.model_validate(answer)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise UserError(
                f"the server at {self.url} answers {path} in another way than vLLM and SGLang do: {where}: "
                f"{first['msg']}; is it the right address?"
            ) from None

    def text(self, path: str) -> str:
        return self._call("GET", path, None, lambda response: response.text)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The only choice of a completion, with token ids and the file of hidden states where the server gives them."""
        body = {"return_token_ids": True, "skip_special_tokens": False, **NO_FILTERS, **body}
        answer = self.read(Completion, "POST", "/v1/completions", body).model_dump()
        return {**answer["choices"][0], "kv_transfer_params": answer["kv_transfer_params"]}

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[httpx.Response], Any],
    ) -> Any:
        for attempt in range(self.attempts):
            try:
                response = self.http.request(method, path, json=body)
                if response.status_code < 500 and response.status_code != 429:
                    if response.status_code != 200:
                        text = response.text.strip()[:200]
                        raise UserError(
                            f"the server at {self.url} refused {path}: {response.status_code} {text}"
                        )
                    return read(response)
                problem = f"status {response.status_code}"
            except (httpx.HTTPError, ValueError, RecursionError) as error:
                problem = str(error) or type(error).__name__
            if attempt + 1 < self.attempts:
                time.sleep(2**attempt)
        tried = f"in {self.attempts} attempts " if self.attempts > 1 else ""
        raise UserError(
            f"the server at {self.url} did not answer {path} {tried}({problem}); "
            "run the same command again when it is up"
        )


class Server:
    """Answers prompts for extraction, held-out ones greedily.

    A server that stores hidden states does so for answers too; these files are deleted in `states_folder`.
    """

    def __init__(
        self,
        url: str,
        config: Config,
        tokenizer: Any,
        *,
        held_out: bool = False,
        states_folder: Path | None = None,
    ) -> None:
        self.client, self.tokenizer, self.states_folder = Client(url), tokenizer, states_folder
        self.limit, self.temperature = config.data.max_new_tokens, config.data.temperature
        if held_out:
            self.limit, self.temperature = config.eval.max_new_tokens, 0.0
        self.name = str(self.client.model()["id"])

    def answer(self, prompts: Sequence[list[int]], seed: int) -> list[tuple[list[int], Reason]]:
        """One request a prompt, all of a batch at once: the server batches better than we could."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(lambda p: self._one(p, seed), prompts))

    def _one(self, prompt: list[int], seed: int) -> tuple[list[int], Reason]:
        choice = self.client.complete(
            {
                "model": self.name,
                "prompt": prompt,
                "max_tokens": self.limit,
                "temperature": self.temperature,
                "seed": seed % 2**31,
            }
        )
        if self.states_folder and (file := named_file(choice, self.states_folder)):
            discard(file, "an answer")
        reason: Reason = "stop" if choice.get("finish_reason") == "stop" else "length"
        ids = choice["token_ids"]
        if ids is None:
            if choice["text"] is None:
                raise UserError(
                    f"the server at {self.client.url} answers with neither text nor token ids"
                )
            ids = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        stop = self.tokenizer.eos_token_id
        if reason == "stop" and stop is not None and (not ids or ids[-1] != stop):
            ids = [*ids, stop]
        return [int(i) for i in ids], reason
