"""A tiny Qwen3 model with a character-level tokenizer, a chat template and an EOS, and chat data to go with it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS, PAD = "<|im_end|>", "<|pad|>"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 =+:\n"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}" + EOS + "\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tiny_model(
    directory: Path,
    *,
    family: str = "qwen3",
    tied: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Save model, tokenizer and generation config with transformers; returns the directory."""
    import torch
    import transformers
    from transformers import GenerationConfig

    tokenizer = build_tokenizer()
    prefix = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[family]
    shape: dict[str, Any] = {} if family == "qwen2" else {"head_dim": hidden_size // 4}
    shape["num_key_value_heads"] = 2
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        **{**shape, **settings},
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".bias"):  # transformers sets them to zero, where nobody could see them missing
                param.normal_(std=0.1)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each role, the EOS and the padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = TEMPLATE
    return fast


def write_chats(path: Path, count: int, *, seed: int = 0, letters: int = 5) -> Path:
    """`count` conversations that ask for a word's letters in order."""
    source = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            word = "".join(source.choice("abcdefgh") for _ in range(letters))
            messages = [
                {"role": "user", "content": f"sort {word}"},
                {"role": "assistant", "content": "".join(sorted(word))},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
