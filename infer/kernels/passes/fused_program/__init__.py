"""Fusion of whole layers into `infer::chain`: match, lower, partition and encode."""
