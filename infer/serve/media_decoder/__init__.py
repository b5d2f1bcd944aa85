"""Decoding of users' image and sound files in processes of their own: a crash of a decoder costs one request.

Pillow and libsndfile parse untrusted bytes in C. `processes` starts the children, of which `__main__` is
one, and gives each client its share of them.
"""
