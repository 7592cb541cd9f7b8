"""`springtide chat`: a conversation in the terminal, with the figures of each answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from deploy.streaming import TIMEOUT, ApiError, Chunk, served_model, stream


@dataclass(frozen=True, slots=True)
class ChatOptions:
    url: str
    model: str | None
    system: str | None
    max_tokens: int | None
    temperature: float


@dataclass(slots=True)
class Answer:
    """What came back for one question, as it comes in."""

    asked_s: float
    text: str = ""
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.text += chunk.text

    def figures(self) -> str:
        """`TTFT 84 ms · 41.2 tokens/s · 58 tokens · 64 of 70 prompt tokens cached`"""
        times = [chunk.at_s for chunk in self.chunks if chunk.text]
        usage = next((chunk.usage for chunk in self.chunks if chunk.usage is not None), None)
        if not times or usage is None:
            return "no answer"
        parts = [f"TTFT {(times[0] - self.asked_s) * 1e3:.0f} ms"]
        if usage.completion_tokens > 1 and times[-1] > times[0]:
            parts.append(f"{(usage.completion_tokens - 1) / (times[-1] - times[0]):.1f} tokens/s")
        parts += [f"{usage.completion_tokens} tokens", f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"]
        return " · ".join(parts)


def chat(question: str | None, options: ChatOptions) -> None:
    """Answers one question, or, without one, as many as are typed until end of input. Raises ApiError for a one-shot question."""
    console = Console()
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if question is not None:
        asyncio.run(_ask(console, messages, question, options))
        return
    console.print("[dim]An empty line or Ctrl-D ends the conversation.")
    while question := _read(console):
        try:
            asyncio.run(_ask(console, messages, question, options))
        except ApiError as error:
            console.print(f"[red]{error.message}", highlight=False)
        except KeyboardInterrupt:
            console.print("\n[dim]interrupted")


def _read(console: Console) -> str:
    try:
        return console.input("[bold cyan]you> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


async def _ask(console: Console, messages: list[dict[str, str]], question: str, options: ChatOptions) -> None:
    """Prints the answer as it comes. Question and answer join `messages` once the answer is complete."""
    asked = {"role": "user", "content": question}
    async with httpx.AsyncClient(base_url=options.url, timeout=TIMEOUT, trust_env=False) as client:
        model = options.model or await served_model(client)
        body: dict[str, Any] = {"model": model, "messages": [*messages, asked], "temperature": options.temperature}
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        answer = Answer(asked_s=time.monotonic())
        async for chunk in stream(client, "/v1/chat/completions", body):
            answer.add(chunk)
            console.out(chunk.text, end="", highlight=False)
            console.file.flush()
    console.print(f"\n[dim]{answer.figures()}", highlight=False)
    messages += [asked, {"role": "assistant", "content": answer.text}]
