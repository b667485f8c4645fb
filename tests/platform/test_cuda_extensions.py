"""Libraries that cannot be imported are found before they are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.platform import cuda_extensions
from megarl.platform.cuda_extensions import import_faults_of


def test_each_module_is_tried_and_a_crash_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "sound_one": "print('noise')",
        "broken_one": "raise OSError('libcuda.so.1: cannot open' + chr(10) + 'more')",
        "crashing_one": "import os; os.abort()",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_faults_of(("sound_one", "broken_one", "crashing_one", "sound_one")) == {
        "broken_one": "OSError: libcuda.so.1: cannot open",
        "crashing_one": "its process ended with -6",
    }


def test_deep_ep_is_tried_where_it_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_extensions, "runs_on_cpu", lambda: True)
    assert cuda_extensions.deep_ep_fault() == "this environment is one for CPUs"
    monkeypatch.setattr(cuda_extensions, "runs_on_cpu", lambda: False)
    assert cuda_extensions.deep_ep_fault() == "it is not installed"
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem_host.so.3: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cuda_extensions, "has_driver", lambda: False)
    assert cuda_extensions.deep_ep_fault() is None, "a login node cannot tell"
    monkeypatch.setattr(cuda_extensions, "has_driver", lambda: True)
    assert cuda_extensions.deep_ep_fault() == "OSError: libnvshmem_host.so.3: cannot open"


def test_without_a_driver_or_on_the_cpu_only_transformer_engine_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_extensions, "has_driver", lambda: False)
    monkeypatch.setattr(cuda_extensions.transformer_engine, "import_fault", lambda: "OSError: libcudnn.so")
    assert cuda_extensions.import_faults() == {"transformer_engine.pytorch": "OSError: libcudnn.so"}
    monkeypatch.setattr(cuda_extensions, "has_driver", lambda: True)
    monkeypatch.setattr(cuda_extensions, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(cuda_extensions, "find_spec", lambda name: True if name == "flashinfer" else None)
    monkeypatch.setattr(cuda_extensions, "import_faults_of", lambda modules: {modules[0]: "ImportError: x"})
    assert cuda_extensions.import_faults().keys() == {"transformer_engine.pytorch", "flashinfer"}
    monkeypatch.setattr(cuda_extensions, "runs_on_cpu", lambda: True)
    assert cuda_extensions.import_faults().keys() == {"transformer_engine.pytorch"}
