"""What the pages name is there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from springtide.rpc.generate import REPOSITORY

SOURCE = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)*(?:\.(?:py|pyi|c|h|proto|md)|/))`")
"""A source file, or a folder."""
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
PLACEHOLDERS = ("NAME", "RUN_DIR", "TMPDIR", "P/")
PACKAGES_OF = {"models": ("engine",), "node_runtime": ("node_runtime", "prefill_node", "decode_node", "mixed_node")}
"""The packages that a page is about, where that is not the one of its name."""


def tree() -> Iterator[PurePosixPath]:
    """All files and folders but hidden ones."""
    for folder, folders, files in os.walk(REPOSITORY):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        yield from (PurePosixPath(os.path.relpath(folder, REPOSITORY), name) for name in [*folders, *files])


TREE = frozenset(tree())
PAGES = [
    str(path) for path in sorted(TREE) if path.suffix == ".md" and path.parts[0] in ("docs", "benchmarks", "README.md", "CONTRIBUTING.md")
]


def is_there(page: PurePosixPath, named: str) -> bool:
    """Whether there is such a file: by its whole path, by a path within what the page is about, or by its mere name."""
    if any(path.match(named) for path in TREE if len(path.parts) == len(PurePosixPath(named).parts)):
        return True
    within: tuple[str, ...] = ()
    if page.parent.name == "packages" and "/" in named.rstrip("/"):
        within = PACKAGES_OF.get(page.stem, (page.stem.partition("-")[0],))
    return any(path.match(named) for path in TREE if not within or path.parts[0] in within)


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_are_there(name: str) -> None:
    page, text = PurePosixPath(name), Path(REPOSITORY, name).read_text()
    named = {each for each in SOURCE.findall(text) if not each.startswith((".", *PLACEHOLDERS)) and "NAME" not in each}
    assert [each for each in sorted(named) if not is_there(page, each)] == []
    links = {link for link in LINK.findall(text) if not Path(REPOSITORY, page.parent, link).exists()}
    assert links == set()


@pytest.mark.parametrize(
    ("page", "named", "there"),
    [
        ("docs/wire.md", "kvstore/core/pool.py", True),
        ("docs/wire.md", "kvstore/core/lake.py", False),
        ("docs/packages/kvstore.md", "core/pool.py", True),
        ("docs/packages/kvstore.md", "core/admission_check.py", False),
        ("docs/packages/kvstore.md", "test_kvstore_pool.py", True),
        ("docs/packages/kvstore.md", "core/", True),
        ("docs/packages/kvstore.md", "kvstore/lake/", False),
    ],
)
def test_a_file_is_looked_for_in_what_the_page_is_about(page: str, named: str, there: bool) -> None:
    assert is_there(PurePosixPath(page), named) is there
