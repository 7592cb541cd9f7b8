"""The commands that the pages tell to give: there are such subcommands, options and settings, targets of make, and values of the chart."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer

from deploy.cli import app
from deploy.options import parse_settings
from springtide.config import load_config
from springtide.errors import ConfigError
from springtide.rpc.generate import REPOSITORY
from tests.support.chart_tools import helm
from tests.test_docs import PAGES

BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
LANGUAGES = ("sh", "ini")
"""Of blocks that have commands."""
IN_DRAWINGS = {"docs/architecture.md"}
"""Pages whose drawings name commands."""
NO_COMMANDS = ("springtide <-", "springtide messenger ")
"""The layers, and what is signed."""
TO_BE_MADE = "docs/add-a"
"""Pages that tell how to make what their commands then use."""
LEFT_OUT, VALUE = "…", "VALUE"
OPERATORS = frozenset("();<>|&")
ROOT: Any = typer.main.get_command(app)
MAKEFILE = Path(REPOSITORY, "Makefile").read_text()
CHART = "deploy/helm/springtide"
SCHEMA = json.loads(Path(REPOSITORY, CHART, "values.schema.json").read_text())


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell's, without what is assigned before it, what is redirected, and comments."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line.removeprefix("ExecStart=")
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation that goes on in the next line
            pending += "\n"
            continue
        pending, command = "", list[str]()
        for word in (*words, ";"):
            if word and OPERATORS.issuperset(word):
                yield from [command] if command else []
                command = []
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word)


def blocks(page: str, text: str) -> Iterator[list[str]]:
    for language, block in BLOCK.findall(text):
        if language in LANGUAGES:
            yield from commands_of(block)
        elif page not in IN_DRAWINGS:
            assert not re.search(r"^(springtide|make|helm) ", block, re.MULTILINE), f"{page}: where commands are, say ```sh\n{block}"


def inline(text: str) -> Iterator[list[str]]:
    for code in INLINE.findall(BLOCK.sub("", text)):
        words = code.split()
        if words and not code.startswith(NO_COMMANDS) and PurePosixPath(words[0]).name in ("springtide", "make"):
            yield from commands_of(" ".join(words))


def given(command: Sequence[str]) -> list[str] | None:
    """What `springtide` is given: itself, in a container, or in a pod of the chart. None where it is another command."""
    for number, word in enumerate(command):
        in_container = command[:2] == ["docker", "run"] and re.fullmatch(r"(\S+/)?springtide:\S+", word)
        if (number == 0 and PurePosixPath(word).name == "springtide") or in_container or word.endswith("/command.py"):
            return [each for each in command[number + 1 :] if each != LEFT_OUT]
    return None


def found(words: Sequence[str], root: Any = ROOT) -> tuple[Any, list[str]]:
    """The command that is meant, and what it is given. Raises KeyError where there is none."""
    command, rest = root, list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        command = command.commands[rest.pop(0)]
    return command, rest


def unknown_settings(settings: Mapping[str, Any]) -> list[str]:
    def problem(name: str) -> str:
        try:
            load_config(overrides={name: VALUE}, environ={})
        except ConfigError as error:
            return error.message
        return ""

    return [name for name in settings if "there is no such setting" in problem(name)]


def cases(kind: str) -> list[Any]:
    """The commands of all pages, each once."""
    seen: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for page in PAGES:
        text = Path(REPOSITORY, page).read_text()
        for command in blocks(page, text) if kind == "blocks" else inline(text):
            seen.setdefault(tuple(command), (page, command))
    return [pytest.param(page, command, id=f"{page}: {shlex.join(command)[:80]}") for page, command in seen.values()]


@pytest.mark.parametrize(("page", "command"), [case for case in cases("blocks") if given(case.values[1]) is not None])
def test_a_command_of_a_block_can_be_given_as_it_stands(page: str, command: list[str]) -> None:
    command_of, rest = found(given(command) or [])
    if hasattr(command_of, "commands"):
        assert rest == []
        return
    settings = parse_settings(command_of.make_context("springtide", rest).params.get("set_"))
    assert unknown_settings(settings) == []
    if not page.startswith(TO_BE_MADE):
        load_config(overrides=settings, environ={})


@pytest.mark.parametrize(("page", "command"), [case for case in cases("inline") if given(case.values[1]) is not None])
def test_a_command_that_is_spoken_of_is_there(page: str, command: list[str]) -> None:
    """Of which what must be given beside it may be left out."""
    command_of, rest = found(given(command) or [])
    options = {name: each for each in command_of.params for name in (*each.opts, *each.secondary_opts)}
    if rest and rest[-1] in options and not options[rest[-1]].is_flag:
        rest.append(VALUE)
    _, left, _ = command_of.make_parser(command_of.context_class(command_of)).parse_args(args=rest)
    room = [each.nargs for each in command_of.params if each.param_type_name == "argument"]
    assert len(left) <= sum(room) or -1 in room, f"{page}: {left} are too many"


@pytest.mark.parametrize(("page", "command"), [case for case in cases("blocks") if PurePosixPath(case.values[1][0]).name == "ray"])
def test_ray_takes_what_it_is_told(page: str, command: list[str]) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    command_of, rest = found(command[1:], scripts.cli)
    command_of.make_context(page, rest)


def test_extras_that_are_to_be_installed_are_there() -> None:
    extras = tomllib.loads(Path(REPOSITORY, "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"springtide\[([\w,]+)\]", Path(REPOSITORY, page).read_text())}
    assert named and {each for name in named for each in name.split(",")} <= extras.keys()


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_are_spoken_of_are_there(page: str) -> None:
    text = BLOCK.sub("", Path(REPOSITORY, page).read_text())
    named = [name for name in re.findall(r"--set '?([\w.]+)=", text) if not name.isupper()]
    assert unknown_settings(dict.fromkeys(named)) == []


def made(target: str) -> bool:
    """Whether make has such a target, that of a benchmark among them."""
    rules = {name for line in re.findall(r"^([\w.%/$()-][^:=\n]*):(?!=)", MAKEFILE, re.MULTILINE) for name in line.split()}
    benchmark = Path(REPOSITORY, "benchmarks", f"{target.removeprefix('bench-').replace('-', '_')}.py")
    return target in rules or (target.startswith("bench-") and "bench-%" in rules and benchmark.is_file())


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_are_there(page: str) -> None:
    text = Path(REPOSITORY, page).read_text()
    asked = [command[1:] for command in (*blocks(page, text), *inline(text)) if command[0] == "make"]
    targets = {word for words in asked for word in words if "=" not in word and not re.search(r"[A-Z]", word)}
    assert {target for target in targets if not made(target)} == set()


@pytest.mark.parametrize(("page", "command"), [case for case in cases("blocks") if case.values[1][0] == "helm" and CHART in case.values[1]])
def test_the_chart_takes_what_helm_is_told(page: str, command: list[str]) -> None:
    if not helm(4).exists():
        pytest.skip("there is no Helm: make .venv/.installed-dev")
    _, verb, release, *rest = command
    assert verb in ("install", "upgrade")
    told = [str(helm(4)), "template", release, *(word for word in rest if word != "--reuse-values")]
    ended = subprocess.run(told, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, f"{page}: {ended.stderr}"


def has_value(path: Sequence[str], described: Any) -> bool:
    """Whether the schema of the chart's values has such a name, or anything may be there."""
    described = described if isinstance(described, dict) else {}
    if "$ref" in described:
        return has_value(path, SCHEMA["$defs"][described["$ref"].removeprefix("#/$defs/")])
    for several in ("allOf", "anyOf", "oneOf"):
        if several in described and "properties" not in described:
            return any(has_value(path, each) for each in described[several])
    if not path or "properties" not in described:
        return not path or described.get("type") == "object"
    return path[0] in described["properties"] and has_value(path[1:], described["properties"][path[0]])


def test_values_that_the_page_of_kubernetes_names_are_there() -> None:
    text = BLOCK.sub("", Path(REPOSITORY, "docs/kubernetes.md").read_text())
    dotted = {code.partition(":")[0] for code in INLINE.findall(text)}
    values = {name for name in dotted if re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", name) and name.partition(".")[0] in SCHEMA["properties"]}
    values -= {"tls.crt", "tls.key"}
    assert len(values) > 40
    assert {name for name in values if not has_value(name.split("."), SCHEMA)} == set()


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("A=1 springtide up --port 0 # to try\n", [["springtide", "up", "--port", "0"]]),
        ("springtide profile -o x && springtide up", [["springtide", "profile", "-o", "x"], ["springtide", "up"]]),
        ("springtide up \\\n  --set 'a={b: 1}' > log", [["springtide", "up", "--set", "a={b: 1}"], ["log"]]),
        ("echo 'one\ntwo' | cat", [["echo", "one\ntwo"], ["cat"]]),
    ],
)
def test_a_shells_commands_are_told_apart(text: str, commands: list[list[str]]) -> None:
    assert list(commands_of(text)) == commands


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/opt/bin/springtide", "node", LEFT_OUT, "--x"], ["node", "--x"]),
        (["docker", "run", "-p", "1:1", "r/springtide:cpu", "up"], ["up"]),
        (["docker", "build", "-t", "springtide:cpu", "."], None),
        (["kubectl", "exec", "x", "--", "python", "/etc/springtide/scripts/command.py", "status"], ["status"]),
    ],
)
def test_what_springtide_is_given_is_found(command: list[str], words: list[str] | None) -> None:
    assert given(command) == words
