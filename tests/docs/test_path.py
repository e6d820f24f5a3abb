"""docs/path.md names things that exist, and README and docs link to files that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r"`(minuet(?:\.\w+)+)`", (ROOT / "docs/path.md").read_text())))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", NAMES)
def test_every_hop_of_the_path_exists(name):
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        assert callable(found)
        return
    pytest.fail(f"{name} cannot be imported")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_test_named_for_a_public_bug_exists():
    page = (ROOT / "docs/field-bugs.md").read_text()
    for path, name in re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", page):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
