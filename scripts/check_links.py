"""Fails when a Markdown file of the repository links to a file or heading that does not exist.

Only relative links are checked; nothing is fetched.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_FOLDERS = {"build", "runs", "node_modules"}

FENCE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1[`~]*\s*$", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'(][^)]*)?\)|^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
EXPLICIT_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


def markdown_files() -> Iterator[Path]:
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith(".") and s not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".md"))


def anchors(text: str) -> set[str]:
    """The names by which headings of a page can be linked, made as GitHub makes them."""
    found: set[str] = set(EXPLICIT_ANCHOR.findall(text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        name, repeat = base, 0
        while name in found:
            repeat += 1
            name = f"{base}-{repeat}"
        found.add(name)
    return found


def broken_links(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for groups in LINK.findall(CODE_SPAN.sub("", FENCE.sub("", text))):
        link = groups[0] or groups[1]
        if re.match(r"[a-z][a-z0-9+.-]*:", link, re.IGNORECASE):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / path.lstrip("/") if path.startswith("/") else page.parent / path) if path else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{page.relative_to(ROOT)}: {link}: no such heading"


def main() -> int:
    problems = [problem for page in markdown_files() for problem in broken_links(page)]
    print("\n".join(problems) or "links: all good")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
