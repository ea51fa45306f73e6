"""Uploads of folders to the Hugging Face hub."""

import os
from pathlib import Path

from jaxonnx._require import check_arguments, require
from jaxonnx.errors import Error

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
