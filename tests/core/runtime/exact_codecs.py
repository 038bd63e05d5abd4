"""Codecs that lose nothing, in forms that betray whoever mixes up shape, order or place of what they wrote."""

from __future__ import annotations

import torch

from shardwright import Codec, hookimpl


class Doubles(Codec):
    """Each value by itself, as its negative in 8 bytes."""

    name, aliases, is_elementwise = "doubles", ("float64",), True

    def row_bytes(self, num_columns):
        return 8 * num_columns

    def encode(self, values, encoded):
        encoded.view(torch.float64).copy_(-values)

    def decode(self, encoded, values):
        values.copy_(-encoded.view(torch.float64))

    def error_bound(self, values):
        return torch.zeros_like(values)


class Mirrored(Codec):
    """A row's bytes backwards, after a byte for its number of columns: rows of another width are not read."""

    name, aliases = "mirrored", ()

    def row_bytes(self, num_columns):
        return 4 * num_columns + 1

    def encode(self, values, encoded):
        encoded[:, 0] = values.shape[1]
        encoded[:, 1:] = values.contiguous().view(torch.uint8).flip(1)

    def decode(self, encoded, values):
        assert (encoded[:, 0] == values.shape[1]).all()
        mirrored = encoded[:, 1:].flip(1).reshape(-1).clone()
        values.copy_(mirrored.view(torch.float32).view(values.shape))

    def error_bound(self, values):
        return torch.zeros_like(values)


class WholeOnly(Mirrored):
    """Refuses partial sums."""

    name, carries_partial_sums = "whole_only", False


class AsItIs(Doubles):
    """Declares that it changes nothing."""

    name, aliases, is_identity = "as_it_is", (), True


class ExactCodecs:
    @hookimpl
    def shardwright_codecs(self):
        return [Doubles, Mirrored, WholeOnly, AsItIs]
