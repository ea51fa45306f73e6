"""Language models: folders, formats, tokenizers, chat templates, texts as data, generation, names.

The room is entered through what it registers, its formats of files and its kind of data; through
`Model` (`generate`, `tokenizer`, `with_tokens`); by the losses of tokens; and for the names that
modules and tensors have in transformers, by `lora` and `export_safetensors`.
"""

from jaxonnx.llm._caches import without_cache
from jaxonnx.llm._checkpoints import write_checkpoint
from jaxonnx.llm._folders import ModelFolder
from jaxonnx.llm._formats import HubFormat
from jaxonnx.llm._generate import Continuations, Generator, generate
from jaxonnx.llm._module_names import (
    BESIDE_VISION,
    FAMILIES,
    HEAD,
    TABLE,
    Block,
    choose_blocks,
    describe_base,
    find_blocks,
    find_family,
    find_matrices,
    find_wrapper,
    includes_one,
    place_vectors,
    table_of,
    torch_axes,
)
from jaxonnx.llm._sampling import Sampling
from jaxonnx.llm._texts import Texts, take_packed_rows
from jaxonnx.llm._tokenizer import Tokenizer
from jaxonnx.llm._tokens_and_logits import (
    DECODER_TOKENS,
    find_embeddings,
    label_tokens,
    take_logits,
    take_next_logits,
    token_input,
    vocabulary,
)
from jaxonnx.llm._vocabulary import add_tokens
