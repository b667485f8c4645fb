"""Libraries for images and sound that do not work with this torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.util, logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from megarl.platform.cpu import media_libraries
media_libraries.hide_broken()
print([name for name in ("torchvision", "torchaudio") if importlib.util.find_spec(name)])
media_libraries.provide_torchvision()
from torchvision.transforms.v2 import functional
try:
    functional.resize
except ImportError as error:
    print(error)
"""


def test_a_broken_library_is_hidden_and_a_working_one_stays(tmp_path: Path) -> None:
    for name, code in (("torchvision", "import torchvision.io"), ("torchaudio", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    (tmp_path / "torchvision/io.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}", "PATH": ""}
    command = [sys.executable, "-S", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    warning, found, error = done.stdout.splitlines()
    assert (
        warning == "torchvision fails to import with this torch and is hidden: operator torchvision::nms does not exist"
    )
    assert found == "['torchaudio']"
    assert error.endswith("functional.resize: torchvision is not installed; images are not supported")
