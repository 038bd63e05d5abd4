"""What every codec must keep, checked on one block of values: for authors of codecs, and for our own.

Legend: n rows, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.contracts.codec import Codec

_GUARD = 0xAB
_SIDE = 3


def check_codec(codec: Codec, values: Tensor) -> Tensor:
    """Encode and decode a block, and hold the codec to its contract.

    Args:
        codec: whose contract it is.
        values: ``[n, D]`` float32; NaN and infinities are left out of the error bound.

    Returns:
        What came back, ``[n, D]``.

    Raises:
        AssertionError: the codec wrote outside its rows, changed its input, made rows depend on their neighbours or on
            how they lie in memory, or is further from the values than its ``error_bound`` says.
    """
    decoded = _round_trip(codec, values)
    finite = values.isfinite()
    error = (decoded.double() - values.double()).abs()[finite]
    bound = codec.error_bound(values)
    assert bound.shape == values.shape, f"{codec.name}: error_bound gives {list(bound.shape)}"
    wrong = (error > bound.double()[finite]).nonzero()
    if wrong.numel():
        place = int(wrong[0, 0])
        value, came = float(values[finite][place]), float(decoded[finite][place])
        raise AssertionError(
            f"{codec.name}: {value!r} came back as {came!r}; the bound is {float(bound[finite][place])!r}"
        )
    if values.numel():
        (_check_shape if codec.is_elementwise else _check_rows)(codec, values, decoded)
    return decoded


def _check_shape(codec: Codec, values: Tensor, decoded: Tensor) -> None:
    """The block in another shape gives the same, since each value is written by itself."""
    sizes = codec.row_bytes(values.numel()), values.numel() * codec.row_bytes(1)
    assert sizes[0] == sizes[1], (
        f"{codec.name}: is elementwise, but row_bytes gives {sizes[0]}, not {sizes[1]}"
    )
    again = _round_trip(codec, values.reshape(1, -1)).view(values.shape)
    same = torch.allclose(decoded, again, rtol=0, atol=0, equal_nan=True)
    assert same, f"{codec.name}: what comes back depends on a block's shape"


def _check_rows(codec: Codec, values: Tensor, decoded: Tensor) -> None:
    """Each row alone gives the same, within the bound: an implementation may treat large blocks otherwise."""
    again = torch.cat([_round_trip(codec, row[None]) for row in values])
    bound = 2 * torch.cat([codec.error_bound(row[None]) for row in values]).double()
    near = ((decoded.double() - again.double()).abs() <= bound) | ~values.isfinite().all(1, keepdim=True)
    assert near.all(), f"{codec.name}: what comes back depends on other rows"


def _round_trip(codec: Codec, values: Tensor) -> Tensor:
    """Through bytes and back, with strangers' bytes and values on all sides."""
    rows, columns = values.shape
    wide = values.new_full((rows, columns + 2 * _SIDE), 7.0)
    wide[:, _SIDE:-_SIDE] = values
    size = rows * codec.row_bytes(columns)
    room = torch.full((size + 8,), _GUARD, dtype=torch.uint8, device=values.device)
    encoded = room[:size].view(rows, codec.row_bytes(columns))
    before = wide.clone()
    codec.encode(wide[:, _SIDE:-_SIDE], encoded)
    assert torch.equal(wide.nan_to_num(), before.nan_to_num()), f"{codec.name}: encode changed its input"
    assert (room[size:] == _GUARD).all(), f"{codec.name}: encode wrote behind its rows"
    codec.decode(encoded, wide[:, _SIDE:-_SIDE])
    sides = torch.cat([wide[:, :_SIDE], wide[:, -_SIDE:]], dim=1)
    assert (sides == 7.0).all(), f"{codec.name}: decode wrote beside its rows"
    return wide[:, _SIDE:-_SIDE].contiguous()
