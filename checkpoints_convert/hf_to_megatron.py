"""Convert a Hugging Face model folder to a Megatron checkpoint. The same as `megarl convert to-megatron`.

python checkpoints_convert/hf_to_megatron.py --hf models/Qwen3-14B --out models/Qwen3-14B-megatron --tp 4 --pp 2
"""

import sys

from megarl.cli import main

if __name__ == "__main__":
    main(["convert", "to-megatron", *sys.argv[1:]])
