"""Decoding of users' image and sound files in processes of their own: a crash of a decoder costs one request.

Pillow and libsndfile parse untrusted bytes in C. `processes` is the server's side, which gives each client its share;
`__main__` forks the children, which decode.
"""
