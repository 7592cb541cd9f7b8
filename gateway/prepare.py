"""From what a client asks for, through whatever API, to the work that runs: tokens, sampling parameters, what one request may ask for at
most, and every check that needs the model."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from engine.tokenizer.tokenizer import StreamingDetokenizer, Tokenizer
from gateway import events as ev
from gateway.accounts.limiter import NO_RECEIPT, Receipt
from gateway.accounts.usage import NOBODYS_USAGE, UsageRow
from gateway.api_request import ApiRequest, Conversation, Prompt, Texts, ToolMode
from gateway.caching.context import Use
from gateway.caching.marks import MarkedPrefix, marked_prefixes
from gateway.conversation import ChatModel
from gateway.grammars import Beforehand, constraint, lark_constraint, schema_in_lark
from gateway.output import PromptOutput
from gateway.tool_calls.reading import PLAIN, Reading
from springtide.errors import InvalidRequest, ModelNotFound
from springtide.ids import RequestId
from springtide.protocol.sampling import Grammar, LogitBias, SamplingParams, TokenIds
from springtide.protocol.scheduling import NO_TERMS, Terms
from springtide.protocol.wire import SAMPLING_PARAMS
from springtide.rpc.channels import MAX_MESSAGE_BYTES

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for plain completions."""
MAX_GENERATIONS = 1024
"""Of one API request."""
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
"""Each output token is looked for among them."""
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1 << 16
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 21
"""Log-probabilities of prompt tokens in one answer: 16 MiB between nodes, some 150 MB of JSON."""
MAX_ALLOWED_TOKENS = 1 << 18
MAX_BAD_WORDS = 128
"""Each output token is looked for among them."""
MAX_BAD_WORD_LENGTH = 256
_NOT_AS_THEY_ARE = ("max_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words", "grammar")
SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in _NOT_AS_THEY_ARE)
"""Those that clients set as they are: how many tokens they may have is for the context to say, too, and `prompt_logprobs` for bounds."""
SEED_RANGE = 1 << 64
BYTES_A_TOKEN = 256
"""Taken for the longest token where the tokenizer promises nothing."""
_ESCAPED_BYTES = 6
"""Of one byte of text, as JSON may write it: `\\u0000`."""
_BYTES_A_MESSAGE = 64
"""Of what is around a chat message's text in JSON, or of a token id with whatever space is left between them."""
_BYTES_A_BIAS = 32
_FIXED_BYTES = 64 << 10
_FIXED_VALUES = 1 << 15

NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may be at most, from what the model's context could ever hold of it."""

    max_body_bytes: int
    """Of JSON: what fills the context fits however it is written, with as many biases as there may be."""
    max_message_bytes: int
    """The same of a message over gRPC."""
    max_values: int
    """Lists, objects, and what is in them, of one body. Python holds up everybody for 0.2 to 1 us with each while it reads them."""

    @classmethod
    def of(cls, context_length: int, vocab_size: int, most_bytes_a_token: int | None) -> Bounds:
        biases = min(vocab_size, MAX_BIASED_TOKENS)
        text = context_length * (most_bytes_a_token or BYTES_A_TOKEN)
        body = _ESCAPED_BYTES * text + _BYTES_A_MESSAGE * context_length + _BYTES_A_BIAS * biases + _FIXED_BYTES
        message = text + _BYTES_A_MESSAGE // 4 * context_length + _BYTES_A_BIAS // 2 * biases + _FIXED_BYTES
        return cls(min(body, MAX_MESSAGE_BYTES), min(message, MAX_MESSAGE_BYTES), _FIXED_VALUES + 4 * context_length + 2 * biases)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an API request."""

    request_id: str
    requested_at: float
    """When it began to come, on the runner's clock."""
    tenant: str = ""
    traceparent: str = ""
    key_id: str = ""
    """Of the API key that it came with, if there was one."""
    endpoint: str = ""
    """What was called, for the books of usage."""
    operation: str = "chat"
    """What it does, by OpenTelemetry's name (`gen_ai.operation.name`)."""
    batch: bool = False
    """It is part of a batch."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid API request, reduced to what runs: every prompt `n` times, of which the `kept` likeliest outputs are wanted."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    kept: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    tenant: str = ""
    terms: Terms = NO_TERMS
    operation: str = "chat"
    """As of Origin."""
    traceparent: str = ""
    requested_at: float | None = None
    marks: tuple[tuple[MarkedPrefix, ...], ...] = ()
    """Of each prompt, if any of them wants something to be kept."""
    use: Use | None = None
    """The context cache that the request begins with."""
    prompt_only: bool = False
    """Prompts are computed, and no output is wanted (`ev.Generation.prompt_only`)."""
    salt: str = ""
    """Only requests of the same tenant with the same salt share blocks."""
    grammar_field: str = ""
    """What the client calls what `sampling.grammar` is made of."""
    reading: Reading = PLAIN
    """How the outputs are read."""
    skip_special_tokens: bool = True
    include_stop: bool = False
    """What stops an output, a stop string or token, is part of its text."""
    told: tuple[PromptOutput, ...] = ()
    """Of each prompt what the answer tells of it, but for log-probabilities, which its first choice brings. Empty: it tells nothing."""
    usage_row: UsageRow = NOBODYS_USAGE
    """Where what it takes is written down."""
    receipt: Receipt = NO_RECEIPT
    """What was taken of its caller's limits for it."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def generation(self, index: int, *, accepted: bool) -> ev.Generation:
        """The generation of choice `index`: choice i of prompt p is number p * n + i, and draws with seed + i."""
        prompt, choice = divmod(index, self.n)
        single = len(self.prompts) * self.n == 1
        sampling = replace(self.sampling, seed=(self.sampling.seed + choice) % SEED_RANGE)
        if choice:
            # A prompt is scored once; the further choices find it in the pool.
            sampling = replace(sampling, prompt_logprobs=None)
        return ev.Generation(
            request_id=RequestId(self.request_id if single else f"{self.request_id}/{index}"),
            prompt_ids=self.prompts[prompt],
            sampling=sampling,
            tenant=self.tenant,
            terms=self.terms,
            operation=self.operation,
            traceparent=self.traceparent,
            requested_at=self.requested_at,
            accepted=accepted,
            prompt_only=self.prompt_only,
            salt=self.salt,
        )


class Preparer:
    """Makes what runs of what is asked for. Thread-safe. All of it takes time in proportion to the request's size, up to a second."""

    def __init__(
        self,
        model_name: str,
        context_length: int,
        vocab_size: int,
        tokenizer: Tokenizer,
        quota_tokens: Mapping[str, int] | None = None,
        chat_model: ChatModel | None = None,
        default_sampling: Mapping[str, float] = NO_DEFAULTS,
        block_tokens: int = 0,
    ) -> None:
        """`quota_tokens`: most tokens of one prompt and its output that a tenant's quota holds, `*` being every other tenant.
        `default_sampling`: SamplingParams' fields by name, for what a request leaves out. `block_tokens` are those of the pool; 0: nothing
        is ever kept."""
        self._block_tokens = block_tokens
        self._chat_model = chat_model or ChatModel(tokenizer)
        self.default_sampling = default_sampling
        self._quota_tokens = dict(quota_tokens or {})
        self.model_name = model_name
        self.context_length = context_length
        self.bounds = Bounds.of(context_length, vocab_size, tokenizer.most_bytes_a_token)
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name != self.model_name:
            raise ModelNotFound(
                f"model {name[:100]!r} does not exist; this server has {self.model_name!r}", param="model", code="model_not_found"
            )

    def prepared(self, request: ApiRequest, origin: Origin) -> PreparedRequest:
        """What runs. Raises InvalidRequest, naming the field as the client does, and ModelNotFound."""
        try:
            return self._prepared(request, origin)
        except InvalidRequest as error:
            raise in_the_clients_words(error, request.names) from None

    def tokens(self, request: ApiRequest) -> tuple[tuple[int, ...], ...]:
        """The tokens of each prompt; of a conversation, ready for the assistant's answer. Raises InvalidRequest as `prepared` does."""
        try:
            return self._tokens(request)[0]
        except InvalidRequest as error:
            raise in_the_clients_words(error, request.names) from None

    def _prepared(self, request: ApiRequest, origin: Origin) -> PreparedRequest:
        self.check_model(request.model)
        if len(request.stop) > MAX_STOP_STRINGS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in request.stop):
            raise InvalidRequest(f"stop may hold at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters", param="stop")
        if request.cache.named:
            raise InvalidRequest("context caches cannot be named here", param="cache_id")
        self._check_sampling(request)
        prompts, reading = self._tokens(request)
        self._check_scoring(request, prompts)
        allowed = self._allowed_tokens(request, prompts, origin.tenant)
        return PreparedRequest(
            request_id=origin.request_id,
            prompts=prompts,
            n=max(request.n, request.best_of),
            kept=request.n,
            sampling=self._sampling(request, max(1, allowed), self._grammar(request, reading)),
            stop=request.stop,
            tenant=origin.tenant,
            terms=request.terms,
            operation=origin.operation,
            traceparent=origin.traceparent,
            requested_at=origin.requested_at,
            prompt_only=allowed == 0,
            marks=self._marks(request, prompts),
            salt=request.cache.salt,
            grammar_field=_format_field(request),
            reading=reading,
            skip_special_tokens=request.skip_special_tokens,
            include_stop=request.include_stop,
            usage_row=UsageRow(origin.tenant, origin.key_id, self.model_name, origin.endpoint, origin.batch),
            told=self._told(request, prompts),
        )

    def rendered(self, conversation: Conversation) -> tuple[int, ...]:
        """Its tokens, of which there are few enough to go on from. Raises InvalidRequest."""
        self.check_count(len(conversation.messages), "messages")
        tokens = self._render(conversation)
        if len(tokens) >= self.context_length:
            raise self._too_long("messages", f"this has {len(tokens)} already")
        return tokens

    def _render(self, conversation: Conversation) -> tuple[int, ...]:
        return self._encoded(self._chat_model.rendered(conversation).text, False, "messages", None)

    def _marks(self, request: ApiRequest, prompts: Sequence[tuple[int, ...]]) -> tuple[tuple[MarkedPrefix, ...], ...]:
        if not self._block_tokens or request.truncate_prompt_tokens:
            return ()
        ttl_s = request.cache.keep_all_s
        marks: tuple[tuple[MarkedPrefix, ...], ...]
        if isinstance(request.prompt, Conversation):
            marks = (marked_prefixes(self._render, request.prompt, prompts[0], ttl_s, self._block_tokens),)
        else:
            whole = [MarkedPrefix.of(len(prompt), len(prompt), self._block_tokens, ttl_s) for prompt in prompts]
            marks = tuple((mark,) if mark is not None and ttl_s else () for mark in whole)
        return marks if any(marks) else ()

    def _tokens(self, request: ApiRequest) -> tuple[tuple[tuple[int, ...], ...], Reading]:
        most = self._most_prompt_tokens(request)
        if isinstance(request.prompt, Texts):
            return self._text_tokens(request.prompt, max(request.n, request.best_of), most), PLAIN
        self.check_count(len(request.prompt.messages), "messages")
        if not request.prompt.messages:
            raise InvalidRequest("messages must hold at least one message", param="messages")
        # Only what is rendered counts: a template may leave out the spaces around a message.
        rendered = self._chat_model.rendered(request.prompt)
        return (self._encoded(rendered.text, False, "messages", most),), rendered.reading

    def _most_prompt_tokens(self, request: ApiRequest) -> int | None:
        """How many of a prompt's tokens are taken, its last; None: all, or none when there are more than fit."""
        if request.truncate_prompt_tokens == 0:
            return None
        fitting = max(1, self.context_length - (request.max_tokens or 1))
        return min(request.truncate_prompt_tokens, self.context_length) if request.truncate_prompt_tokens > 0 else fitting

    def _text_tokens(self, texts: Texts, n: int, most: int | None) -> tuple[tuple[int, ...], ...]:
        if len(texts.prompts) * n > MAX_GENERATIONS:
            many = f"{len(texts.prompts)} prompts with {n} outputs each are more than {MAX_GENERATIONS} outputs in one request"
            raise InvalidRequest(f"prompt: {many}", param="prompt")
        tokens: list[tuple[int, ...]] = []
        left = self.bounds.max_values
        for prompt in texts.prompts:
            tokens.append(self._prompt_tokens(prompt, texts.add_special_tokens, most))
            left -= len(tokens[-1])
            if left < 0 and len(texts.prompts) > 1:
                raise InvalidRequest(f"prompt: the prompts have more than {self.bounds.max_values} tokens together", param="prompt")
        return tuple(tokens)

    def _prompt_tokens(self, prompt: Prompt, add_special_tokens: bool, most: int | None) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._encoded(prompt, add_special_tokens, "prompt", most)
        if most is None:
            self.check_count(len(prompt), "prompt")
        taken = prompt if most is None else prompt[-most:]
        self.check_ids(taken, "prompt")
        return taken

    def _encoded(self, text: str, add_special_tokens: bool, field: str, most: int | None) -> tuple[int, ...]:
        if most is None:
            self._check_length(text, field)
            return tuple(self._tokenizer.encode(text, add_special_tokens))
        # No token stands for more: what is before that has no part in the last tokens.
        longest = (self._tokenizer.most_bytes_a_token or BYTES_A_TOKEN) * self.context_length
        return tuple(self._tokenizer.encode(text[-longest:], add_special_tokens)[-most:])

    def check_count(self, count: int, field: str) -> None:
        """Raises InvalidRequest when so many messages, each of which takes at least a token, or so many token ids can never fit."""
        if count > self.context_length:
            raise self._too_long(field, f"{field} has {count} entries")

    def _check_scoring(self, request: ApiRequest, prompts: Sequence[Sequence[int]]) -> None:
        if (wanted := request.prompt_logprobs) is None:
            return
        if not 0 <= wanted <= MAX_LOGPROBS:
            raise InvalidRequest(f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}, not {wanted}", param="prompt_logprobs")
        count, most = sum(map(len, prompts)), MAX_PROMPT_LOGPROBS // (wanted + 1)
        if count > most:
            message = f"prompt_logprobs: with {wanted}, the prompts of a request may have {most} tokens together, not {count}"
            raise InvalidRequest(message, param="prompt_logprobs")

    def _told(self, request: ApiRequest, prompts: Sequence[Sequence[int]]) -> tuple[PromptOutput, ...]:
        if request.echo and isinstance(request.prompt, Texts):
            return tuple(map(self._echoed, request.prompt.prompts, prompts))
        return tuple(map(PromptOutput, prompts)) if request.prompt_logprobs is not None else ()

    def _echoed(self, prompt: Prompt, token_ids: Sequence[int]) -> PromptOutput:
        """With its text: as it was sent, or as its tokens make it where it came as tokens or they do not make it again. What a tokenizer
        puts before a text (BOS) is no part of it."""
        detokenizer = StreamingDetokenizer(self._tokenizer, skip_special_tokens=False, at_start=True)
        begins, texts, length = [], [], 0
        for token_id in token_ids:
            begins.append(length)
            texts.append(detokenizer.push(token_id))
            length += len(texts[-1])
        text = "".join((*texts, detokenizer.finish()))
        if not isinstance(prompt, str) or not text.endswith(prompt):
            return PromptOutput(token_ids, text, begins)
        before = len(text) - len(prompt)
        return PromptOutput(token_ids, prompt, [max(0, begin - before) for begin in begins])

    def _check_sampling(self, request: ApiRequest) -> None:
        stop_tokens = request.sampling.get("stop_token_ids", ())
        if len(stop_tokens) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, not {len(stop_tokens)}", param="stop_token_ids"
            )
        self.check_ids(stop_tokens, "stop_token_ids")
        if allowed := request.sampling.get("allowed_token_ids"):
            self._check_column(allowed, "allowed_token_ids")
        if (biases := request.sampling.get("logit_bias")) is not None:
            self._check_bias(biases)

    def _grammar(self, request: ApiRequest, reading: Reading) -> Grammar:
        """What the outputs are held to, after the reasoning."""
        chat = request.prompt if isinstance(request.prompt, Conversation) else None
        forced = _forces_calls(request)
        try:
            if chat is not None and forced:
                return lark_constraint(self._chat_model.forced_calls(chat, schema_in_lark), self._beforehand(reading))
            if request.format is not None:
                calls = "" if chat is None else self._chat_model.possible_calls(chat, schema_in_lark)
                return constraint(request.format, self._beforehand(reading), calls)
            if chat is not None and (calls := self._chat_model.strict_calls(chat, schema_in_lark, reading)):
                return lark_constraint(calls, self._beforehand(reading))
        except InvalidRequest as error:
            if error.param != "format":
                raise
            field = _format_field(request)
            raise InvalidRequest(error.message.replace("format", field, 1), param=field) from None
        given = request.sampling.get("grammar", Grammar())
        assert isinstance(given, Grammar)
        return given

    def _beforehand(self, reading: Reading) -> Beforehand | None:
        if reading.reasoning is None:
            return None
        begin, end = reading.reasoning.begin, reading.reasoning.end
        tokens = tuple(marker for marker in (begin, end) if self._tokenizer.special_id(marker) is not None)
        return Beforehand(begin, end, reading.reasoning_begun, tokens)

    def _sampling(self, request: ApiRequest, max_tokens: int, grammar: Grammar) -> SamplingParams:
        seed = request.sampling.get("seed")
        seed = secrets.randbits(63) if seed is None else seed % SEED_RANGE
        bad_words = self._bad_words(request)
        try:
            made = {"seed": seed, "max_tokens": max_tokens, "bad_words": bad_words, "grammar": grammar}
            params = SamplingParams(**{**self.default_sampling, **request.sampling, **made}, prompt_logprobs=request.prompt_logprobs)
            if request.best_of > request.n and params.logprobs is None:
                # The outputs are chosen from by how likely they are.
                params = replace(params, logprobs=0)
            # What the nodes will see: a value that is in range here but not in single precision is refused here too.
            return SAMPLING_PARAMS.decode(SAMPLING_PARAMS.encode(params))
        except ValueError as error:
            raise InvalidRequest(str(error), param=str(error).split()[0]) from None

    def _bad_words(self, request: ApiRequest) -> tuple[TokenIds, ...]:
        """A text begins with another token after a space, which most vocabularies take together with it."""
        field, given = "bad_words", request.sampling.get("bad_words", ())
        too_long = not all(1 <= len(text) <= MAX_BAD_WORD_LENGTH for text in request.bad_words)
        if too_long or len(request.bad_words) + len(given) > MAX_BAD_WORDS:
            message = f"{field} may hold at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_LENGTH} characters"
            raise InvalidRequest(message, param=field)
        for words in given:
            self._check_column(words, field)
        texts = (variant for text in request.bad_words for variant in (text, f" {text.lstrip()}"))
        found = (TokenIds.of(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        # A tokenizer may have tokens that the model has not: these are never drawn.
        return tuple(dict.fromkeys((*given, *(words for words in found if words and int(words.column().max()) < self._vocab_size))))

    def _check_column(self, tokens: TokenIds, field: str) -> None:
        column = tokens.column()
        if len(column) > MAX_ALLOWED_TOKENS:
            raise InvalidRequest(f"{field} may hold at most {MAX_ALLOWED_TOKENS} token ids, not {len(column)}", param=field)
        if len(column):
            self.check_ids((int(column.min()), int(column.max())), field)

    def _allowed_tokens(self, request: ApiRequest, prompts: Sequence[Sequence[int]], tenant: str) -> int:
        chat, wanted = isinstance(request.prompt, Conversation), request.max_tokens
        prompt_field, default = ("messages", self.context_length) if chat else ("prompt", COMPLETION_MAX_TOKENS)
        if not all(prompts):
            raise InvalidRequest(f"{prompt_field} must have at least one token", param=prompt_field)
        longest = max(len(prompt) for prompt in prompts)
        quota = self._quota_tokens.get(tenant, self._quota_tokens.get("*"))
        most = self.context_length if quota is None else min(quota, self.context_length)
        left = most - longest
        if left >= (1 if wanted is None else wanted):
            return min(default, left) if wanted is None else wanted
        if wanted is not None and wanted > most:
            param, asked = "max_tokens", f"max_tokens alone is {wanted}"
        elif wanted is not None:
            param, asked = prompt_field, f"you asked for {longest + wanted} tokens ({longest} in {prompt_field}, {wanted} for the output)"
        else:
            param, asked = prompt_field, f"{prompt_field} alone takes {longest} tokens, which leaves none for the output"
        if most < self.context_length:
            message = f"the quota of tenant {tenant!r} holds {most} tokens at a time (kv.tenant_quotas), but {asked}"
            raise InvalidRequest(message, param=param, code="quota_exceeded")
        message = f"this model's maximum context length is {self.context_length} tokens, but {asked}"
        raise InvalidRequest(message, param=param, code="context_length_exceeded")

    def _check_length(self, text: str, field: str) -> None:
        """Finds what can never fit without tokenising it."""
        least = self._tokenizer.least_tokens(text)
        if least >= self.context_length:
            raise self._too_long(field, f"a text of {len(text)} characters is at least {least}")

    def _too_long(self, field: str, what: str) -> InvalidRequest:
        message = f"{field}: this model's maximum context length is {self.context_length} tokens, but {what}"
        return InvalidRequest(message, param=field, code="context_length_exceeded")

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises InvalidRequest when one of them is not in the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(f"{field}: token ids must be between 0 and {self._vocab_size - 1}, not {wrong}", param=field)

    def _check_bias(self, biases: LogitBias) -> None:
        token_ids, values = biases.columns()
        if len(biases):
            self.check_ids((int(token_ids.min()), int(token_ids.max())), "logit_bias")
            if not (abs(values) <= MAX_LOGIT_BIAS).all():
                raise InvalidRequest(f"logit_bias values must be between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}", param="logit_bias")


def _forces_calls(request: ApiRequest) -> bool:
    return isinstance(request.prompt, Conversation) and request.prompt.tool_choice.mode is ToolMode.REQUIRED


def _format_field(request: ApiRequest) -> str:
    """What the client calls what the outputs are held to."""
    if _forces_calls(request) or (request.format is None and isinstance(request.prompt, Conversation) and request.prompt.tools):
        return request.names.get("tools", "tools")
    if request.format is None:
        return "sampling.grammar"
    return request.names.get("format", "format")


def in_the_clients_words(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error, with the field's name as the client knows it."""
    name = error.param or ""
    if (theirs := names.get(name)) is None:
        return error
    return type(error)(error.message.replace(name, theirs, 1), param=theirs, code=error.code)
