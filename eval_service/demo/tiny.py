"""A tiny Qwen3 in Hugging Face format, made here and now: random weights under a seed, and a byte-level tokenizer.

Invariants: the same seed gives the same bytes; every text can be tokenized (256 byte tokens, no unknown one); the
vocabulary has no padding, so each id that the model can emit can be decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, IM_START, IM_END)
BYTES = 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinySpec:
    """The shape of the model; the default has about 0.4 million parameters."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    context_length: int = 256


def build_model(directory: Path, *, seed: int = 0, spec: TinySpec | None = None) -> Path:
    """Write config, tokenizer, generation config and float32 safetensors into `directory`, and return it."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(spec)
    config = _config(tokenizer, spec or TinySpec())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**_token_ids(tokenizer), do_sample=False)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


def build_tokenizer(spec: TinySpec | None = None) -> PreTrainedTokenizerFast:
    """256 byte tokens and four special ones; <|im_end|> ends a turn, and is the EOS that the model learns to emit."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=(spec or TinySpec()).context_length,
        clean_up_tokenization_spaces=False,
    )


def _config(tokenizer: PreTrainedTokenizerFast, spec: TinySpec) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        tie_word_embeddings=True,
        attention_bias=False,
        dtype="float32",
        **_token_ids(tokenizer),
    )


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
