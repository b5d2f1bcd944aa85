"""`python serve.py model.infer` is `infer serve model.infer`."""

import sys

from infer.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
