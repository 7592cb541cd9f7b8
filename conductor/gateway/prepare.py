"""From what a client sent to the work that runs: tokens, sampling parameters, and every check that needs the model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from conductor.gateway.reply import SEED_RANGE, Work
from conductor.gateway.schema import ChatCompletionRequest, CompletionRequest, Prompt
from engine.tokenizer import Tokenizer
from springtide.errors import InvalidRequest, ModelNotFound
from springtide.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for plain completions."""
MAX_LOGIT_BIAS = 100.0
ROLES = ("system", "developer", "user", "assistant")
MAX_GENERATIONS = 1024
"""Of one API request."""
_THREAD_CHARACTERS = 4096
"""Longer texts are tokenised on a thread: they would hold up every stream."""


class Preparer:
    def __init__(self, model_name: str, context_length: int, vocab_size: int, tokenizer: Tokenizer) -> None:
        self.model_name = model_name
        self.context_length = context_length
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name != self.model_name:
            raise ModelNotFound(
                f"model {name!r} does not exist; this server has {self.model_name!r}", param="model", code="model_not_found"
            )

    async def chat(self, body: ChatCompletionRequest, request_id: str, tenant: str, traceparent: str) -> Work:
        """Raises InvalidRequest."""
        self.check_model(body.model)
        prompt = await self.chat_tokens([(message.role, message.content) for message in body.messages])
        sampling = self.sampling(
            [prompt],
            max_tokens=body.wanted_tokens,
            default_max_tokens=self.context_length,
            prompt_field="messages",
            values={**_sampling_values(body), "logprobs": body.num_top_logprobs},
        )
        return Work(request_id, (prompt,), body.n, sampling, body.stop, tenant, body.priority, traceparent, body.deadline_ms or 0.0)

    async def completion(self, body: CompletionRequest, request_id: str, tenant: str, traceparent: str) -> Work:
        """Raises InvalidRequest."""
        self.check_model(body.model)
        if len(body.prompt) * body.n > MAX_GENERATIONS:
            raise InvalidRequest(
                f"prompt: {len(body.prompt)} prompts with n={body.n} are more than {MAX_GENERATIONS} outputs in one request", param="prompt"
            )
        prompts = tuple([await self.prompt_tokens(prompt, "prompt") for prompt in body.prompt])
        sampling = self.sampling(
            prompts,
            max_tokens=body.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            prompt_field="prompt",
            values={**_sampling_values(body), "logprobs": body.num_top_logprobs},
        )
        return Work(request_id, prompts, body.n, sampling, body.stop, tenant, body.priority, traceparent, body.deadline_ms or 0.0)

    async def chat_tokens(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Of a conversation of (role, content), ready for the assistant's answer. Raises InvalidRequest."""
        for number, (role, _) in enumerate(messages):
            if role not in ROLES:
                raise InvalidRequest(
                    f"messages[{number}].role must be one of {', '.join(ROLES)}, not {role!r}", param=f"messages[{number}].role"
                )
        if not messages:
            raise InvalidRequest("messages must hold at least one message", param="messages")
        # What OpenAI calls a developer's message now is what chat templates know as the system's.
        conversation = [{"role": "system" if role == "developer" else role, "content": content} for role, content in messages]
        if sum(len(content) for _, content in messages) > _THREAD_CHARACTERS:
            return tuple(await asyncio.to_thread(self._tokenizer.apply_chat_template, conversation))
        return tuple(self._tokenizer.apply_chat_template(conversation))

    async def prompt_tokens(self, prompt: Prompt, field: str) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            self._check_ids(prompt, field)
            return prompt
        if len(prompt) > _THREAD_CHARACTERS:
            return tuple(await asyncio.to_thread(self._tokenizer.encode, prompt))
        return tuple(self._tokenizer.encode(prompt))

    def sampling(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | None,
        default_max_tokens: int,
        prompt_field: str,
        values: dict[str, Any],
    ) -> SamplingParams:
        """`values` are SamplingParams' other fields; a seed of None is drawn. Raises InvalidRequest, naming the field."""
        self._check_ids(values["stop_token_ids"], "stop_token_ids")
        self._check_ids(values["logit_bias"], "logit_bias")
        if any(not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS for bias in values["logit_bias"].values()):
            raise InvalidRequest(f"logit_bias values must be between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}", param="logit_bias")
        seed = secrets.randbits(63) if values["seed"] is None else values["seed"] % SEED_RANGE
        allowed = self._allowed_tokens(prompts, max_tokens, default_max_tokens, prompt_field)
        try:
            params = SamplingParams(**{**values, "seed": seed, "max_tokens": allowed})
            # What the nodes will see: a value that is in range here but not in single precision is refused here too.
            return SamplingParams.from_proto(params.to_proto())
        except ValueError as error:
            raise InvalidRequest(str(error), param=str(error).split()[0]) from None

    def _allowed_tokens(self, prompts: Sequence[Sequence[int]], wanted: int | None, default: int, prompt_field: str) -> int:
        if not all(prompts):
            raise InvalidRequest(f"{prompt_field} must have at least one token", param=prompt_field)
        longest = max(len(prompt) for prompt in prompts)
        left = self.context_length - longest
        if left >= (wanted or 1):
            return wanted or min(default, left)
        if wanted:
            asked = f"you asked for {longest + wanted} tokens ({longest} in {prompt_field}, {wanted} for the output)"
        else:
            asked = f"{prompt_field} alone takes {longest} tokens, which leaves none for the output"
        message = f"this model's maximum context length is {self.context_length} tokens, but {asked}"
        raise InvalidRequest(message, param=prompt_field, code="context_length_exceeded")

    def _check_ids(self, token_ids: Sequence[int] | Mapping[int, float], field: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(f"{field}: token ids must be between 0 and {self._vocab_size - 1}, not {token_id}", param=field)


def _sampling_values(body: ChatCompletionRequest | CompletionRequest) -> dict[str, Any]:
    return {
        "temperature": body.temperature,
        "top_k": max(body.top_k, 0),
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": body.seed,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "stop_token_ids": tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "logit_bias": body.logit_bias,
    }
