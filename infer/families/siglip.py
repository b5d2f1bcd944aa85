"""SigLIP: each text is scored independently; texts are padded to their longest length, and the padding is read."""

from __future__ import annotations

from . import Family, TowerPair

FAMILY = Family(tower_pairs={"siglip": TowerPair(activation="sigmoid", pads=True, pooled=True)})
