"""Convert checkpoints to and from files of other formats: safetensors and PyTorch state dicts.

Floor 5, inside checkpoint: imports `restoring`, `saving`, `format` and the listing. Start with
`exporting.write_tensors` and `importing.import_checkpoint`.
"""
