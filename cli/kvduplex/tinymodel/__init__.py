"""A Qwen3 with random weights that the project generates itself, so that a first start needs no download.

It has the shapes, tokenizer and chat template of a real model and answers in real words, but it knows nothing.
"""

from kvduplex.tinymodel.sizes import SIZES, ModelSize
from kvduplex.tinymodel.store import ensure_model, model_folder

__all__ = ["SIZES", "ModelSize", "ensure_model", "model_folder"]
