"""A Dockerfile's steps, executed without Docker: each stage is a root of its own, laid over this machine's, which stands in for every base
image. What a step does to its root is seen by nobody else, and is gone at the end.

`unshare --mount --pid --fork --mount-proc python -m tests.support.dockerfile --target STAGE [--build-arg NAME=VALUE] -- COMMAND…` builds a
stage and runs the command in it as Docker would: as the image's user, with its environment, in a network of its own; without one, whatever
the image starts. The variables IMAGE and HEALTHCHECK have what it starts, and how it is seen to be well.

Virtual environments that a step makes see the packages of the one that this runs in, so pip finds there what it would fetch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).parents[2]
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
SHELL = ("/bin/sh", "-c")
SHARED = ("dev", "proc", "sys")
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    text: str

    def words(self, variables: Mapping[str, str]) -> list[str]:
        return shlex.split(substituted(self.text, variables))

    def command(self) -> list[str]:
        """What is to be executed: a JSON list, or a line for the shell."""
        return list(json.loads(self.text)) if self.text.startswith("[") else [*SHELL, self.text]


@dataclass(slots=True)
class Image:
    """What the instructions say about a stage, beside its files."""

    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    layers: tuple[Path, ...] = ()
    """Uppermost first; below them is this machine's root."""

    def child(self) -> Image:
        return Image(dict(self.environment), self.directory, self.user, self.entrypoint, self.command, self.healthcheck, self.layers)


def instructions(text: str) -> Iterator[Instruction]:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield Instruction(name.upper(), rest.strip())


def substituted(text: str, variables: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


class Build:
    """Of the stages of one Dockerfile, in a mount namespace of this process's own."""

    def __init__(self, dockerfile: Path, context: Path, arguments: Mapping[str, str], scratch: Path) -> None:
        self._stages: list[tuple[str, str, list[Instruction]]] = []
        self._arguments = dict(arguments)
        self._context = context
        self._scratch = scratch
        self._images: dict[str, Image] = {}
        self._defaults: dict[str, str] = {}
        self._ignored = ignored(dockerfile.with_name(dockerfile.name + ".dockerignore"))
        for step in instructions(dockerfile.read_text()):
            if step.name == "FROM":
                base, _, name = step.text.partition(" AS ")
                self._stages.append((name, base, []))
            elif self._stages:
                self._stages[-1][2].append(step)
            elif step.name == "ARG":
                name, _, default = step.text.partition("=")
                self._defaults[name] = self._arguments.get(name, default)

    def image(self, stage: str) -> Image:
        """Builds it, and first what it is made from."""
        if stage not in self._images:
            name, base, steps = next(found for found in self._stages if found[0] == stage)
            base = substituted(base, self._defaults)
            known = base in (found[0] for found in self._stages)
            image = self.image(base).child() if known else Image(environment={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
            root = self._mount(name, image, fresh=not known)
            print(f"== {name}, from {base if known else 'this machine'}", flush=True)
            variables: dict[str, str] = {}
            for step in steps:
                self._execute(step, image, root, variables)
            self._images[stage] = image
        return self._images[stage]

    def root(self, stage: str) -> Path:
        return self._scratch / stage / "root"

    def _mount(self, stage: str, image: Image, *, fresh: bool) -> Path:
        upper, work, root = (self._scratch / stage / part for part in ("upper", "work", "root"))
        for directory in (upper, work, root):
            directory.mkdir(parents=True)
        lower = ":".join(map(str, (*image.layers, "/")))
        _run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", str(root))
        image.layers = (upper, *image.layers)
        for shared in SHARED:
            _run("mount", "--rbind", f"/{shared}", str(root / shared))
        if fresh:
            self._as_python_image(root)
        return root

    def _as_python_image(self, root: Path) -> None:
        """Has Python where the base image has it, wherever this machine keeps its own."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        interpreter = Path(sys.base_prefix, "bin", version).resolve()
        links = {"bin/python": interpreter, "bin/python3": interpreter}
        if Path(sys.base_prefix) != Path("/usr/local"):
            links |= {f"{part}/{version}": Path(sys.base_prefix, part, version) for part in ("lib", "include")}
        for name, target in links.items():
            link = root / "usr/local" / name
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        for parent in (*interpreter.parents, *Path(sys.prefix).parents, *REPOSITORY.parents):
            inside = root / parent.relative_to("/")
            inside.chmod(inside.stat().st_mode | 0o111)

    def _execute(self, step: Instruction, image: Image, root: Path, variables: dict[str, str]) -> None:
        known = {**image.environment, **variables}
        match step.name:
            case "ARG":
                name, _, default = step.text.partition("=")
                variables[name] = self._arguments.get(name, self._defaults.get(name, substituted(default.strip("\"'"), known)))
            case "ENV":
                image.environment.update(word.split("=", 1) for word in step.words(known))
            case "WORKDIR":
                image.directory = os.path.join(image.directory, substituted(step.text, known))
                (root / image.directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = substituted(step.text, known)
            case "ENTRYPOINT":
                image.entrypoint, image.command = step.command(), []
            case "CMD":
                image.command = step.command()
            case "HEALTHCHECK":
                image.healthcheck = Instruction("CMD", step.text.partition("CMD ")[2]).command()
            case "COPY":
                self._copy(step.words(known), image, root)
            case "RUN":
                print(f"-- {step.text}", flush=True)
                _run(
                    *chrooted(root, image.directory, image.user, [*SHELL, step.text]),
                    env={"HOME": "/root", **_own(), **image.environment, **variables},
                )
                self._lend_packages(root)
            case "EXPOSE" | "STOPSIGNAL" | "LABEL":
                pass
            case _:
                raise ValueError(f"{step.name} is not known here")

    def _copy(self, words: list[str], image: Image, root: Path) -> None:
        options = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        stage = next((option.partition("=")[2] for option in options if option.startswith("--from=")), None)
        if stage is not None:
            self.image(stage)
        destination = root / os.path.join(image.directory, target).lstrip("/")
        for source in sources:
            path = self._context / source if stage is None else self.root(stage) / source.lstrip("/")
            if path.is_dir():
                ignore = None if stage is not None else self._ignored
                shutil.copytree(path, destination, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                into = target.endswith(("/", "."))
                (destination if into else destination.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, destination)

    def _lend_packages(self, root: Path) -> None:
        for site in root.glob("opt/*/lib/python*/site-packages"):
            (site / "of-this-machine.pth").write_text(sysconfig.get_path("purelib") + "\n")


def ignored(path: Path) -> Callable[[str, list[str]], set[str]]:
    """What shutil.copytree is to leave out of the context, by a .dockerignore that begins with `*` and then names what is wanted."""
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert lines[0] == "*", f"{path} should say what is wanted, not what is not"
    wanted = {line[1:] for line in lines if line.startswith("!")}
    unwanted = [line for line in lines[1:] if not line.startswith("!")]

    def is_wanted(path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") or each.startswith(f"{path}/") for each in wanted)

    def leave_out(directory: str, names: list[str]) -> set[str]:
        paths = {name: (Path(directory) / name).relative_to(REPOSITORY) for name in names}
        unwanted_here = {name for name, found in paths.items() if any(found.match(pattern.removeprefix("**/")) for pattern in unwanted)}
        return unwanted_here | {name for name, found in paths.items() if not is_wanted(str(found))}

    return leave_out


def chrooted(root: Path, directory: str, user: str, command: Sequence[str]) -> list[str]:
    return ["chroot", f"--userspec={user}", str(root), "/usr/bin/env", "-C", directory, *command]


def _own() -> dict[str, str]:
    """What pip and apt-get are told on this machine about where to find packages."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_", "REQUESTS_")) or name.lower().endswith("_proxy")
    }


def _run(*command: str, env: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=env)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    scratch = Path("/mnt")
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "tmpfs", str(scratch))
    build = Build(
        REPOSITORY / "deploy/docker/Dockerfile", REPOSITORY, dict(argument.split("=", 1) for argument in arguments.build_arg), scratch
    )
    image = build.image(arguments.target)
    root = build.root(arguments.target)
    environment = {
        "HOME": "/",
        **image.environment,
        "HEALTHCHECK": shlex.join(image.healthcheck),
        "IMAGE": shlex.join([*image.entrypoint, *image.command]),
    }
    command = chrooted(root, image.directory, image.user, arguments.command or [*image.entrypoint, *image.command])
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network can be made")
    _run("ip", "link", "set", "lo", "up")
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main()
