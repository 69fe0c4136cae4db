"""Writes the lifecycles section of docs/architecture.md from the transition tables: python scripts/state_diagrams.py"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from laminar.control.ledger import TABLES, Table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
BEGIN = "<!-- lifecycles: made by scripts/state_diagrams.py from src/laminar/control/ledger.py; change them there -->"
END = "<!-- end of lifecycles -->"

CAPTIONS = {
    "sample": "One response. The data store applies this table in the transaction that changes the sample's data.",
    "group": "One prompt with its samples. An evaluation group goes from `finished` to `trained` without being cut.",
    "replica": "What the manager lets a replica do next. `granted`: the data store has been asked to issue to it.",
    "process": "Whether a process is there, as the manager sees it.",
    "slot": "A place for one version in shared memory. Readers are shown `whole` slots only.",
}


def diagram(table: Table) -> str:
    """A mermaid state diagram. The first state of the table is the initial one; those without a way out are final."""
    events: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, event), after in table.items():
        events[state, after].append(event)
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table))[0]}"]
    lines += [f"    {before} --> {after}: {', '.join(names)}" for (before, after), names in events.items()]
    left = {state for state, _ in table}
    lines += [f"    {state} --> [*]" for state in dict.fromkeys(table.values()) if state not in left]
    return "\n".join(lines)


def section() -> str:
    """The text between the two marks, without them."""
    return "\n\n".join(
        f"**{name}**. {CAPTIONS[name]}\n\n```mermaid\n{diagram(table)}\n```" for name, table in TABLES.items()
    )


def render(page: str) -> str:
    """The page with its lifecycles up to date. Raises ValueError if the marks are not there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no section between {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{section()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
