"""A text as a model's tokens: ids, what to call them, and where each stands in the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multihead.heads.patterns import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Encoded:
    """One tokenised text; `spans` are each token's characters (begin, end), (0, 0) for what is no text."""

    text: str
    tokens: Tokens
    spans: list[tuple[int, int]]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, causal: bool) -> Encoded:
    """Tokenise a text as the model wants it, special tokens included."""
    found: Any = tokenizer(text, verbose=False, return_offsets_mapping=bool(tokenizer.is_fast))
    ids = list(found["input_ids"])
    strings = [display(tokenizer, i) for i in ids]
    spans = [tuple(span) for span in found["offset_mapping"]] if tokenizer.is_fast else _search(text, strings)
    return Encoded(text, Tokens.of(ids, strings, special_ids(tokenizer), causal), spans)


def cut(encoded: Encoded, most: int) -> Encoded:
    """Return the first `most` tokens; special tokens that close the text keep their place at its end."""
    ids, strings = encoded.tokens.ids, encoded.tokens.strings
    if len(ids) <= most:
        return encoded
    closing = 0
    while closing < most and encoded.tokens.special[len(ids) - 1 - closing]:
        closing += 1
    keep = [*range(most - closing), *range(len(ids) - closing, len(ids))]
    tokens = Tokens(
        ids[keep],
        [strings[i] for i in keep],
        encoded.tokens.special[keep],
        encoded.tokens.punctuation[keep],
        encoded.tokens.causal,
    )
    return Encoded(encoded.text, tokens, [encoded.spans[i] for i in keep])


def wrap(tokenizer: PreTrainedTokenizerBase, ids: list[int], causal: bool) -> Tokens:
    """Return ids between the special tokens that the tokenizer puts around any text."""
    around: Any = tokenizer("a", verbose=False, return_special_tokens_mask=True)
    inner = [place for place, added in enumerate(around["special_tokens_mask"]) if not added]
    ids = [*around["input_ids"][: inner[0]], *ids, *around["input_ids"][inner[-1] + 1 :]]
    return Tokens.of(ids, [display(tokenizer, i) for i in ids], special_ids(tokenizer), causal)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that are no text; the one for unknown words is text, unless it has other duties."""
    roles = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")
    busy = {getattr(tokenizer, role, None) for role in roles}
    unknown = getattr(tokenizer, "unk_token_id", None)
    return {i for i in tokenizer.all_special_ids if i in busy or i != unknown}


def vocabulary(tokenizer: Any, size: int) -> list[int]:
    """Return the ids under `size` that stand for text: no special or added tokens, no placeholders."""
    left_out = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    names = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    named = {i for i, name in enumerate(names) if name is not None and not name.startswith("[unused")}
    return sorted(named - left_out)


def display(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return what a reader would call a token: its text, a leading space included, where it has one."""
    name: Any = tokenizer.convert_ids_to_tokens(token)
    if isinstance(name, str) and name.startswith("▁"):  # SentencePiece's space, which decoding drops
        return name.replace("▁", " ")
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return text or str(name)


def _search(text: str, strings: list[str]) -> list[tuple[int, int]]:
    """Find each token in the text after the one before it."""
    spans, cursor = [], 0
    for string in strings:
        piece = string.strip().removeprefix("##")
        begin = text.lower().find(piece.lower(), cursor) if piece else -1
        spans.append((begin, begin + len(piece)) if begin >= 0 else (0, 0))
        cursor = max(cursor, spans[-1][1])
    return spans
