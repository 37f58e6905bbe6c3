"""What transformers' mask functions mean, in the terms of `multihead.attention`.

transformers says which cells of a mask are open by a function of (batch, head, query, key) indices, composed
from a few building blocks (its `masking_utils`). The blocks below read as bounds; any other stays a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType

from torch import Tensor

_HOME = "transformers.masking_utils"


@dataclass(frozen=True, eq=False)
class Bounds:
    """Which keys a query at position p sees; every field narrows, and they combine by AND.

    Args:
        causal: keys at p and earlier.
        left, right: keys at p - left and later, at p + right and earlier; None is an open side.
        chunk: a size and the left padding (B,): keys of p's own chunk, counted from the first real token.
        packed: (B, S), keys that have the same number as p.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: tuple[int, Tensor] | None = None
    packed: Tensor | None = None

    def __and__(self, other: Bounds) -> Bounds | None:
        """Both at once, or None where one field cannot hold them."""
        grouped = [x for x in (self.chunk, self.packed, other.chunk, other.packed) if x is not None]
        if len(grouped) > 1:
            return None
        return Bounds(
            causal=self.causal or other.causal,
            left=_nearer(self.left, other.left),
            right=_nearer(self.right, other.right),
            chunk=self.chunk or other.chunk,
            packed=self.packed if other.packed is None else other.packed,
        )


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _all_of(mask_functions: tuple[Callable, ...]) -> Bounds | None:
    found: Bounds | None = Bounds()
    for function in mask_functions:
        bounds = recognise(function)
        found = None if found is None or bounds is None else found & bounds
    return found


def _in_packed_positions(mask_function: Callable, position_ids: Tensor) -> Bounds | None:
    # Always joined with packed_sequence_mask_function. Inside one packed sequence positions rise by one a
    # token, so distances are those between the raw positions; chunks are not.
    bounds = recognise(mask_function)
    return None if bounds is None or bounds.chunk is not None else bounds


# By the function's name in transformers.masking_utils; arguments are what its inner function closes over.
_BLOCKS: dict[str, Callable[..., Bounds | None]] = {
    "causal_mask_function": lambda: Bounds(causal=True),
    "bidirectional_mask_function": lambda: Bounds(),
    "sliding_window_overlay": lambda sliding_window: Bounds(left=sliding_window - 1),
    "sliding_window_bidirectional_overlay": lambda sliding_window: Bounds(left=sliding_window, right=sliding_window),
    "chunked_overlay": lambda chunk_size, left_padding: Bounds(chunk=(chunk_size, left_padding)),
    "packed_sequence_mask_function": lambda packed_sequence_mask: Bounds(packed=packed_sequence_mask),
    "remap_positions_for_packed_sequence": _in_packed_positions,
    "and_masks": _all_of,
}


def recognise(mask_function: Callable) -> Bounds | None:
    """The bounds that say the same as one of transformers' mask functions, or None for any other function."""
    if getattr(mask_function, "__module__", None) != _HOME or not isinstance(mask_function, FunctionType):
        return None
    block = _BLOCKS.get(mask_function.__qualname__.partition(".")[0])
    try:
        return None if block is None else block(**_closed_over(mask_function))
    except TypeError:  # another release of transformers, which closes over other names
        return None


def is_causal(mask_function: Callable) -> bool:
    """Whether a causal rule is part of a mask function: then queries and keys are the same tokens."""
    return any(getattr(part, "__name__", "") == "causal_mask_function" for part in _parts(mask_function))


def _parts(function: Callable) -> Iterator[Callable]:
    yield function
    if isinstance(function, FunctionType):
        for value in _closed_over(function).values():
            for inner in value if isinstance(value, tuple) else (value,):
                if callable(inner) and not isinstance(inner, Tensor):
                    yield from _parts(inner)


def _closed_over(function: FunctionType) -> dict[str, object]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
