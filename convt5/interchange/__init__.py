"""Import and export of models in other formats.

`mesh_tf` reads TensorFlow 1 checkpoints, `hugging_face` reads and writes T5 folders, `portable`
writes safetensors with a JSON description, `stablehlo` writes programs. `convt5.convert` is the
command line of all of them.
"""
