"""Small random text encoders, and tokenizers that need no files: parts of the small pipelines."""

from __future__ import annotations

from typing import Any

from chunkflow_compile.catalog.sizes import Config, build_model

# Width of the text encoders, and so of the prompt embeddings.
TEXT = 64
_MARKS = ("<pad>", "</s>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def tokenizer(longest: int = 512) -> Any:
    """A tokenizer of bytes, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {mark: i for i, mark in enumerate(_MARKS)}
    words |= {letter: len(words) + i for i, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<pad>", model_max_length=longest
    )
    found.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    return found


_VOCABULARY = len(_MARKS) + 256


# The fields by which transformers call the width of most encoders.
_WIDTHS: Config = {
    "vocab_size": _VOCABULARY,
    "hidden_size": TEXT,
    "intermediate_size": 4 * TEXT,
    "num_attention_heads": 4,
}


def t5(width: int = TEXT, class_name: str = "T5EncoderModel") -> Any:
    """T5's encoder.  ``width``: of its embeddings."""
    return build_model(class_name, vocab_size=_VOCABULARY, d_model=width, d_kv=16, d_ff=256, num_heads=4, num_layers=2)


def umt5() -> Any:
    """Wan's encoder."""
    return t5(class_name="UMT5EncoderModel")


def clip(class_name: str = "CLIPTextModel") -> Any:
    """CLIP's text encoder.  SD3 reads the one ``WithProjection``."""
    marks = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return build_model(
        class_name, **_WIDTHS, num_hidden_layers=3, max_position_embeddings=77, projection_dim=TEXT, **marks
    )


def qwen3() -> Any:
    """The encoder of FLUX.2 and Z-Image."""
    return build_model("Qwen3ForCausalLM", **_WIDTHS, num_hidden_layers=3, num_key_value_heads=2, head_dim=16)


def qwen_vl() -> Any:
    """The encoder of Qwen-Image, for text and images."""
    mark = {name: i for i, name in enumerate(_MARKS)}
    return build_model(
        "Qwen2_5_VLForConditionalGeneration",
        text_config={
            **_WIDTHS,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        },
        vision_config={
            "depth": 2,
            "hidden_size": TEXT,
            "intermediate_size": 2 * TEXT,
            "num_heads": 4,
            "out_hidden_size": TEXT,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=mark["<|vision_start|>"],
        vision_end_token_id=mark["<|vision_end|>"],
        image_token_id=mark["<|image_pad|>"],
    )


def llama() -> Any:
    """HunyuanVideo's encoder."""
    return build_model("LlamaModel", **_WIDTHS, num_hidden_layers=4, pad_token_id=0)


class TextAndImages:
    """What Qwen's processor does, without torchvision: the pixels as patches, and a mark in the text for each four."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = tokenizer
        self._pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56})

    def __call__(self, *, text: list[str], images: Any, **_: Any) -> Any:
        from transformers import BatchFeature

        pixels = self._pixels(images=images, return_tensors="pt")
        marks = "<|image_pad|>" * (int(pixels["image_grid_thw"][0].prod()) // 4)
        tokens = self.tokenizer([t.replace("<|image_pad|>", marks) for t in text], padding=True, return_tensors="pt")
        return BatchFeature({**tokens, **pixels})
