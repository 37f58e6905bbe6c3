"""The letters of the axes, the one shape checker, and the wording of its errors.

One letter an axis, everywhere: in code, in docs and in error messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LETTERS = {
    "B": "batch",
    "H": "query heads",
    "G": "key/value heads",
    "L": "queries",
    "S": "keys",
    "D": "width of a query/key head",
    "E": "width of a value head",
    "C": "classes of keys",
    "K": "keys listed for a row",
}

Index = slice | Tensor
"""Rows or keys of a problem: a slice with step 1, or a 1-D tensor of indices."""


def check_shape(name: str, tensor: Tensor, axes: Sequence[str], sizes: dict[str, int]) -> None:
    """Check that a tensor has these axes, and learn the sizes of letters not met before.

    Args:
        name: the argument's name, for the message.
        axes: one letter an axis, such as "BHLD".
        sizes: size of each letter so far; new letters are added.

    Raises:
        TypeError: it is no tensor.
        ValueError: the number of axes or a size does not fit.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    shape = tuple(tensor.shape)
    if len(shape) == len(axes):
        for letter, size in zip(axes, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                break
        else:
            return
    raise ValueError(f"{name}: expected shape {named(axes, sizes)}, got {shape}{_difference(axes, shape, sizes)}")


def check_broadcast(name: str, tensor: Tensor, axes: Sequence[str], sizes: dict[str, int]) -> Tensor:
    """View a tensor with every axis named, each of size 1 or full, without expanding it.

    Raises:
        ValueError: it does not broadcast to the axes.
    """
    shape = tensor.shape
    missing = len(axes) - len(shape)
    full = [sizes[letter] for letter in axes]
    if missing < 0 or any(size not in (1, full[missing + i]) for i, size in enumerate(shape)):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {named(axes, sizes)}, got {tuple(shape)}"
            f" (a size of 1 stands for all, missing axes on the left too)"
        )
    return tensor[(None,) * missing] if missing else tensor


def named(axes: Sequence[str], sizes: dict[str, int]) -> str:
    """Write axes with the sizes that are known: `(B=2, H, L=7)`."""
    parts = [f"{letter}={sizes[letter]}" if letter in sizes else letter for letter in axes]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _difference(axes: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> str:
    if len(shape) != len(axes):
        return f": {len(axes)} axes are needed, it has {len(shape)}"
    wrong = [(x, n) for x, n in zip(axes, shape, strict=True) if sizes.get(x, n) != n]
    return ": " + ", ".join(f"{x} ({LETTERS[x]}) is {n}, not {sizes[x]}" for x, n in wrong)


def check_integers(name: str, tensor: Tensor) -> None:
    """Check that a tensor holds integers.

    Raises:
        TypeError: it holds bools or floats.
    """
    if tensor.dtype is torch.bool or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        raise TypeError(f"{name}: expected integers, got {tensor.dtype}")


def take(tensor: Tensor, axis: int, index: Index) -> Tensor:
    """Take rows or keys along an axis; an axis of size 1 stands for all and is left as it is."""
    if tensor.shape[axis] == 1:
        return tensor
    if isinstance(index, slice):
        return tensor[(slice(None),) * (axis % tensor.ndim) + (index,)]
    return tensor.index_select(axis, index)


def positions_of(index: Index, size: int, device: torch.device | str) -> Tensor:
    """The positions (n,) that an index means on an axis of a given size."""
    if isinstance(index, slice):
        return torch.arange(*index.indices(size), device=device)
    return index.to(device)
