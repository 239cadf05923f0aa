"""The documentation as a whole: no link leads nowhere, every page is listed, every command on a page exists."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """A page without its code blocks and inline code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "code", FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def broken_links(page: Path) -> list[str]:
    """Links and images of a page that lead to no file, or to no heading, of the project."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        found = page if not name else (page.parent / name).resolve()
        if not found.is_file() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_link_leads_nowhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `code`, and more\n[a](#a-code-and-more) [b](gone.md) [c](page.md#gone) `[d](gone.md)`\n")
    assert broken_links(page) == ["gone.md", "page.md#gone"]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_row_of_a_table_has_its_cells(page: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    rows = [table.splitlines() for table in tables]
    cells = [[len(re.findall(r"(?<!\\)\|", row)) for row in table] for table in rows]
    assert [
        table[counts.index(odd)]
        for table, counts in zip(rows, cells, strict=True)
        for odd in {*counts[1:]} - {counts[0]}
    ] == []


def nav_pages(entries: list) -> list[str]:
    """The files that the site's navigation names."""
    pages = []
    for entry in entries:
        [value] = entry.values()
        pages += nav_pages(value) if isinstance(value, list) else [value]
    return pages


def test_every_page_is_on_the_first_page_and_in_the_navigation() -> None:
    names = [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert sorted(nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == names
    linked = set(re.findall(r"\]\(([^)#\s]+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked | {"README.md"} == set(names)
    # By what a reader wants; the tutorial is read first.
    groups = [key for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] for key in entry]
    assert groups == ["Home", "Tutorial", "How-to", "Reference", "Explanation"]


def commands_of(page: Path) -> list[str]:
    """The `exgrpo` commands of a page's shell blocks, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(("exgrpo ", ".venv/bin/exgrpo "))]


@pytest.mark.parametrize("page", [page for page in [*PAGES, ROOT / "README.md"] if commands_of(page)], ids=str)
def test_every_command_exists_with_its_options(page: Path) -> None:
    """Parsed, not run: an option that was renamed, or a value that is no choice, is found here."""
    import typer

    from exgrpo_cli.commands import app

    group = typer.main.get_command(app)
    for line in commands_of(page):
        _, name, *arguments = shlex.split(line, comments=True)
        command = group.get_command(None, name)
        assert command is not None, line
        if "--help" not in arguments:
            command.make_context(name, arguments)


def test_the_page_of_commands_lists_them_all() -> None:
    import typer

    from exgrpo_cli.commands import app

    table = (DOCS / "cli.md").read_text().partition("\n\n`exgrpo COMMAND")[0]
    listed = {
        word
        for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
        for word in re.findall(r"`([\w-]+)", row)
    }
    assert listed == {name for name, command in typer.main.get_command(app).commands.items() if not command.hidden}


def test_the_bridge_names_settings_that_exist_with_the_presets_values() -> None:
    """What is written with a value is what the preset of the paper's main backbone has, the metric apart."""
    from exgrpo_cli.config.layers import build_config

    rows = re.findall(r"^\| `[^|]*\|([^|]*)\|", (DOCS / "from-the-released-code.md").read_text(), flags=re.MULTILINE)
    written = re.findall(r"`(\w+\.\w+)(?:=([^`]+))?`", "\n".join(rows))
    config = build_config(backbone="qwen-math-7b", method="exgrpo")
    assert len(written) > 30
    for name, _ in written:
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key), name
    unlike = ("replay.metric", "replay.upper_bound", "rollout.tensor_parallel")
    values = [f"{name}={value}" for name, value in written if value and name not in unlike]
    assert build_config(backbone="qwen-math-7b", method="exgrpo", assignments=values) == config


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Needs the extra `docs`."""
    import subprocess
    import sys

    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site/index.html").read_text()
    assert "Your own reward" in home and "fonts.googleapis" not in home
    assert 'placeholder="Search"' in home
    assert "Retirement" in (tmp_path / "site/search/search_index.json").read_text()
