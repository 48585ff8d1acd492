"""What a person sees, and what is loaded to say that a file is wrong."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from trainer.display import Display


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_where_there_is_no_terminal_and_the_last_step_always() -> None:
    stream = io.StringIO()
    display = Display(0, 3, stream)
    for step in (1, 2, 3):
        display.step(step, 0.5, 1e-3)
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "step 3/3 loss 0.5000 lr 1.00e-03"
    assert "\r" not in stream.getvalue()


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    display = Display(1, 3, stream)
    for step in (2, 3):
        display.step(step, 0.5, 1e-3)
    display.say("a line")
    display.close()
    assert "3/3" in stream.getvalue()
    assert "a line\n" in stream.getvalue()


def test_a_mistake_in_the_file_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\n")
    code = (
        "import sys; from trainer.main import main; code = main(['--config', sys.argv[1]]); "
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("evalfleet-train: run.name: run.toml: is not set")
