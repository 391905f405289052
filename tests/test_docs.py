"""Every command and Python block of the pages is run; whatever takes long is at least read by the real parser."""

import ast
import functools
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kimi_jax.commands import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)

HOW = {
    "slow": r"^doctor|^decode --(instant|mesh nvl)|^profile --batch 1|^evaluate (compare|perplexity)|^estimate docs",
    "exhaustive": r"^profile --mesh|^estimate check|^evaluate tasks|^benchmark (?!page)|^train|ep 72",
    "fast": r"--explain$|^doctor .*--exports|^benchmark page|^estimate (point|sweep|recommend|smallest|explain|image)",
    "parsed": r"--help$|^serve|/shared/|\bDIR|\bSHARDED\b|moonshotai/|--process-id|^profile diff",
}
"""What is done with a command, by what it looks like; the last that fits holds. Those of `parsed` are helps, which
the parser prints, or name files, hubs or processes that a test has not got."""


def commands_of(page: Path) -> list[str]:
    """The commands of a page, in blocks, in indented lines and in running text, each on one line."""
    text = page.read_text()
    shell = [block for language, block in BLOCK.findall(text) if language in ("", "bash")]
    prose = BLOCK.sub("", text)
    shell += re.findall(r"^ {4}(?:.*\n {4})*?.*$", prose, re.M)
    shell += [" ".join(span.split()) for span in re.findall(r"`((?:uv|kimi-jax|bash|pip) [^`]+)`", prose)]
    lines = re.sub(r" *\\\n\s*", " ", "\n".join(shell)).splitlines()
    lines = [re.sub(r"\$\(awk [^)]*\)", "host", re.sub(r"\s+(#|> |&$).*$", "", line)) for line in lines]
    lines = [inner for line in lines for inner in (re.findall(r"\$\((.*)\)", line) or line.split(" && "))]
    return [line.strip() for line in lines if re.search(r"\b(uv run|kimi-jax|pip install|bash) \S", line)]


def own(line: str) -> str | None:
    """A command of the project without what starts it; None for others'. A bare name in running text is its help."""
    found = re.search(r"(?:scripts/(\w+)\.py|kimi-jax (\w+))(.*)", line)
    if found is None:
        return None
    name, rest = found[1] or found[2], found[3].strip()
    assert name in COMMANDS, line
    return f"{name} {rest}".strip() if rest or name == "doctor" else f"{name} --help"


LINES = sorted({line for page in PAGES for line in commands_of(page)})
COMMAND_LINES = sorted({command for line in LINES if (command := own(line))})
OTHER_LINES = [line for line in LINES if own(line) is None]


def kind(command: str) -> str:
    """How a command is run."""
    fits = [how for how, pattern in HOW.items() if re.search(pattern, command)]
    assert fits, f"HOW in tests/test_docs.py does not say how {command!r} is run"
    return fits[-1]


def test_every_command_is_found_and_has_its_kind():
    assert {kind(command) for command in COMMAND_LINES} == HOW.keys()
    assert {command.split()[0] for command in COMMAND_LINES} == COMMANDS.keys()
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(re.findall(r"uv run (?:--no-sync )?scripts/\w+\.py", text)) >= len(COMMAND_LINES) - len(COMMANDS)


class ParsedError(BaseException):
    """Ends a command behind its parser; no handler of errors catches it."""


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_the_options_are_those_of_the_command(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name, *args = shlex.split(command)
    module = importlib.import_module(f"kimi_jax.commands.{name}")

    def stub(function):
        @functools.wraps(function)
        def parsed(*args, **kwargs):
            raise ParsedError

        return parsed

    tables = [value for value in vars(module).values() if isinstance(value, dict) and value is not module.__builtins__]
    for table in [vars(module), *tables]:
        for key, value in list(table.items()):
            ours = inspect.isfunction(value) and value.__module__.startswith("kimi_jax.commands")
            if ours and key != "run" and not value.__module__.endswith(".options"):
                monkeypatch.setitem(table, key, stub(value))
    with pytest.raises((ParsedError, SystemExit)) as ended:
        module.run(args, f"kimi-jax {name}")
    assert ended.type is ParsedError or ended.value.code in (0, None)


@pytest.mark.parametrize("line", OTHER_LINES)
def test_commands_of_others_name_what_there_is(line):
    words = [word for word in shlex.split(line) if not word.startswith("-")]
    for word in words:
        assert not re.match(r"(tests|docs|scripts|kimi_jax|\.ci)/", word) or (ROOT / word).exists(), word
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    for expression in re.findall(r"pytest .*?-m (\"[^\"]+\"|\w+)", line):
        known = {marker.partition(":")[0] for marker in markers}
        assert set(re.findall(r"\w+", expression)) - {"or", "not", "and"} <= known
    if "-m kimi_jax" in line:
        assert importlib.util.find_spec(re.search(r"python -m (\S+)", line)[1])


@pytest.fixture
def folder(tmp_path):
    """A folder with what the pages' commands read: prompts, the saved runs, the bundled model under its names there."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Add 612 and 259."}\n')
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("small", "small_drafter"):
        shutil.copytree(ROOT / "kimi_jax" / "assets" / name, tmp_path / name)
    return tmp_path


def shown() -> dict[str, str]:
    """Output behind a command, in its block or indented, up to a line of …; not where it has measured speeds."""
    found = {}
    for page in PAGES:
        text = re.sub(r" *\\\n\s*", " ", page.read_text())
        found |= {own(line): output for line, output in re.findall(r"^```\n\$ (.*)\n((?:(?!```).*\n)+)", text, re.M)}
        found |= {own(line): output for line, output in re.findall(r"^ {4}(.*)\n\n((?: {4}.*\n)+)", text, re.M)}
    return {command: output.partition("\n…")[0] for command, output in found.items() if "tokens/s" not in output}


def words(text: str) -> set[str]:
    """Words and figures, without lines of tables and without times."""
    return {word for word in re.sub(r"\d+\.\d+ s\b", "", text).split() if re.search(r"\w", word)}


def marked(*hows: str) -> list:
    found = [(command, kind(command)) for command in COMMAND_LINES]
    return [
        pytest.param(c, marks=[] if how == "fast" else getattr(pytest.mark, how)) for c, how in found if how in hows
    ]


@pytest.mark.parametrize("command", marked("fast", "slow", "exhaustive"))
def test_the_command_runs(command, folder):
    name, *args = shlex.split(command)
    pages = {page.name: page.read_text() for page in (folder / "docs").glob("*.md")}
    run = [sys.executable, ROOT / "scripts" / f"{name}.py", *args]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = (done.stdout + done.stderr).replace(f"{ROOT}/", "")  # the pages' commands run there
    assert words(shown().get(command, "")) <= words(printed)
    assert {page.name: page.read_text() for page in (folder / "docs").glob("*.md")} == pages  # written from saved runs


PYTHON = [
    (page.name, block) for page in PAGES for language, block in BLOCK.findall(page.read_text()) if language == "python"
]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[f"{page} {n}" for n, (page, _) in enumerate(PYTHON)])
def test_python_blocks_import_what_there_is(page, block):
    tree = ast.parse(block)
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, page, "exec"), {})


ELSEWHERE = ("architecture.md", "serving.md")
RUN = {"README.md": pytest.mark.slow, "profiling.md": pytest.mark.exhaustive, "kernels_int4_moe.md": ()}


@pytest.mark.parametrize(
    ("page", "block"), [pytest.param(*block, marks=RUN[block[0]]) for block in PYTHON if block[0] not in ELSEWHERE]
)
def test_python_blocks_run(page, block, folder):
    """Those of architecture.md are files, which tests/extending runs; those of serving.md talk to a server, in
    tests/server."""
    done = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
