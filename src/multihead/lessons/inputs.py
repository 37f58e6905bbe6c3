"""The numbers that the lessons start from: tokens and matrices small enough to follow by hand.

Matrices have the layer's form, a row an output: W_Q, W_K, W_V are (H, D, d_model), W_O is (d_model, H*D).
"""

from __future__ import annotations

import torch

# One token of eight numbers, and a matrix for each of two heads: (H=2, D=4, d_model=8).
TOKEN = torch.tensor([0.1, 0.5, -0.3, 0.8, -0.2, 0.4, 0.7, -0.1])
PROJECTIONS = torch.tensor(
    [
        [
            [0.9, 0.1, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0],
            [0.0, 0.8, 0.2, 0.0, 0.0, 0.1, 0.0, 0.0],
            [0.0, 0.0, 0.7, 0.3, 0.0, 0.0, 0.1, 0.0],
            [0.1, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.2],
        ],
        [
            [0.2, 0.0, 0.0, 0.0, 0.9, 0.1, 0.0, 0.0],
            [0.0, 0.1, 0.0, 0.0, 0.0, 0.8, 0.2, 0.0],
            [0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.9, 0.3],
            [0.0, 0.0, 0.0, 0.2, 0.1, 0.0, 0.0, 0.8],
        ],
    ]
)

# Four tokens of six numbers, and two heads of three.
WORDS = ["The", "cat", "sat", "down"]
SENTENCE = torch.tensor(
    [
        [1.0, 0.2, -0.3, 0.5, -0.1, 0.8],
        [0.3, 0.9, 0.1, -0.2, 0.6, 0.4],
        [-0.2, 0.4, 0.8, 0.3, -0.5, 0.1],
        [0.6, -0.1, 0.2, 0.9, 0.3, -0.4],
    ]
)
W_Q = torch.tensor(
    [
        [
            [-0.29, 0.54, 1.15, 0.43, -0.91, 0.28],
            [1.26, 1.03, 2.02, 2.22, -3.58, 2.71],
            [1.4, 2.66, 1.56, 1.52, 4.53, -2.21],
        ],
        [
            [2.02, 2.52, -0.38, -0.18, 1.01, 2.57],
            [-0.73, 1.36, 2.86, 1.06, -2.26, 0.7],
            [1.14, -0.16, 0.91, 2.38, 1.84, -2.3],
        ],
    ]
)
W_K = torch.tensor(
    [
        [
            [0.54, -0.09, -0.11, 0.47, -0.13, 0.24],
            [0.06, 0.63, 0.14, -0.19, 0.6, 0.02],
            [-0.01, 0.28, 0.76, 0.55, -0.26, -0.15],
        ],
        [
            [0.57, -0.09, -0.09, 0.52, -0.09, 0.19],
            [0.23, 0.6, 0.28, 0.18, 0.88, -0.34],
            [-0.16, 0.3, 0.64, 0.24, -0.5, 0.15],
        ],
    ]
)
W_V = torch.tensor(
    [
        [
            [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        ],
        [
            [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        ],
    ]
)
W_O = torch.tensor(
    [
        [0.8, 0.1, 0.0, 0.2, 0.0, 0.1],
        [0.1, 0.7, 0.1, 0.0, 0.3, 0.0],
        [0.0, 0.2, 0.9, 0.1, 0.0, 0.2],
        [0.3, 0.0, 0.1, 0.8, 0.1, 0.0],
        [0.0, 0.2, 0.0, 0.1, 0.7, 0.2],
        [0.1, 0.0, 0.2, 0.0, 0.1, 0.9],
    ]
)

# Six tokens of four types. Numbers 0 and 1 of a token say that its type is A or B; 2 and 3 say where it stands, as
# the sine and the cosine of i/2.
LABELS = ["A0", "B1", "A2", "C3", "B4", "D5"]
_PLACES = torch.arange(len(LABELS)) / 2
TYPED = torch.stack(
    [
        torch.tensor([float(label[0] == "A") for label in LABELS]),
        torch.tensor([float(label[0] == "B") for label in LABELS]),
        _PLACES.sin(),
        _PLACES.cos(),
    ],
    1,
)
# W_Q and W_K of a head that reads types, and of one that reads places: (H=2, D=2, d_model=4).
READERS = torch.tensor(
    [
        [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]],
        [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]],
    ]
)

# What two heads are to give to three tokens when the last one asks; NaN is left open.
QUESTION = ["server", "request", "it"]
FIRST_ANSWER = torch.tensor([0.5871, 0.1859, 0.2270])
SECOND_ANSWER = torch.tensor([float("nan"), 0.5880, float("nan")])
