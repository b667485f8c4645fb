"""An engine of vLLM alone, for test_megarl.py: generates, sleeps, wakes, generates again.

python engine.py MODEL FILE     writes what it generated to the file, as JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [11] * 20]
NEW_TOKENS = 8


def generate(engine: Any) -> list[dict[str, list[Any]]]:
    """Return the tokens and log-probs of each prompt, the most probable token at each place."""
    from vllm import SamplingParams

    settings = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, logprobs=1, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], settings, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(answer.token_ids),
            "logprobs": [found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)],
        }
        for answer in answers
    ]


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM

    replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(self)

    torch.cuda.CUDAGraph.replay = counted
    engine = LLM(
        sys.argv[1], dtype="bfloat16", max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=8 << 20,
        enable_sleep_mode=True, seed=0, skip_tokenizer_init=True,
        # Without torch.compile, whose kernels would be Triton's, whole steps are captured.
        compilation_config={"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4]},
    )  # fmt: skip
    first = generate(engine)
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep(level=1)
    freed = torch.cuda.mem_get_info()[0] - awake
    engine.wake_up()
    found = {"first": first, "again": generate(engine), "replays": replays, "freed": freed}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
