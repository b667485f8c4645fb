"""`vllm.LLM` with its defaults in a process of its own, which another program gives requests: `BareLlm`.

The process gets its settings as JSON, and a socket. Each line of JSON that it receives is a round: requests with prompt
and seed, and the sampling that all share. It answers with the seconds, and the number of tokens of each completion.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from megarl.processes.supervised_process import SupervisedProcess
from megarl.types import Request, SamplingSettings

SHARE_OF_GPU = 0.3
"""Share of the GPU that vLLM may use. Its default, 0.92, leaves nothing to another engine on the same GPU."""


class BareLlm:
    """The process, as a context. `settings` are arguments of `vllm.LLM`."""

    def __init__(self, model: Path, settings: dict[str, Any], log: Path, *, is_cpu: bool) -> None:
        arguments = json.dumps({"model": str(model), "is_cpu": is_cpu, **settings})
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        # torch looks for a GPU when megarl is imported, and then CUDA cannot be used in a forked process.
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        # A thread limit or a single connection is for ranks of megarl, not for vLLM by itself.
        environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        self._process = SupervisedProcess(
            [sys.executable, str(Path(__file__).resolve()), arguments],
            environment=environment,
            log_file=str(log),
            has_connection=True,
        )
        self._answers = self._process.connection.makefile("r", encoding="utf-8")
        self._log = log

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answers.close()
        self._process.kill()

    def start_seconds(self) -> float:
        """Wait until the engine can sample. Returns the seconds that it took to build it."""
        return self._answer()["start_seconds"]

    def sample(self, requests: Sequence[Request]) -> tuple[float, list[int]]:
        """Sample all requests. Returns the seconds, and the number of tokens of each."""
        sampling = asdict(requests[0].sampling)
        prompts = [{"prompt": r.prompt_token_ids.tolist(), "seed": r.seed} for r in requests]
        self._process.connection.sendall((json.dumps({"sampling": sampling, "requests": prompts}) + "\n").encode())
        answer = self._answer()
        return answer["seconds"], answer["tokens"]

    def _answer(self) -> dict[str, Any]:
        if not (line := self._answers.readline()):
            ended = self._process.end()
            tail = self._log.read_text(errors="replace")[-1500:] if self._log.exists() else ""
            raise RuntimeError(f"vllm.LLM {ended}: {tail}")
        return json.loads(line)


def serve(settings: dict[str, Any], connection: socket.socket) -> None:
    """Build the engine, then answer rounds until the other end closes the socket."""
    started = time.perf_counter()
    if settings.pop("is_cpu"):
        from megarl.platform import libraries

        libraries.prepare_vllm()
        # The patches hold for this process alone.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        settings["enforce_eager"] = True
    from vllm import LLM

    from megarl.engine.vllm_arguments import sampling_params

    llm: Any = LLM(**settings)
    file = connection.makefile("rw", encoding="utf-8")

    def answer(fields: dict[str, Any]) -> None:
        file.write(json.dumps(fields) + "\n")
        file.flush()

    answer({"start_seconds": time.perf_counter() - started})
    for line in file:
        message = json.loads(line)
        fields = message["sampling"]
        fields |= {"stop": tuple(fields["stop"]), "stop_token_ids": tuple(fields["stop_token_ids"])}
        sampling = SamplingSettings(**fields)
        prompts = [{"prompt_token_ids": request["prompt"]} for request in message["requests"]]
        params = [
            sampling_params(Request(str(number), np.array(request["prompt"], np.int32), sampling, request["seed"]))
            for number, request in enumerate(message["requests"])
        ]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        answer({"seconds": seconds, "tokens": [len(output.outputs[0].token_ids) for output in outputs]})


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
