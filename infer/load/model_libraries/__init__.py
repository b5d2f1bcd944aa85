"""Models that timm and torchvision build by name, `timm:convnext_tiny` and `torchvision:resnet50`, and timm's folders.

`library_model.py` defines what such a model tells, `timm_models.py` and `torchvision_models.py` ask the library, and
`open_library.py` joins the model with its weights.
"""
