"""Convert checkpoints to and from files of other formats: safetensors and PyTorch state dicts.

Start with `exporting.write_tensors` and `importing.import_checkpoint`.
"""
