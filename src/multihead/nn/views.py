"""One head of a layer: its matrices as views of the parameters, and what they make of pairs of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .module import MultiHeadAttention


@dataclass(frozen=True, eq=False)
class Factored:
    """A matrix of low rank as a product, left @ right^T; nothing of the product's size is formed unless asked.

    Args:
        left: (m, r).
        right: (n, r).
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.left.shape[0], self.right.shape[0])

    def matrix(self) -> Tensor:
        """The product itself: (m, n)."""
        return self.left @ self.right.mT

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (m, k), singular values (k,), the largest first, and V (n, k): matrix = U diag(values) V^T.

        left = Q R and right = P T, so the product is Q (R T^T) P^T, and R T^T is as small as a head: k <= min(m, n, r).
        """
        (q, r), (p, t) = torch.linalg.qr(self.left), torch.linalg.qr(self.right)
        u, values, v = torch.linalg.svd(r @ t.mT, full_matrices=False)
        return q @ u, values, p @ v.mH

    def singular_values(self) -> Tensor:
        """Singular values, the largest first; those beyond the rank r of the factors are 0 and not listed."""
        r, t = (torch.linalg.qr(factor, mode="r")[1] for factor in (self.left, self.right))
        return torch.linalg.svdvals(r @ t.mT)

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of a square product, complex (r,); the others are 0.

        They are those of right^T @ left. In an OV matrix, positive ones say that the head copies (Elhage et al. 2021,
        A Mathematical Framework for Transformer Circuits).

        Raises:
            ValueError: the product is not square.
        """
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"eigenvalues: expected a square matrix, got {self.shape}")
        return torch.linalg.eigvals(self.right.mT @ self.left)

    def __repr__(self) -> str:
        return f"Factored({self.shape[0]} x {self.shape[1]}, rank {self.left.shape[1]} or less)"


class Head:
    """Head h of a layer. Its matrices are views: what is written to them is in the layer, and gradients pass.

    Write under torch.no_grad(), `head.W_Q[0] = 1`, or assign the whole, `head.W_Q = values`.

    Args:
        layer: the layer.
        index: h; its keys and values are those of head g = h // (H // G), which other heads may share.

    Raises:
        IndexError: there is no such head.
    """

    def __init__(self, layer: MultiHeadAttention, index: int) -> None:
        if not 0 <= index < layer.n_heads:
            raise IndexError(f"head: expected a number under H={layer.n_heads}, got {index}")
        self.layer = layer
        self.index = index
        self.kv_index = index // (layer.n_heads // layer.n_kv_heads)

    @property
    def W_Q(self) -> Tensor:
        """(D, d_model)."""
        return self._rows("Q")[0]

    @W_Q.setter
    def W_Q(self, values: Tensor) -> None:
        _write("W_Q", self.W_Q, values)

    @property
    def W_K(self) -> Tensor:
        """(D, d_context), shared by the heads of the group."""
        return self._rows("K")[0]

    @W_K.setter
    def W_K(self, values: Tensor) -> None:
        _write("W_K", self.W_K, values)

    @property
    def W_V(self) -> Tensor:
        """(E, d_context), shared by the heads of the group."""
        return self._rows("V")[0]

    @W_V.setter
    def W_V(self, values: Tensor) -> None:
        _write("W_V", self.W_V, values)

    @property
    def W_O(self) -> Tensor:
        """(d_model, E), this head's columns."""
        E = self.layer.d_value
        return self.layer.W_O.weight[:, self.index * E : (self.index + 1) * E]

    @W_O.setter
    def W_O(self, values: Tensor) -> None:
        _write("W_O", self.W_O, values)

    @property
    def b_Q(self) -> Tensor | None:
        """(D,), or None without biases."""
        return self._rows("Q")[1]

    @property
    def b_K(self) -> Tensor | None:
        """(D,), or None."""
        return self._rows("K")[1]

    @property
    def b_V(self) -> Tensor | None:
        """(E,), or None."""
        return self._rows("V")[1]

    @property
    def QK(self) -> Factored:
        """W_Q^T W_K (d_model, d_context): x_i QK x_j^T is the score of tokens i and j before scale, norms and biases.

        With rotary positions it is the score at distance 0; see `QK_at`.
        """
        return Factored(self.W_Q.mT, self.W_K.mT)

    def QK_at(self, distance: int) -> Factored:
        """QK for a key `distance` tokens before the query: W_Q^T R W_K, where R turns by that distance.

        Raises:
            ValueError: the layer has no rotary positions, so that QK is the same everywhere.
        """
        rotary = self.layer.rotary
        if rotary is None:
            raise ValueError("distance: expected a layer with rotary positions; QK does not depend on it here")
        columns = self.W_K.mT
        return Factored(self.W_Q.mT, rotary(columns[None, None], torch.full((len(columns),), -distance))[0, 0])

    @property
    def OV(self) -> Factored:
        """W_O W_V (d_model, d_context): what a token that is attended to in full adds to the output, as a matrix."""
        return Factored(self.W_O, self.W_V.mT)

    def _rows(self, part: str) -> tuple[Tensor, Tensor | None]:
        index = self.index if part == "Q" else self.kv_index
        return self.layer.rows(part, slice(index, index + 1))

    def __repr__(self) -> str:
        return f"Head({self.index}, key/value head {self.kv_index})"


def _write(name: str, view: Tensor, values: Tensor) -> None:
    values = torch.as_tensor(values)
    if values.shape != view.shape:
        raise ValueError(f"{name}: expected shape {tuple(view.shape)}, got {tuple(values.shape)}")
    with torch.no_grad():
        view.copy_(values)
