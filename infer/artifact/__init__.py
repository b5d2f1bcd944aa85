"""The output folder `NAME.infer/`: its files, its manifest, its golden inputs, and how it is published."""
