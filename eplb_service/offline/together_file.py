"""Reads which experts tokens choose together: a matrix of pairs for each layer, or the choices of tokens, which are counted.

Pairs: numbers of shape [layers, experts, experts]. Its diagonal, where it has one, is each expert's
own tokens: they say how many tokens were seen. Choices: integers of shape [tokens, layers, k], -1 = none, as engines record
them for each token; they are read in pieces, more than once, so that memory stays bounded whatever the size of the file.
Anything that is no `.npy` or `.npz` file is taken for SGLang's dumps of mode `per_token`, which are read whole.

Pairs may come from another sample than the loads. They are scaled to each layer's tokens, and where that still gives a pair
more tokens than one of its experts has, it gets as many as that expert. Without a diagonal they are taken as counted on the
tokens of the loads; in a layer in which they cannot be, as if each token had chosen two experts. Plans and pair shares are the
same for any scale; only bounds on the nodes visited depend on it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.loads import read_token_choices
from eplb_service.ids import ids_text
from eplb_service.node_visits import PAIR_TOLERANCE, checked_pairs, distinct_nodes
from eplb_service.offline.load_file import Float64Array

NAMES = ("together", "pairs", "experts", "choices", "topk_ids")
"""Array names looked for in an `.npz` of several arrays, in this order."""

PIECE_BYTES = 1 << 22
"""Bytes of choices that are read at a time."""

CHOICES_MAX = 64
"""Most choices of a token in a layer: an array of more is none of choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoices:
    """A file of tokens' choices, read anew in pieces each time. num_tokens, num_rows, k: its shape.

    positions: where the L layers stand among its rows. held: its content, shape (tokens, rows, k), where it was read whole.
    """

    path: Path
    num_logical: int
    num_tokens: int
    num_rows: int
    k: int
    positions: tuple[int, ...]
    held: npt.NDArray[np.int32] | None = None

    def pieces(self) -> Iterator[npt.NDArray[np.int64]]:
        """Shape (tokens, L, k), int64, -1 = none. Raises InvalidInputError for an expert that is not there."""
        if self.held is not None:
            size = max(1, PIECE_BYTES // (self.num_rows * self.k * self.held.itemsize))
            for begin in range(0, self.num_tokens, size):
                yield np.take(self.held[begin : begin + size], self.positions, axis=1).astype(np.int64)
            return
        first = 0
        with _opened(self.path) as (file, header):
            row = self.num_rows * self.k * header.dtype.itemsize
            size = max(1, PIECE_BYTES // row)
            while first < self.num_tokens:
                wanted = min(size, self.num_tokens - first)
                data = _read(file, wanted * row, self.path)
                piece = np.frombuffer(data, header.dtype).reshape(wanted, self.num_rows, self.k)
                piece = np.take(piece, self.positions, axis=1)
                wrong = (piece < -1) | (piece >= self.num_logical) if header.dtype.kind == "i" else piece >= self.num_logical
                if wrong.any():
                    token, layer, place = np.argwhere(wrong)[0].tolist()
                    raise InvalidInputError(
                        f"{self.path}: token {first + token} layer row {self.positions[layer]} chose expert"
                        f" {piece[token, layer, place]}; the load has experts 0 to {self.num_logical - 1} (-1 = no choice)"
                    )
                yield piece.astype(np.int64)
                first += wanted

    def counted(self) -> Float64Array:
        """Pairs, shape (L, E, E), on the diagonal each expert's tokens; naming an expert twice counts once."""
        num_layers = len(self.positions)
        pairs = np.zeros((num_layers, self.num_logical, self.num_logical))
        for piece in self.pieces():
            for layer in range(num_layers):
                chosen = np.zeros((len(piece), self.num_logical + 1), np.float32)  # the last column takes -1
                np.put_along_axis(chosen, piece[:, layer], 1.0, axis=1)
                chosen = chosen[:, :-1]
                pairs[layer] += chosen.T @ chosen
        return pairs

    def mean_nodes(self, shares: Float64Array, weights: Float64Array) -> float | None:
        """Expected distinct nodes that a token visits in a layer; None without a choice. Shares, weights: of `node_shares`."""
        total, number = 0.0, 0
        for piece in self.pieces():
            more, seen = distinct_nodes(piece, shares, weights)
            total, number = total + more, number + seen
        return total / number if number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What a file says. pairs: shape (L, E, E), as PlanningProblem wants them; choices: None for a file of pairs."""

    pairs: Float64Array
    choices: TokenChoices | None = None


@dataclass(frozen=True, slots=True)
class _Header:
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    fortran: bool


def read_together(
    path: Path,
    loads: Float64Array,
    *,
    num_rows: int | None = None,
    positions: tuple[int, ...] | None = None,
    layer_ids: tuple[int, ...] | None = None,
) -> Together:
    """Pairs of a file, scaled to the loads. Loads: shape (L, E), tokens. Raises InvalidInputError with one sentence.

    num_rows, positions: a file may have this many layers instead, dense ones too, of which those at positions are the L.
    layer_ids: absolute ids of the L layers, where they are known; an engine's recording is read by them.
    """
    if path.suffix.lower() not in (".npy", ".npz"):
        recorded = _recorded(path, loads, layer_ids)
        return Together(pairs=_known_pairs(recorded.counted(), loads, path), choices=recorded)
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}")
    num_layers, num_logical = loads.shape
    places = {num_layers: tuple(range(num_layers))}
    if num_rows is not None and positions is not None:
        places.setdefault(num_rows, positions)
    square = (num_layers, num_logical, num_logical)
    with _opened(path) as (file, header):
        shape, kind = header.shape, header.dtype.kind
        if len(shape) == 3 and shape[0] in places and shape[1:] == square[1:] and kind in "iuf":
            data = _read(file, int(np.prod(shape)) * header.dtype.itemsize, path)
            given = np.frombuffer(data, header.dtype).reshape(shape, order="F" if header.fortran else "C")
            pairs = given[list(places[shape[0]])].astype(np.float64)
            return Together(pairs=_known_pairs(pairs, loads, path))
    if len(shape) != 3 or shape[1] not in places or not 1 <= shape[2] <= CHOICES_MAX or kind not in "iu" or not shape[0]:
        raise InvalidInputError(
            f"{path}: got {header.dtype} of shape {shape}; give pairs, numbers of shape (layers, experts, experts) = {square},"
            f" or tokens' choices, integers of shape (tokens, {num_layers} layers, at most {CHOICES_MAX} choices)"
        )
    if header.fortran:
        raise InvalidInputError(f"{path} is stored column by column; save numpy.ascontiguousarray of it: it is read in pieces")
    choices = TokenChoices(
        path=path,
        num_logical=num_logical,
        num_tokens=shape[0],
        num_rows=shape[1],
        k=shape[2],
        positions=places[shape[1]],
    )
    return Together(pairs=_known_pairs(choices.counted(), loads, path), choices=choices)


def _known_pairs(given: Float64Array, loads: Float64Array, path: Path) -> Float64Array:
    """`scaled_pairs` of a file. Raises InvalidInputError when it has none at all, so that no plan is made on nothing."""
    pairs = scaled_pairs(given, loads, str(path))
    if not pairs.any():
        raise InvalidInputError(
            f"{path}: no token chose two different experts that have load, so that it says nothing of experts chosen together;"
            f" record tokens with their top-k choices (k of 2 or more), or plan without --together"
        )
    return pairs


def _recorded(path: Path, loads: Float64Array, layer_ids: tuple[int, ...] | None) -> TokenChoices:
    """An engine's recording of tokens. Raises InvalidInputError when it has other layers or experts than the load."""
    found = read_token_choices(path)
    num_tokens, num_rows, k = found.experts.shape
    if layer_ids is not None and set(layer_ids) <= set(found.layer_ids):
        positions = tuple(found.layer_ids.index(layer) for layer in layer_ids)
    elif layer_ids is None and num_rows == loads.shape[0]:
        positions = tuple(range(num_rows))
    else:
        wanted = f"{loads.shape[0]} layers" if layer_ids is None else f"layers {ids_text(layer_ids)}"
        raise InvalidInputError(f"{path} has tokens' choices of layers {ids_text(found.layer_ids)}; the load has {wanted}")
    highest = int(found.experts.max())
    if highest >= loads.shape[1]:
        raise InvalidInputError(f"{path}: a token chose expert {highest}; the load has experts 0 to {loads.shape[1] - 1}")
    return TokenChoices(
        path=path,
        num_logical=loads.shape[1],
        num_tokens=num_tokens,
        num_rows=num_rows,
        k=k,
        positions=positions,
        held=found.experts,
    )


def scaled_pairs(given: Float64Array, loads: Float64Array, what: str) -> Float64Array:
    """Pairs for the tokens of a load; see the module. Given: shape (L, E, E), its diagonal the experts' tokens, 0 = unknown.

    Raises InvalidInputError for values that are not finite, below 0, or not symmetric.
    """
    num_layers, num_logical = loads.shape
    own = given[:, np.arange(num_logical), np.arange(num_logical)].copy()
    ceiling = np.maximum(given.max(axis=2), given.max(axis=1))
    checked_pairs(given, np.where(np.isfinite(ceiling), np.maximum(ceiling, 0.0), np.inf), tuple(range(num_layers)), what)
    pairs = given.copy()
    pairs[:, np.arange(num_logical), np.arange(num_logical)] = 0.0
    if not np.isfinite(own).all() or (own < 0).any():
        raise InvalidInputError(f"{what}: the diagonal must be finite and >= 0: the tokens of each expert, or 0 where unknown")
    most = np.minimum(loads[:, :, None], loads[:, None, :])
    for layer in range(num_layers):
        if own[layer].any():
            pairs[layer] *= loads[layer].sum() / own[layer].sum()
        else:
            above = pairs[layer] > most[layer] * (1 + PAIR_TOLERANCE)
            if above.any():
                pairs[layer] *= min(1.0, loads[layer].sum() / pairs[layer].sum())  # as if each token had chosen two
    return np.minimum(pairs, most)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], _Header]]:
    """An array's bytes behind its header. Raises InvalidInputError when the file holds none that can be read."""
    try:
        if path.stat().st_size == 0:
            raise InvalidInputError(f"{path} is empty")
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive, archive.open(_entry(path, archive.namelist())) as file:
                yield file, _header(file)
        else:
            with path.open("rb") as file:
                yield file, _header(file)
    except (OSError, EOFError, zipfile.BadZipFile, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InvalidInputError(f"cannot read {path} as a numpy file (.npy, .npz): {reason}") from error


def _entry(path: Path, names: list[str]) -> str:
    """The array to read: the only one, else the first with a name that is looked for."""
    arrays = [name for name in names if name.endswith(".npy")]
    if len(arrays) == 1:
        return arrays[0]
    found = next((f"{name}.npy" for name in NAMES if f"{name}.npy" in arrays), None)
    if found is None:
        held = [name.removesuffix(".npy") for name in arrays]
        raise InvalidInputError(f"{path} holds {len(arrays)} arrays {held[:8]}; name the one to read one of {list(NAMES)}")
    return found


def _header(file: IO[bytes]) -> _Header:
    """Shape and type of a `.npy` stream. Raises ValueError when it is none, or holds Python objects."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, not numbers")
    return _Header(tuple(int(size) for size in shape), dtype, bool(fortran))


def _read(file: IO[bytes], size: int, path: Path) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise InvalidInputError(f"{path} is cut short: {size - len(data)} bytes are missing")
    return data
