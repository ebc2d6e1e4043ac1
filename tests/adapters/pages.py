"""The program of a how-to page, run as it stands: its model is a server on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

from refold.testing.model import Script, ScriptedModel

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def program(page: str) -> str:
    """The first program of a page."""
    blocks = re.findall(r"^```python\n(.*?)^```", (HOWTO / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(blocks[0])


def printed(page: str, folder: Path, script: Script) -> str:
    """What it prints when OpenAI's SDK finds a scripted model where OpenAI should be."""
    with ScriptedModel(script) as model:
        there = {"OPENAI_BASE_URL": model.openai_url, "OPENAI_API_KEY": "any"}
        done = subprocess.run(
            [sys.executable, "-c", program(page)],
            cwd=folder,
            env={**os.environ, **there},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout
