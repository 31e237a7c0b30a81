"""`python -m dino_ds`: as `dino-ds`; launchers start it on several processes."""

from dino_ds.cli.main import main

main()
