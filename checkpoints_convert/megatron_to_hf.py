"""Convert a Megatron checkpoint to a Hugging Face model folder. The same as `megarl convert to-hf`.

python checkpoints_convert/megatron_to_hf.py --megatron models/Qwen3-14B-megatron --out models/Qwen3-14B-again
"""

import sys

from megarl.cli import main

if __name__ == "__main__":
    main(["convert", "to-hf", *sys.argv[1:]])
