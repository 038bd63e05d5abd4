"""Collections of quantized tables: made of float ones, looked up, cut over ranks or over the devices of one process."""

from __future__ import annotations

from shardwright_serving.tables import sharders as sharders  # known wherever there are such collections
