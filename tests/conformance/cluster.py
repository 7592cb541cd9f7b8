"""The cluster that is asked: of a tiny model, quick and in float32, whose chat template has a place for whatever can be told to one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.conformance.objects import CACHE, CACHED_CONTENTS, CACHING, FILE, FILES, KEPT
from tests.conformance.probe import Server
from tests.conformance.surfaces import MODEL
from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE

TIMEOUT_S = 120
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}{% if message.name %} {{ message.name }}{% endif %}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if reasoning_effort %}<|im_start|>effort
{{ reasoning_effort }}<|im_end|>
{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}Think first.
{% endif %}{% endif %}"""


@contextmanager
def running() -> Iterator[Server]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-"))
        model = str(_model(Path(directory)))
        cluster = stack.enter_context(Cluster(model=model, served_model_name="tiny", dtype="float32", profile=TINY_PROFILE))
        yield _furnished(stack.enter_context(httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S)), cluster.model)


def _furnished(http: httpx.Client, model: str) -> Server:
    """With one of each thing that surfaces need the name of."""
    server = Server(http, {MODEL: model})
    file, cache, kept = (server.post(surface, {}).raise_for_status().json() for surface in (FILES, CACHING, CACHED_CONTENTS))
    return Server(http, {MODEL: model, FILE: file["id"], CACHE: cache["id"], KEPT: kept["name"].partition("/")[2]})


def _model(directory: Path) -> Path:
    """Texts begin with a special token, too."""
    # As large a vocabulary as the tokenizer's: every token has a text.
    model = make_tiny_llama(directory / "tiny", vocab_size=266)
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(model / "tokenizer.json"))
    return model
