"""Pages of reference name every command and every environment variable."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests import readme

from shardwright.cli import app
from shardwright.host import PluginHost
from shardwright.planning.documents import schemas

PAGE = (readme.CORE_DOCS / "reference/environment.md").read_text()
DOCUMENTS = (readme.CORE_DOCS / "documents.md").read_text()
_VARIABLE = re.compile(r"\bSHARDWRIGHT_[A-Z_]+[A-Z]\b")


def sources() -> list[Path]:
    root = readme.README.parent
    return [path for folder in ("core", "plugins") for path in (root / folder).rglob("*.py")]


def test_page_of_commands_has_every_command() -> None:
    own = {command.callback.__name__ for command in app.registered_commands if command.callback}
    of_plugins = {
        entry.name.removeprefix("command:")
        for record in PluginHost(environment={}).plugins
        if record.provenance.distribution == "shardwright"
        for entry in record.entries.get("shardwright_extensions", ())
        if entry.name.startswith("command:")
    }
    assert len(own) >= 2
    assert len(of_plugins) >= 9
    listed = re.findall(r"^\| `shardwright ([a-z ]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted([*own, *of_plugins - {"plugin"}, "plugin new"])


def test_page_of_variables_has_every_variable_that_is_read() -> None:
    read = {name for path in sources() for name in _VARIABLE.findall(path.read_text())}
    assert len(read) >= 6
    assert set(re.findall(r"^\| `(SHARDWRIGHT_\w+)", PAGE, re.MULTILINE)) == read


def test_page_of_documents_has_every_key_of_the_schemas() -> None:
    for path in Path(schemas.FOLDER).glob("*.schema.json"):
        keys = json.loads(path.read_text()).get("properties", {})
        assert [key for key in keys if key not in DOCUMENTS] == [], path.name
