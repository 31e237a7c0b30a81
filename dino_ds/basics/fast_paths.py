"""The fast paths that this process takes on a GPU: none until `dino_ds.method.fast_paths` has decided."""

TAKEN = set[str]()
