"""Draws the README's picture: runs a command and saves what it printed as a terminal in SVG.

uv run docs/record.py docs/images/decode.svg scripts/decode.py --mesh nvl72 "Tell a story about a fox."
"""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 120


def main() -> None:
    """Runs the command of the arguments and writes the picture."""
    picture, script, *arguments = sys.argv[1:]
    ran = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=True)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ ", "green").append(f"uv run {script} {shlex.join(arguments)}", "bold"))
    where, *notes = ran.stderr.strip().splitlines()
    console.print(Text(where, "dim"))
    console.print(Text(ran.stdout.strip()))
    for note in notes:
        console.print(Text(note, "dim"))
    svg = console.export_svg(title=script)
    # The theme's fonts lie on a server; without them the viewer's own monospaced font serves.
    Path(picture).write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
