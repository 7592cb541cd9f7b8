"""`springtide chat`: a conversation in the terminal, with the figures of each answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from springtide.client import Chunk, Client
from springtide.errors import SpringtideError


@dataclass(frozen=True, slots=True)
class ChatOptions:
    url: str
    ca: Path | None
    model: str | None
    system: str | None
    max_tokens: int | None
    temperature: float


@dataclass(slots=True)
class ChatAnswer:
    """What came back for one question, as it comes in."""

    asked_s: float
    text: str = ""
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.text += chunk.text

    def figures(self) -> str:
        """`TTFT 84 ms · 41.2 tokens/s · 58 tokens · 64 of 70 prompt tokens cached`"""
        times = [chunk.received_at for chunk in self.chunks if chunk.text]
        usage = next((chunk.usage for chunk in self.chunks if chunk.usage is not None), None)
        if not times or usage is None:
            return "no answer"
        parts = [f"TTFT {(times[0] - self.asked_s) * 1e3:.0f} ms"]
        if usage.completion_tokens > 1 and times[-1] > times[0]:
            parts.append(f"{(usage.completion_tokens - 1) / (times[-1] - times[0]):.1f} tokens/s")
        parts += [f"{usage.completion_tokens} tokens", f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"]
        return " · ".join(parts)


def chat(question: str | None, options: ChatOptions) -> None:
    """Answers one question, or, without one, as many as are typed until end of input. An error ends a one-shot question only."""
    console = Console()
    messages = [{"role": "system", "content": options.system}] if options.system else []
    with Client(options.url, ca=options.ca) as client:
        options = replace(options, model=options.model or client.models()[0])
        if question is not None:
            _ask(console, client, messages, question, options)
        else:
            _converse(console, client, messages, options)


def _converse(console: Console, client: Client, messages: list[dict[str, str]], options: ChatOptions) -> None:
    console.print("[dim]An empty line or Ctrl-D ends the conversation.")
    while question := _read(console):
        try:
            _ask(console, client, messages, question, options)
        except SpringtideError as error:
            console.print(f"[red]{escape(error.message)}", highlight=False)
        except KeyboardInterrupt:
            console.print("\n[dim]interrupted")


def _read(console: Console) -> str:
    try:
        return console.input("[bold cyan]you> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def _ask(console: Console, client: Client, messages: list[dict[str, str]], question: str, options: ChatOptions) -> None:
    """Prints the answer as it comes. Question and answer join `messages` once the answer is complete."""
    asked = {"role": "user", "content": question}
    limit = {"max_tokens": options.max_tokens} if options.max_tokens is not None else {}
    answer = ChatAnswer(asked_s=time.monotonic())
    for chunk in client.chat([*messages, asked], model=options.model, temperature=options.temperature, **limit):
        answer.add(chunk)
        console.out(chunk.text, end="", highlight=False)
        console.file.flush()
    console.print(f"\n[dim]{answer.figures()}", highlight=False)
    messages += [asked, {"role": "assistant", "content": answer.text}]
