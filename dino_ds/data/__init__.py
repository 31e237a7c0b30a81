"""Images in, batches of crops out: sources, multi-crop augmentation and the resumable loader."""
