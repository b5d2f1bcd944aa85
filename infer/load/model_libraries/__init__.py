"""Models that timm and torchvision build by name, `timm:convnext_tiny` and `torchvision:resnet50`, and timm's folders.

`library_model.py` defines what such a model tells, `timm_models.py` and `torchvision_models.py` ask the library, and
`open_library.py` joins the model with its weights.
"""

from __future__ import annotations

from .open_library import load_library_model, load_timm_folder

__all__ = ["load_library_model", "load_timm_folder"]
