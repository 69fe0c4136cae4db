"""Writes docs/config.md from the config models: python scripts/config_reference.py"""

from __future__ import annotations

from pathlib import Path

from pydantic.fields import FieldInfo

from laminar.config import Config
from laminar.config_help import CAPABILITIES, PEER_NAMES, expectation, section_model, shown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"

INTRODUCTION = """\
# Configuration

<!-- Made by scripts/config_reference.py from src/laminar/config.py: change it there. -->

A run is described by one TOML file. `laminar check CONFIG.toml` says in under two seconds whether a run could start.
Any key can be changed after it on the command line: `laminar train CONFIG.toml train.lr=1e-5 max_staleness=none`.

* The value of an override is TOML, or else text: `data.train=rows.jsonl` needs no quotes.
* `none` (in a file `"none"`) means no value, which is not always the default.
* Relative paths count from the folder of the file they stand in; in an override from the current folder.
* `path/to/file.py:name` is a name in a file; `module:name` one in a module, installed or in the current folder.
* The run folder gets the resolved config: every key, absolute paths. It can be run again as it is.
"""


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def keys(fields: dict[str, FieldInfo]) -> str:
    return table(
        ("key", "default", "values", "meaning"),
        [(f"`{name}`", default(field), expectation(field), field.description or "") for name, field in fields.items()],
    )


def default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{shown(field.get_default(call_default_factory=True))}`"


def render() -> str:
    """The whole page."""
    top = {name: field for name, field in Config.model_fields.items() if section_model(field) is None}
    parts = [INTRODUCTION, "## Top level", keys(top)]
    for name, field in Config.model_fields.items():
        if section := section_model(field):
            parts += [f"## [{name}]", keys(section.model_fields)]
    parts += [
        "## What this version does not support",
        "`laminar check` refuses these and says what to use instead.",
        table(
            ("key", "value", "why", "instead"),
            [(f"`{row.key}`", row.value.words, row.why, row.remedy) for row in CAPABILITIES],
        ),
        "## Names in other frameworks",
        "An unknown key that is a name in TRL, verl, OpenRLHF, AReaL, slime or prime-rl is answered with ours.",
        table(("there", "here"), [(f"`{peer}`", f"`{ours}`") for peer, ours in PEER_NAMES.items()]),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
