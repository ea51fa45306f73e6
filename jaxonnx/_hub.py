"""To Hugging Face: checkpoints of transformers by names of modules, uploads of folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from onnx import ModelProto

from jaxonnx._require import check_arguments, require
from jaxonnx.errors import Error
from jaxonnx.llm import write_checkpoint
from jaxonnx.lora import read_weight
from jaxonnx.model import Model, as_model


def export_safetensors(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    folder: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
    names: Mapping[str, str] | None = None,
    dequantize: bool = False,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    check: bool = True,
) -> None:
    """Write a checkpoint that transformers loads, as do the converters of llama.cpp and MLX.

    `model.safetensors` has the weights by transformers' names, also where onnxruntime-genai's
    builder, optimum or mobius renamed, joined, split or transposed them: a packed QKV matrix is
    taken apart, the 1 in the scales of Gemma's norms is taken off, rotary tables stay out, and an
    output layer that shares the embedding's table is written once. Beyond 5 GB there are several
    files and an index. `config.json` is that of the model's folder or of `original`, with
    `tie_word_embeddings`, the type and the classes (`head=`) as the file has them; of a
    vision-language model whose decoder alone is in the file it is the `text_config`. Files of the
    tokenizer are copied.
    Adapters are merged.

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      folder: of the checkpoint; files with the same names are replaced.
      original: the folder of the original checkpoint, which has `config.json` and the tokenizer; or
        this file. Folders of onnxruntime-genai have no `config.json`.
      names: the names in transformers of tensors whose own do not tell them.
      dequantize: write matrices in few bits as floating-point numbers, in float32 unless `dtype`
        says otherwise.
      dtype: of all weights; None keeps those of the file.
      check: check that the checkpoint has each row of each weight once, and read the files back
        before they replace others: names, types, shapes and numbers must be those of the model.

    Raises:
      InputError: the name of a tensor in transformers is not known; matrices are in few bits, and
        not to be dequantized; the folder has other weights, which transformers would load.
      ModelError: `check` finds a difference; the message names the tensor.
      Error: the package safetensors is missing.
      OSError: a file cannot be read or written.
    """
    check_arguments(export_safetensors, locals())
    net = as_model(model)
    write_checkpoint(
        net,
        Path(folder),
        partial(read_weight, net),
        original=original,
        names=names or {},
        dequantize=dequantize,
        dtype=dtype,
        check=check,
    )


_MODELS = ("*.onnx", "*.safetensors", "*.onnx_adapter")


def push_to_hub(
    folder: str | os.PathLike[str],
    repo: str,
    *,
    private: bool = False,
    message: str = "Upload a model trained with jaxonnx",
) -> str:
    """Upload a folder to the Hugging Face hub, and return the address of the commit.

    The folder is one of `Result.save`, of `Model.save` or of `export_safetensors`. The account is
    that of `huggingface-cli login` or of HF_TOKEN; errors of the network and of the account are
    those of huggingface_hub.

    Args:
      folder: all of its files are uploaded, but hidden ones.
      repo: the repository, "user/name"; created if missing.
      private: whether a repository that is made is private.
      message: of the commit.

    Raises:
      InputError: there is no such folder, or no model in it.
      Error: the package huggingface_hub is missing.
    """
    check_arguments(push_to_hub, locals())
    # an empty name is the working directory, with all that lies there
    files = [path for kind in _MODELS for path in Path(folder).rglob(kind)]
    require("folder", os.fspath(folder), files, "a folder with a model")
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        message = "uploads to the Hugging Face hub need it: pip install 'jaxonnx[hub]'"
        raise Error(message) from error
    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo, folder_path=os.fspath(folder), commit_message=message, ignore_patterns=[".*"]
    )
    return commit.commit_url
